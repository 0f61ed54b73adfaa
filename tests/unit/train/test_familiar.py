"""Spellings of RaySGD and Ray Train: those that mean the same work, the errors of others name ours."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch

from unirun import train
from unirun.errors import UsageError
from unirun.train import functions
from unirun.train.checkpoints.state import UNNAMED, named, unnamed
from unirun.train.data.loader import Shard
from unirun.train.familiar import FUNCTIONS, SHARDS, TRAINER_ARGUMENTS, TRAINERS
from unirun.train.session import Session


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_name_of_ray_train_says_what_is_used_here(name: str) -> None:
    with pytest.raises(ImportError) as raised:
        getattr(train, name)
    assert str(raised.value) == f"module 'unirun.train' has no {name!r}; use {FUNCTIONS[name]}"
    with pytest.raises(ImportError, match="use train"):
        exec(f"from unirun.train import {name}")  # noqa: S102 - the statement that users write


def test_any_other_name_is_an_attribute_error() -> None:
    assert not hasattr(train, "scaling")
    with pytest.raises(AttributeError, match="module 'unirun.train' has no 'scaling'"):
        train.scaling  # noqa: B018


@pytest.mark.parametrize("name", [*TRAINERS, "other"])
def test_a_method_of_another_trainer_says_which_one_is_used_here(name: str) -> None:
    trainer = train.Trainer()
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError) as raised:
        getattr(trainer, name)
    hint = f"; use {TRAINERS[name]}" if name in TRAINERS else ""
    assert str(raised.value) == f"a Trainer has no {name!r}{hint}"


@pytest.mark.parametrize("name", TRAINER_ARGUMENTS)
def test_an_argument_of_another_trainer_says_which_one_is_used_here(name: str) -> None:
    arguments: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError) as raised:
        train.Trainer(**arguments)
    assert str(raised.value) == f"Trainer has no '{name}='; use {TRAINER_ARGUMENTS[name]}"


def test_an_argument_with_a_typing_error_names_ours() -> None:
    arguments: dict[str, Any] = {"num_worker": 2}
    with pytest.raises(TypeError) as raised:
        train.Trainer(**arguments)
    assert str(raised.value) == "Trainer has no 'num_worker='; use num_workers="


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_says_what_is_used_in_place_of_a_method_that_it_has_not(name: str) -> None:
    shard = Shard("train", [1, 2], 0, 1)
    with pytest.raises(AttributeError) as raised:
        getattr(shard, name)
    assert str(raised.value) == f"a shard has no {name!r}; use {SHARDS[name]}"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"num_workers": 8}, "8 workers with 1 CPU each, backend torch"),
        ({"backend": "pytorch"}, "1 worker with 1 CPU, backend torch"),
        ({"cpus_per_worker": 2}, "1 worker with 2 CPUs, backend torch"),
        ({"gpus_per_worker": 2}, "1 worker with 2 GPUs, backend torch"),
        ({"gpus_per_worker": 0}, "1 worker with 1 CPU, backend torch"),
        (
            {"num_workers": (4, float("inf")), "cpus_per_worker": 2, "gpus_per_worker": 1},
            "4 to any number of workers with 1 GPU and 2 CPUs each, backend torch",
        ),
        (
            {"backend_args": train.TorchConfig("gloo", init_method="tcp")},
            "1 worker with 1 CPU, backend gloo",
        ),
    ],
)
def test_a_trainer_shows_what_was_asked_for(arguments: dict[str, Any], shown: str) -> None:
    assert str(train.Trainer(**arguments)) == f"Trainer of {shown}, not started"


def test_processors_beside_gpus_are_threads() -> None:
    setup = train.Trainer(gpus_per_worker=1, cpus_per_worker=4)._setup
    assert (setup.device, setup.slots, setup.env) == ("cuda", 1, {"OMP_NUM_THREADS": "4"})


@pytest.mark.parametrize("seconds", [60, timedelta(minutes=1)])
def test_the_timeout_of_the_process_group_reaches_the_workers(seconds: Any) -> None:
    trainer = train.Trainer(backend_args=train.TorchConfig(timeout_s=seconds))
    config = trainer._setup.job_file("x")["config"]
    assert isinstance(config, dict)
    assert (config["backend"], config["group_timeout"]) == ("torch", 60.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "mpi"}, "TorchConfig(backend='mpi'); it is 'gloo', 'nccl' or None"),
        ({"init_method": "file:///x"}, "TorchConfig(init_method='file:///x'); leave it out: the ranks meet"),
        ({"timeout_s": 0}, "TorchConfig(timeout_s=0); give seconds"),
        ({"timeout_s": math.inf}, "TorchConfig(timeout_s=inf); give seconds"),
        ({"timeout_s": "60"}, "TorchConfig(timeout_s='60'); give seconds"),
    ],
)
def test_a_wrong_configuration_of_the_group_is_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        train.TorchConfig(**arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ((-1, len), "execute_single: rank -1; give a number from 0 to 1, or leave it out"),
        ((2, len), "execute_single: rank 2; give a number"),
        (("0", len), "execute_single: rank '0'; give a number"),
        ((0,), "execute_single: there is no function; write execute_single(rank, function, *args)"),
    ],
)
def test_a_wrong_rank_is_told_before_workers_start(rank: tuple[Any, ...], message: str) -> None:
    trainer: Any = train.Trainer(2)
    with pytest.raises(UsageError) as raised:
        trainer.execute_single(*rank)
    assert str(raised.value).startswith(message)


def test_a_state_may_be_a_tuple_or_a_dict() -> None:
    assert named((1, 2), {}) == {UNNAMED: (1, 2)}
    assert unnamed(named((1, 2), {})) == (1, 2)
    assert unnamed(named({"epoch": 1}, {"lr": 0.1})) == {"epoch": 1, "lr": 0.1}
    with pytest.raises(UsageError, match="save_checkpoint is given a tuple, and epoch; give each a name"):
        named((1, 2), {"epoch": 1})


def test_folds_have_the_spelling_of_raysgd() -> None:
    training, validation = train.to_cv([*range(6)], splits=3)[0]
    found = [training[n] for n in range(len(training))], [validation[n] for n in range(len(validation))]
    assert found == ([1, 2, 4, 5], [0, 3])


def test_metrics_may_be_a_dict(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(functions, "_alone", None)
    train.report({"loss": 0.5}, epoch=1)
    assert capfd.readouterr().err == "report: loss=0.5, epoch=1\n"


def test_a_tuple_is_loaded_into_a_tuple() -> None:
    model, state = torch.nn.Linear(1, 1), {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
    functions.enter(Session(resume={UNNAMED: (state, 3)}))
    try:
        assert train.load_checkpoint()[1] == 3
        assert train.load_checkpoint(into=(model, 0))[1] == 3
    finally:
        functions.enter(None)
    assert model.weight.item() == 1
