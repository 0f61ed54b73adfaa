"""A whole job in threads of one process."""

from __future__ import annotations

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
