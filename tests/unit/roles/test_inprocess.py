"""A whole job in threads of one process."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, ClassVar

import pytest
import torch

import unirun
from unirun import BaseTrainer, BaseWorkload, run_in_process
from unirun.errors import UsageError
from unirun.roles.context import Context, acting
from unirun.roles.peers import lone_peers


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


@pytest.mark.parametrize(
    ("role", "count", "words"),
    [
        ("trainer", 2, "'trainer' is that of the trainer; rename it"),
        ("adder", 0, "'adder' has 0 ranks; give it 1"),
    ],
)
def test_a_role_that_cannot_be_is_refused(role: str, count: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_in_process(Sum, {role: (Adder, count)}, {"factor": 2})


class Leaver(Adder):
    def leave(self) -> None:
        raise SystemExit(3)


class Deserted(Sum):
    def fit(self) -> Any:
        with pytest.raises(unirun.WorkerLost, match="adder:1 was lost before it answered: it has ended"):
            self.RG_ADDER[1].leave()
        return self.RG_ADDER[0].add(self.x)


def test_a_worker_that_a_method_has_ended_is_lost() -> None:
    assert run_in_process(Deserted, {"adder": (Leaver, 2)}) == [1.0] * 3


class Careless(Adder):
    def teardown(self) -> None:
        super().teardown()
        raise OSError(f"{self.name} cannot end")


def test_every_worker_ends_though_the_end_of_another_one_fails() -> None:
    Adder.ended.clear()
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="cannot end"):
        run_in_process(Sum, {"adder": (Careless, 2)}, {"factor": 2})
    assert sorted(Adder.ended) == ["adder:0", "adder:1"]
    assert set(threading.enumerate()) <= before


class Teacher(BaseWorkload):
    def setup(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.channel = unirun.WeightsChannel("policy", publisher="teacher", receivers=["pupil"])
        self.queue = unirun.Queue("answers", producer="pupil", consumer="teacher")

    def answers(self) -> list[float]:
        return sorted(float(item.value.sum()) for item in self.queue.get_batch(2))

    def teach(self, value: float, version: int) -> None:
        torch.nn.init.constant_(self.model.weight, value)
        self.channel.publish(self.model, version)


class Pupil(BaseWorkload):
    def setup(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.channel = unirun.WeightsChannel("policy", publisher="teacher", receivers=["pupil"])
        self.queue = unirun.Queue("answers", producer="pupil", consumer="teacher")

    def learn(self, version: int) -> str:
        got = self.channel.receive(self.model, min_version=version)
        self.queue.put(self.model.weight.detach() + self.rank)
        return f"{unirun.init().role} has {got}"


class School(BaseTrainer):
    def init(self) -> None:
        pass

    def fit(self) -> Any:
        pending = self.RG_PUPIL.learn.call_async(7)
        self.RG_TEACHER.teach(2.5, 7)
        return pending.result(), self.RG_TEACHER.answers()


def test_weights_and_items_go_from_thread_to_thread() -> None:
    before = set(threading.enumerate())
    got = run_in_process(School, {"teacher": (Teacher, 1), "pupil": (Pupil, 2)})
    assert got == (["pupil has 7"] * 2, [[10.0, 14.0]])
    assert set(threading.enumerate()) <= before


class Patient(BaseWorkload):
    """A workload that waits without a limit in every call that waits."""

    def setup(self) -> None:
        self.channel = unirun.WeightsChannel("policy", publisher="teacher", receivers=["pupil"])
        self.queue = unirun.Queue(
            "answers", producer="pupil", consumer="teacher", maxsize=1, max_head_offpolicyness=0, batch=1
        )
        self.model = torch.nn.Linear(2, 2)

    def teach(self) -> int:
        self.channel.publish(self.model, 1)
        value: int = self.queue.get(timeout=math.inf).value
        self.queue.done()
        return value

    def learn(self) -> None:
        self.channel.receive(self.model, timeout=math.inf)
        with self.queue.admit(timeout=math.inf):
            self.queue.put(3, version=0, timeout=math.inf)
        self.queue.join(timeout=math.inf)


class Patience(BaseTrainer):
    def init(self) -> None:
        pass

    def fit(self) -> Any:
        pending = self.RG_PUPIL.learn.call_async()
        taught = self.RG_TEACHER.teach()
        pending.result()
        return taught


def test_a_wait_may_have_no_end() -> None:
    assert run_in_process(Patience, {"teacher": (Patient, 1), "pupil": (Patient, 1)}) == [3]


def test_a_thread_has_the_context_of_a_worker_only_while_it_plays_it() -> None:
    contexts = [Context({}, lone_peers({"RANK": str(rank)})) for rank in range(2)]
    outside = unirun.init({})
    with acting(contexts[0]):
        with acting(contexts[1]):
            assert unirun.init() is contexts[1]
        assert unirun.init() is contexts[0]
    assert unirun.init() is outside
