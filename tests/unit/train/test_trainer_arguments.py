"""Mistakes in the arguments of a trainer and of its runs are told before workers start."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from unirun import train
from unirun.errors import CheckpointDamaged, UsageError
from unirun.train import CheckpointStrategy, Trainer, TrainingCallback
from unirun.train.arguments import checkpoint_of, directory, takes_config


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where jobs would be."""
    folder = tmp_path / "home"
    monkeypatch.setenv("UNIRUN_HOME", str(folder))
    yield folder
    assert not (folder / "jobs").exists(), "workers were started"


def function() -> None: ...


def told(act: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as raised:
        act()
    return str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": "4"}, "num_workers='4'; give a number from 1 on, or a range"),
        ({"num_workers": (8, 2)}, "num_workers=(8, 2); give a number from 1 on, or a range"),
        ({"resources_per_worker": {"RAM": 1}}, "resources_per_worker has 'RAM'; it has CPU and GPU"),
        ({"resources_per_worker": {"GPU": 1}}, "resources_per_worker asks for 1 GPUs; pass use_gpu=True"),
        (
            {"use_gpu": True, "resources_per_worker": {"GPU": 0}},
            "use_gpu=True with 0 GPUs for each worker; leave out one of them",
        ),
        ({"resources_per_worker": [1]}, "resources_per_worker is a list; give a dict, {'CPU': 1}"),
        ({"use_gpu": "yes"}, "use_gpu='yes'; it is True or False"),
        ({"logdir": 5}, "logdir is a int; give a path or a URL"),
        ({"logdir": b"/runs"}, "logdir is a bytes; give a path or a URL"),
        ({"env": ["A=1"]}, "env is a list; give a dict of texts"),
        ({"env": {"A": 1}}, "env has 'A': 1; give texts"),
        ({"grow_every": "soon"}, "grow_every is a str; give seconds"),
        ({"grow_every": math.nan}, "grow_every=nan; give seconds"),
        ({"grow_every": -1}, "grow_every=-1; give seconds"),
        ({"store": 5}, "store is a int; give what --store takes, as text"),
        ({"max_failures": 1.5}, "max_failures=1.5; give a number from 0 on, or -1 for any"),
        ({"max_failures": None}, "max_failures=None; give a number from 0 on, or -1 for any"),
        ({"max_failures": True}, "max_failures=True; give a number from 0 on, or -1 for any"),
        ({"max_failures": -2}, "max_failures=-2; give a number from 0 on, or -1 for any"),
        ({"max_failures": math.inf}, "max_failures=inf; give a number from 0 on, or -1 for any"),
        ({"retry_exceptions": ["OSError"]}, "retry_exceptions has 'OSError'; give classes of exceptions"),
        (
            {"retry_exceptions": [OSError, KeyboardInterrupt]},
            "retry_exceptions has <class 'KeyboardInterrupt'>; give classes of exceptions",
        ),
        (
            {"retry_exceptions": OSError},
            "retry_exceptions is the class OSError; give a list of classes of exceptions",
        ),
        ({"retry_exceptions": 5}, "retry_exceptions is a int; give a list of classes of exceptions"),
        ({"placement": {5: 1}}, "placement has 5; give names of options of the unirun command"),
        ({"placement": ["h1", "h2"]}, "placement is a list; give hosts, an inventory, or a dict of options"),
        (
            {"backend": "mpi"},
            "there is no backend 'mpi'; there are: gloo, nccl, none, torch; or name a class",
        ),
        ({"backend": "horovod|pytorch"}, "there is no backend 'horovod|pytorch'; there are: gloo, nccl"),
        ({"cpus_per_worker": 1.5}, "resources_per_worker: CPU is 1.5; give a whole number"),
        (
            {"cpus_per_worker": 2, "resources_per_worker": {"CPU": 3}},
            "cpus_per_worker=2, and resources_per_worker has 3; give one of them",
        ),
        ({"backend_args": {"timeout": 1}}, "backend_args is a dict; give a TorchConfig(...)"),
        (
            {"backend_args": train.TorchConfig(), "backend": "none"},
            "backend_args with backend='none'; it is for the process groups of torch",
        ),
        (
            {"backend_args": train.TorchConfig("nccl"), "backend": "gloo"},
            "backend='gloo', and backend_args has 'nccl'; give one of them",
        ),
        ({"resume": True}, "resume=True without a logdir; give the logdir in which the runs are"),
        ({"backend": train.NoBackend}, f"backend={train.NoBackend!r}; give its name, or pkg.mod:Class"),
        ({"backend": ":"}, "backend ':' cannot be imported: Empty module name; name it as pkg.mod:Class"),
        ({"backend": "nowhere:Mine"}, "backend 'nowhere:Mine' cannot be imported: No module named 'nowhere'"),
        ({"backend": "pathlib:Path"}, "backend 'pathlib:Path' has no on_start, on_failure, on_shutdown"),
    ],
)
def test_a_trainer_with_a_wrong_argument_cannot_be_made(arguments: dict[str, Any], message: str) -> None:
    assert told(lambda: Trainer(**arguments)).startswith(message)


def keyword_only(*, config: Any) -> None: ...


def two(config: Any, other: Any) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_func": "f"}, "'f' is no function; give a function of nothing, or of config"),
        (
            {"train_func": None},
            "None is no function; give a function of nothing, or of config: pass f, not what",
        ),
        ({"train_func": CheckpointStrategy}, f"{CheckpointStrategy!r} is no function; give a function"),
        ({"train_func": two}, "two takes config, other; write it with one argument, config, or with none"),
        ({"train_func": keyword_only}, "keyword_only takes config; write it with one argument, config"),
        ({"config": [1]}, "config is a list; give a dict"),
        ({"config": {"lr": 1}}, "function takes no config; write def function(config)"),
        ({"callbacks": [TrainingCallback]}, "callbacks[0] is the class TrainingCallback"),
        ({"callbacks": TrainingCallback()}, "callbacks is a TrainingCallback, no list; write callbacks=[…]"),
        ({"checkpoint": 5}, "checkpoint is a int; give a path, a URL or a dict"),
        ({"checkpoint": b"/runs/000001"}, "checkpoint is a bytes; give a path, a URL or a dict"),
        (
            {"checkpoint": "/runs/model.pt"},
            "/runs/model.pt is no checkpoint; give what latest_checkpoint or best_checkpoint_path returns",
        ),
        ({"dataset": "train.csv"}, "dataset 'dataset': a str is text; read it first, or pass Files(path)"),
        (
            {"dataset": ([1], [2])},
            "dataset is a tuple of 2; give several datasets as a dict by name, {'train': a, 'val': b}",
        ),
        ({"dataset": 5}, "dataset 'dataset': a int cannot be iterated, and is not indexed or has no length"),
        ({"dataset": iter([1])}, "dataset 'dataset': a list_iterator can be read only once; pass an object"),
        ({"dataset": {"train": [1], "valid": {1}}}, "dataset 'valid': a set has no order"),
        ({"dataset": {1: [1]}}, "the name of a dataset is a int; give a text"),
        ({"checkpoint_strategy": "max"}, "checkpoint_strategy is a str; give a CheckpointStrategy(...)"),
        (
            {"checkpoint_strategy": CheckpointStrategy},
            "checkpoint_strategy is the class CheckpointStrategy; give a CheckpointStrategy(...)",
        ),
    ],
)
def test_a_run_with_a_wrong_argument_does_not_begin(arguments: dict[str, Any], message: str) -> None:
    assert told(lambda: Trainer().run(**{"train_func": function, **arguments})).startswith(message)
    assert told(lambda: Trainer().run_iterator(**{"train_func": function, **arguments})).startswith(message)


class Called:
    def __call__(self, config: Any) -> None: ...


@pytest.mark.parametrize(
    ("train_func", "takes"),
    [
        (function, (False, False)),
        (lambda config: config, (True, True)),
        (lambda anything: anything, (True, True)),
        (lambda config=None: config, (True, True)),
        (lambda other=None: other, (False, False)),
        (lambda *rest, **named: rest, (False, False)),
        (partial(two, 1), (True, True)),
        (lambda *config: config, (True, True)),
        # It has a config already, or takes it by name alone.
        (partial(keyword_only, config=1), (False, False)),
        (lambda **config: config, (False, False)),
        (Called(), (True, True)),
        (os.getpid, (False, False)),
        # It does not say what it takes.
        (socket.gethostname, (False, True)),
    ],
)
def test_a_function_takes_a_config_where_it_has_an_argument_for_it(
    train_func: Any, takes: tuple[bool, bool]
) -> None:
    assert (takes_config(train_func, given=False), takes_config(train_func, given=True)) == takes


def test_paths_stay_the_same_when_the_program_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert directory("runs") == f"{tmp_path}/runs"
    assert directory(Path("~/runs")) == "/home/me/runs"
    assert directory("file:///tmp/runs/") == "/tmp/runs"
    assert checkpoint_of("runs/000001/", local=False) == f"{tmp_path}/runs/000001"
    assert checkpoint_of(Path("~/runs/000001"), local=False) == "/home/me/runs/000001"


def test_urls_and_what_is_left_out_stay_as_they_are() -> None:
    assert directory("s3://bucket/runs") == "s3://bucket/runs"
    assert directory(None) == directory("") == ""
    assert checkpoint_of("s3://bucket/000001/", local=False) == "s3://bucket/000001"
    assert checkpoint_of({"epoch": 1}, local=False) == {"epoch": 1}


def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"there is no checkpoint {tmp_path}/000003"):
        Trainer().run(function, checkpoint=tmp_path / "000003")


def test_a_checkpoint_at_a_url_that_nobody_knows_is_told() -> None:
    message = "checkpoint nowhere://runs/000003 cannot be used: Protocol not known: nowhere; see fsspec"
    assert told(lambda: Trainer().run(function, checkpoint="nowhere://runs/000003")).startswith(message)


def test_a_checkpoint_that_is_damaged_is_told(tmp_path: Path) -> None:
    (tmp_path / "000003").mkdir()
    (tmp_path / "000003" / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointDamaged, match=f"{tmp_path}/000003/checkpoint.json cannot be read"):
        Trainer().run(function, checkpoint=tmp_path / "000003")


def test_a_directory_that_others_may_write_is_told_before_a_worker_starts(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    message = f"logdir {shared} is not safe: {shared} may be written by all users; chmod go-w {shared}, or name another"
    assert told(Trainer(logdir=shared).start) == f"{message} directory"


def test_a_directory_that_cannot_be_written_is_told_by_start_and_by_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = f"logdir {tmp_path}/file cannot be written: Not a directory; give another one"
    trainer = Trainer(logdir=tmp_path / "file")
    assert told(trainer.start) == told(lambda: trainer.run(function)) == message
    assert told(lambda: trainer.execute(function)) == message
    url = "nowhere://bucket"
    assert told(Trainer(logdir=url).start).startswith(f"logdir {url} cannot be used: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_to_keep": 0}, "num_to_keep=0; give a number from 1 on, or None for all"),
        ({"num_to_keep": "2"}, "num_to_keep='2'; give a number from 1 on, or None for all"),
        ({"num_to_keep": True}, "num_to_keep=True; give a number from 1 on, or None for all"),
        ({"checkpoint_score_attribute": 5}, "checkpoint_score_attribute=5; give the name of a metric"),
        ({"checkpoint_score_order": "best"}, "checkpoint_score_order='best'; it is 'max' or 'min'"),
    ],
)
def test_a_strategy_that_nobody_can_follow_cannot_be_made(arguments: dict[str, Any], message: str) -> None:
    assert told(lambda: CheckpointStrategy(**arguments)) == message


@pytest.mark.parametrize("amp", ["fp8", 16])
def test_a_precision_that_there_is_not_is_told(amp: Any) -> None:
    assert told(lambda: train.accelerate(amp)) == f"amp={amp!r}; it is 'bf16', 'fp16' or None"


def test_a_trainer_that_is_not_started_says_so_and_ends_without_anything() -> None:
    with Trainer((2, 8), backend="none") as trainer:
        assert str(trainer) == "Trainer of 2 to 8 workers with 1 CPU each, backend none, not started"
        assert (trainer.latest_checkpoint, trainer.best_checkpoint_path, trainer.logdir) == (None, None, "")
