"""A whole job in threads of one process."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ClassVar

import pytest
import torch

import unirun
from unirun import BaseTrainer, BaseWorkload, run_in_process


class Adder(BaseWorkload):
    ended: ClassVar[list[str]] = []

    def setup(self) -> None:
        self.total = torch.zeros(3)

    def add(self, x: torch.Tensor) -> list[float]:
        self.total += x
        x += 100  # its own copy
        return self.total.tolist()

    def fail(self) -> None:
        raise KeyError(self.name)

    def teardown(self) -> None:
        self.ended.append(self.name)


class Sum(BaseTrainer):
    def init(self) -> None:
        self.x = torch.ones(3)

    def fit(self) -> Any:
        first = self.RG_ADDER.add(self.x)
        second = self.RG_ADDER[1].add(self.x * self.config.factor)
        return first, second, self.x.tolist(), self.get_role_groups(), self.actor_classes["adder"].__name__


class Broken(Sum):
    def fit(self) -> Any:
        return self.RG_ADDER.fail()


def test_a_job_runs_in_threads_and_returns_what_fit_returns() -> None:
    Adder.ended.clear()
    first, second, x, groups, kind = run_in_process(Sum, {"adder": (Adder, 2)}, {"factor": 2})
    assert first == [[1.0] * 3, [1.0] * 3]
    assert second == [3.0] * 3
    assert x == [1.0] * 3
    assert (groups, kind) == (["RG_ADDER"], "Adder")
    assert sorted(Adder.ended) == ["adder:0", "adder:1"]


def test_an_error_of_a_workload_comes_out_with_its_origin() -> None:
    with pytest.raises(KeyError) as raised:
        run_in_process(Broken, {"adder": (Adder, 2)})
    cause = raised.value.__cause__
    assert isinstance(cause, unirun.RemoteTraceback)
    assert cause.worker.startswith("adder:")


class Busy(Sum):
    def fit(self) -> Any:
        refs = [self.RG_ADDER.add.call_async(self.x) for _ in range(20)]
        return [self.RG_ADDER.later(), *(ref.result() for ref in refs)][0]


class Later(Adder):
    async def later(self) -> int:
        return self.rank


@pytest.mark.parametrize("trainer", [Busy, Broken])
def test_no_thread_is_left_that_could_outlive_the_interpreter(trainer: type[BaseTrainer]) -> None:
    """A thread that frees a tensor while the interpreter ends aborts the process, after the right result."""
    before = set(threading.enumerate())
    with contextlib.suppress(KeyError):
        assert run_in_process(trainer, {"adder": (Later, 2)}) == [0, 1]
    assert set(threading.enumerate()) <= before
