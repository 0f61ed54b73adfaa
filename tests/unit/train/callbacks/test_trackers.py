"""Trackers get rank 0's numbers, the config and the right end; their libraries are stand-ins with the documented API."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from unirun.errors import UsageError
from unirun.train.callbacks import MLflowCallback, TensorBoardCallback, TrainingCallback, WandbCallback

Call = tuple[str, tuple[Any, ...], dict[str, Any]]

CONFIG = {"lr": 0.1, "model": {"layers": [1, 2], "path": Path("/m")}}


def report(iteration: int) -> list[dict[str, Any]]:
    """The reports of two ranks, of which rank 1 is of no interest here."""
    ours = {"_timestamp": 100.0 + iteration, "_time_this_iter_s": 0.5, "_training_iteration": iteration}
    first = {
        "loss": torch.tensor(1.0 / iteration),
        "acc@1": np.float32(0.5),
        "val": {"f1": 0.25},
        "note": "warm",
        "all": torch.ones(3),
    }
    return [first | ours, {"loss": -1.0} | ours]


class Recorded:
    """An object of a library: it writes its calls into a list that all share. `returns` has what methods return."""

    def __init__(self, calls: list[Call], **returns: Any) -> None:
        self._calls, self._returns = calls, returns

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, args, kwargs))
            returned = self._returns.get(name)
            if isinstance(returned, BaseException):
                raise returned
            return returned

        return method


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch, calls: list[Call]) -> None:
    library = Recorded(calls, SummaryWriter=Recorded(calls))
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, calls: list[Call]) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Recorded(calls, init=Recorded(calls)))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, calls: list[Call]) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", Recorded(calls))


def run(callback: TrainingCallback, *iterations: int, error: BaseException | None = None) -> None:
    callback.start_training("/logs", CONFIG)
    for iteration in iterations:
        callback.handle_result(report(iteration))
    callback.finish_training(error)


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_gets_scalars_at_the_step_and_the_time_of_the_report(calls: list[Call]) -> None:
    run(TensorBoardCallback(), 2)
    assert calls[0] == ("SummaryWriter", ("/logs",), {"flush_secs": 5})
    name, (tag, text), _ = calls[1]
    assert (name, tag) == ("add_text", "config")
    assert text.splitlines()[:3] == ["    {", '      "lr": 0.1,', '      "model": {']
    at = {"global_step": 2, "walltime": 102.0}
    assert calls[2:] == [
        ("add_scalar", ("loss", 0.5), at),
        ("add_scalar", ("acc@1", 0.5), at),
        ("add_scalar", ("val/f1", 0.25), at),
        ("add_scalar", ("_time_this_iter_s", 0.5), at),
        ("close", (), {}),
    ]


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_in_a_directory_of_its_own_gets_the_error(calls: list[Call]) -> None:
    run(TensorBoardCallback("/boards/1"), error=ValueError("boom"))
    assert calls[0][1] == ("/boards/1",)
    assert calls[2:] == [("add_text", ("error", "    ValueError: boom"), {}), ("close", (), {})]


@pytest.mark.usefixtures("wandb")
def test_wandb_gets_the_config_and_numbers_on_an_axis_that_may_go_back(calls: list[Call]) -> None:
    run(WandbCallback("project", name="first"), 4, 2)
    config = {"lr": 0.1, "model": {"layers": [1, 2], "path": "/m"}}
    assert calls == [
        ("init", (), {"dir": "/logs", "config": config, "project": "project", "name": "first"}),
        ("define_metric", ("training_iteration",), {}),
        ("define_metric", ("*",), {"step_metric": "training_iteration"}),
        ("log", (logged(4, 0.25),), {}),
        ("log", (logged(2, 0.5),), {}),
        ("finish", (), {"exit_code": 0}),
    ]


def logged(iteration: int, loss: float) -> dict[str, float]:
    numbers = {"loss": loss, "acc@1": 0.5, "val/f1": 0.25, "_time_this_iter_s": 0.5}
    return {"training_iteration": iteration} | numbers


@pytest.mark.usefixtures("wandb")
def test_wandb_has_the_directory_that_was_asked_for_and_an_exit_code(calls: list[Call]) -> None:
    run(WandbCallback(dir="/runs"), error=KeyboardInterrupt())
    assert calls[0][2]["dir"] == "/runs"
    assert calls[0][2]["project"] is None
    assert calls[-1] == ("finish", (), {"exit_code": 1})


@pytest.mark.usefixtures("mlflow")
def test_mlflow_gets_params_and_metrics_with_names_that_it_allows(calls: list[Call]) -> None:
    run(MLflowCallback("experiment", "sqlite:///x", run_name="first"), 2)
    metrics = {"loss": 0.5, "acc_1": 0.5, "val/f1": 0.25, "_time_this_iter_s": 0.5}
    assert calls == [
        ("set_tracking_uri", ("sqlite:///x",), {}),
        ("set_experiment", ("experiment",), {}),
        ("start_run", (), {"run_name": "first"}),
        ("log_params", ({"lr": "0.1", "model/layers": "[1, 2]", "model/path": "/m"},), {}),
        ("log_metrics", (metrics,), {"step": 2}),
        ("end_run", ("FINISHED",), {}),
    ]


@pytest.mark.usefixtures("mlflow")
def test_mlflow_has_its_own_defaults_and_a_run_that_failed(calls: list[Call]) -> None:
    run(MLflowCallback(), error=ValueError("boom"))
    assert [name for name, _, _ in calls] == ["start_run", "log_params", "end_run"]
    assert calls[-1] == ("end_run", ("FAILED",), {})


def test_no_run_of_mlflow_is_left_open_when_its_params_are_refused(
    monkeypatch: pytest.MonkeyPatch, calls: list[Call]
) -> None:
    refused = ValueError("a param has another value in this run")
    monkeypatch.setitem(sys.modules, "mlflow", Recorded(calls, log_params=refused))
    with pytest.raises(ValueError, match="another value"):
        MLflowCallback().start_training("/logs", CONFIG)
    assert calls[-1] == ("end_run", ("FAILED",), {})


TRACKERS = [(TensorBoardCallback, "tensorboard"), (WandbCallback, "wandb"), (MLflowCallback, "mlflow")]


@pytest.mark.parametrize(("tracker", "library"), TRACKERS)
def test_a_tracker_without_its_library_cannot_be_made(
    tracker: type[TrainingCallback], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    problem = f"{tracker.__name__} needs {library}, which is not installed; run: pip install {library}"
    with pytest.raises(UsageError, match=f"^{problem}$"):
        tracker()


def test_a_folder_that_wandb_has_written_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UsageError, match="needs wandb, which is not installed"):
        WandbCallback()


def test_a_library_is_not_imported_before_the_run_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("import no_such_module_of_wandb")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    callback = WandbCallback()
    with pytest.raises(
        UsageError, match=r"cannot be imported: No module .*; run: pip install --upgrade wandb"
    ) as caught:
        callback.start_training("/logs", CONFIG)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
