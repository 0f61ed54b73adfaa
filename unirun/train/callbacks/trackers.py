"""Results in experiment trackers: TensorBoard, Weights & Biases, MLflow.

Each logs the numbers that rank 0 reports, those of nested dicts as ``outer/inner``, with the iteration as the step, and
the config once at the start. The libraries are no dependencies of unirun. A callback whose library is missing cannot be
made, so that no worker starts before that is told; the library is imported when the run starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from unirun.errors import UsageError
from unirun.train.callbacks.base import TrainingCallback, flat, numbers, plain, readable, text
from unirun.train.callbacks.progress import _ITERATION, _TIMESTAMP


class TensorBoardCallback(TrainingCallback):
    """Writes an event file for TensorBoard to `logdir`, by default the run's directory: ``tensorboard --logdir …``.

    The config is a text named ``config``, and so is the traceback of the error with which a run ends (``error``).
    Raises `UsageError` when tensorboard is not installed.
    """

    def __init__(self, logdir: str | None = None) -> None:
        _find("tensorboard", "tensorboard", self)
        self._logdir = logdir
        self._writer: Any = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Open the event file, and write the config."""
        library = _load("torch.utils.tensorboard", "tensorboard", self)
        # By default what was reported shows up two minutes later, and a killed process loses that.
        self._writer = library.SummaryWriter(self._logdir or logdir, flush_secs=5)
        self._writer.add_text("config", _code(json.dumps(plain(config), indent=2)))

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Write the numbers of rank 0."""
        step, time = results[0][_ITERATION], results[0][_TIMESTAMP]
        for name, value in _metrics(results[0]).items():
            self._writer.add_scalar(name, value, global_step=step, walltime=time)

    def finish_training(self, error: BaseException | None) -> None:
        """Write the error if there is one, and close the file."""
        if error is not None:
            self._writer.add_text("error", _code("".join(traceback.format_exception(error))))
        self._writer.close()


class WandbCallback(TrainingCallback):
    """Logs to a run of Weights & Biases, which has the exit code 1 when the run ends with an error.

    `init` goes to `wandb.init`, as ``name``, ``entity``, ``group`` or ``mode="offline"``; without ``dir`` in it, files
    are in the run's directory. The x-axis of all charts is the metric ``training_iteration``; wandb's own step counts
    the reports.
    Raises `UsageError` when wandb is not installed.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        _find("wandb", "wandb", self)
        self._init = {"project": project, **init}
        self._run: Any = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Start a run with the config."""
        library = _load("wandb", "wandb", self)
        self._run = library.init(**{"dir": logdir, "config": plain(config), **self._init})
        # wandb drops what has a lower step than it has had, as after a restart from a checkpoint. An axis of ours may
        # go back. It cannot have unirun's name for it, as wandb hides names that begin with an underscore.
        self._run.define_metric("training_iteration")
        self._run.define_metric("*", step_metric="training_iteration")

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Log the numbers of rank 0."""
        self._run.log({"training_iteration": results[0][_ITERATION], **_metrics(results[0])})

    def finish_training(self, error: BaseException | None) -> None:
        """End the run, and wait until all is sent."""
        self._run.finish(exit_code=0 if error is None else 1)


class MLflowCallback(TrainingCallback):
    """Logs to a run of MLflow, which ends as FINISHED, or as FAILED when there is an error.

    `experiment_name` and `tracking_uri` are MLflow's own (``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_TRACKING_URI``) by
    default; like `mlflow.set_tracking_uri`, they hold for the process from then on. `start` goes to `mlflow.start_run`,
    as ``run_name``, ``tags`` or ``nested=True`` inside a run that is active. Characters that MLflow does not allow in a
    name are written as ``_``. Raises `UsageError` when mlflow is not installed.
    """

    def __init__(
        self, experiment_name: str | None = None, tracking_uri: str | None = None, **start: Any
    ) -> None:
        _find("mlflow", "mlflow", self)
        self._experiment_name, self._tracking_uri, self._start = experiment_name, tracking_uri, start
        self._mlflow: Any = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Start a run, with the config as its params."""
        self._mlflow = mlflow = _load("mlflow", "mlflow", self)
        if self._tracking_uri is not None:
            mlflow.set_tracking_uri(self._tracking_uri)
        if self._experiment_name is not None:
            mlflow.set_experiment(self._experiment_name)
        mlflow.start_run(**self._start)
        try:
            mlflow.log_params({_allowed(name): text(readable(value)) for name, value in flat(config).items()})
        except BaseException:
            mlflow.end_run("FAILED")
            raise

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Log the numbers of rank 0."""
        metrics = {_allowed(name): value for name, value in _metrics(results[0]).items()}
        self._mlflow.log_metrics(metrics, step=results[0][_ITERATION])

    def finish_training(self, error: BaseException | None) -> None:
        """End the run."""
        self._mlflow.end_run("FINISHED" if error is None else "FAILED")


def _find(module: str, package: str, callback: TrainingCallback) -> None:
    """Raise `UsageError` unless there is `module`, which is not imported."""
    if sys.modules.get(module) is not None:
        return
    spec = importlib.util.find_spec(module)
    # A folder of that name without __init__.py is found, too: wandb writes its runs to ./wandb.
    if spec is None or spec.origin is None:
        raise UsageError(
            f"{type(callback).__name__} needs {package}, which is not installed",
            f"run: pip install {package}",
        )


def _load(module: str, package: str, callback: TrainingCallback) -> Any:
    """Import `module`. Raises `UsageError` when that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{type(callback).__name__} needs {package}, which cannot be imported: {error}",
            f"run: pip install --upgrade {package}",
        ) from error


def _metrics(result: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers in `result`, without those that a tracker has as the step and the time."""
    return {name: value for name, value in numbers(result).items() if name not in (_ITERATION, _TIMESTAMP)}


def _allowed(name: str) -> str:
    """`name` as MLflow takes it."""
    return re.sub(r"[^\w/.\- :]", "_", name)


def _code(content: str) -> str:
    """`content` as a block of Markdown that is shown as it is."""
    return "\n".join(f"    {line}" for line in content.splitlines())
