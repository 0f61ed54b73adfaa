"""A training function in plain python."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from unirun import train
from unirun.errors import UsageError
from unirun.train import functions


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain python, without what other tests have left."""
    monkeypatch.setattr(functions, "_alone", None)
    yield
    torch.use_deterministic_algorithms(False)


def function(data: Any) -> list[Any]:
    """Trains two epochs, and returns what it has found."""
    found: list[Any] = [train.load_checkpoint()]
    shard = train.get_dataset_shard("train", otherwise=data, shuffle=True)
    for epoch in range(shard.progress.epoch, 2):
        found.append([*shard])
        train.save_checkpoint(epoch=epoch)
        train.report(epoch=epoch)
    return found


class TestASecondCall:
    def test_it_does_what_the_first_one_did(self) -> None:
        data = [*range(9)]
        first = function(data)
        assert first[0] is None
        assert [sorted(epoch) for epoch in first[1:]] == [data, data]
        assert function(data) == first

    def test_it_has_the_dataset_that_is_given_now(self) -> None:
        function([1, 2, 3])
        assert [sorted(epoch) for epoch in function([4, 5, 6, 7])[1:]] == [[4, 5, 6, 7]] * 2

    def test_it_begins_a_dataset_that_the_first_one_has_left(self) -> None:
        data = [1, 2, 3]
        for _ in range(2):
            assert next(iter(train.get_dataset_shard(otherwise=data))) == 1

    def test_it_may_have_another_order(self) -> None:
        data = [*range(9)]
        assert [*train.get_dataset_shard(otherwise=data, shuffle=True)] != data
        assert [*train.get_dataset_shard(otherwise=data)] == data

    def test_it_has_the_same_random_numbers(self) -> None:
        def drawn() -> list[float]:
            train.enable_reproducibility(7)
            train.load_checkpoint()
            found = []
            for epoch in range(2):
                found += [float(torch.rand(1)), float(numpy.random.rand()), random.random()]
                train.save_checkpoint(epoch=epoch)
            return found

        assert drawn() == drawn()


def test_the_loops_of_a_shard_that_is_kept_are_epochs_as_in_a_worker() -> None:
    shard = train.get_dataset_shard(otherwise=range(20), shuffle=True)
    assert [*shard] != [*shard]
    assert shard.progress.epoch == 1


def test_a_state_that_cannot_be_saved_is_told_as_in_a_worker() -> None:
    with pytest.raises(UsageError, match="^lock cannot be saved: TypeError: cannot pickle"):
        train.save_checkpoint(lock=threading.Lock())


@pytest.mark.parametrize("name", ["_timestamp", "_mine"])
def test_names_of_unirun_are_refused_as_in_a_worker(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="begins with an underscore"):
        train.report(**{name: 1})
    assert capfd.readouterr().err == ""
