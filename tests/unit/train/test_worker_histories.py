"""A rank of a trainer that is called, interrupted, lost and ended in any order, beside a reference of what it is told.

The worker, its sessions and the interruption of its main thread are real, in this process. A driver takes the reports of
each attempt in a thread, from before the attempt begins.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.effort import examples
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun import train
from unirun.errors import TrainingFailed, UsageError
from unirun.roles import MasterHandle
from unirun.roles.context import Context
from unirun.roles.peers import Peers, RoleInfo
from unirun.train import worker as workers
from unirun.train.checkpoints import CheckpointStrategy
from unirun.train.setup import Backend
from unirun.train.task import Attempt, RunTask
from unirun.train.worker import TrainWorker
from unirun.wire.messages import RoleView, View, Welcome, WorkerView

Step = Literal[
    "report", "seed", "interrupt", "interrupt the one before", "interrupt the next", "lose", "fail", "exit"
]

ENDS: dict[Step, str] = {
    "interrupt": "the driver ends attempt {}",
    "lose": "another rank was lost",
    "fail": "rank 0 has failed: ValueError",
    "exit": "rank 0 has left",
}
"""The steps after which a function is over, and the reason that its driver gets."""

STEPS = st.lists(st.sampled_from(["report", "report", "report", "seed", *Step.__args__]), max_size=4)  # type: ignore[attr-defined]


def role(generation: int) -> RoleView:
    return RoleView("worker", 2, generation, "h:1", "running", (WorkerView(0, 0, "serving", {}),))


class Hooks(Backend):
    """Keeps all messages."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_failure(self, rank: int, world_size: int) -> None:
        self.told.append("failure")


@dataclass
class Driver:
    """Takes the reports of an attempt until it is over."""

    worker: TrainWorker
    attempt: int
    taken: list[int] = field(default_factory=list)
    end: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        while not self.end:
            said = self.worker.take(self.attempt, len(self.taken) + 1)
            if isinstance(said, str):
                self.end = said
            elif said.ended:
                self.end = "finished"
            else:
                self.taken.append(said.number)

    def over(self) -> tuple[int, str]:
        """The number of reports, and the end."""
        self.thread.join(WAIT_TIMEOUT)
        assert self.taken == [*range(1, len(self.taken) + 1)]
        return len(self.taken), self.end


class Ranks(RuleBasedStateMachine):
    """Rank 0 of two. The reference: the attempt that is next, the reasons of those that were ended before they have
    begun, whether something has failed in the group since it was formed, and the object of `prepare`."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._folder = tempfile.TemporaryDirectory()
        self.url = str(Path(self._folder.name, "checkpoints"))
        welcome = Welcome(View((role(0),)), "{}", "job", (), (), 60.0, "socket")
        self.peers = Peers("worker", 0, {"worker": RoleInfo("worker", 2, 0)}, welcome=welcome)
        context = Context({}, self.peers)
        self._patch.setattr(workers, "init", lambda: context)
        self._patch.setattr(workers, "find_backend", lambda name, timeout: Hooks)
        config: Any = SimpleNamespace(backend="hooks", group_timeout=1.0, logging=None)
        self.worker = TrainWorker(MasterHandle(context), config)
        self.worker.setup()
        self.hooks: Any = self.worker._backend
        self.attempt, self.generation, self.failed = 1, 0, 0
        self.broken = False
        self.ended: dict[int, str] = {}
        self.prepared: Any = None
        self.others: list[threading.Thread] = []

    def teardown(self) -> None:
        """A driver that waits for an attempt that never begins is told, and no thread is left."""
        waits = Driver(self.worker, self.attempt)
        self.worker.teardown()
        assert waits.over() == (0, "another attempt has begun")
        assert not torch.are_deterministic_algorithms_enabled()
        for each in self.others:
            each.join(WAIT_TIMEOUT)
        self._patch.undo()
        self._folder.cleanup()

    def beside(self, act: Callable[[], object]) -> None:
        """Act in another thread, as calls and the link do, while this one waits."""
        self.others.append(threading.Thread(target=act))
        self.others[-1].start()
        self.others[-1].join(WAIT_TIMEOUT)

    def loses(self) -> None:
        """Another rank is lost: the agent tells of the next generation."""
        self.generation += 1
        self.peers.update(View((role(self.generation),)))

    def rejoins(self) -> None:
        """The ranks are together again, in a new group."""
        if self.peers.generation != self.generation:
            self.peers.generation = self.generation
            self.failed, self.broken = 0, False
            self.worker.on_generation(self.generation)
            assert self.hooks.told.pop() == "failure"

    def step(self, step: Step, attempt: int) -> None:
        match step:
            case "report":
                train.report(attempt=attempt)
            case "seed":
                for _ in range(2):
                    train.enable_reproducibility(attempt)
                assert torch.are_deterministic_algorithms_enabled()
            case "interrupt":
                self.beside(lambda: self.worker.interrupt(attempt, ENDS["interrupt"].format(attempt)))
                threading.Event().wait(WAIT_TIMEOUT)
            case "interrupt the one before":
                self.beside(lambda: self.worker.interrupt(attempt - 1, "an attempt that is over"))
            case "interrupt the next":
                self.beside(lambda: self.worker.interrupt(attempt + 1, "before it has begun"))
            case "lose":
                self.beside(self.loses)
                threading.Event().wait(WAIT_TIMEOUT)
            case "fail":
                raise ValueError(step)
            case "exit":
                raise SystemExit(3)

    @rule(steps=STEPS, kind=st.sampled_from(["run", "run", "execute", "alone"]))
    def call(self, steps: list[Step], kind: str) -> None:
        """A function ends as the first of its steps says that ends one, and its driver has all reports before it."""
        steps = [each for each in steps if kind == "run" or each != "report"]
        attempt, self.attempt = self.attempt, self.attempt + 1
        done: list[Step] = []
        given: list[Any] = []

        def function(*args: Any) -> int:
            given.extend(args)
            assert train.in_worker()
            # Nothing of the attempts before holds for this one.
            assert not torch.are_deterministic_algorithms_enabled()
            for each in steps:
                done.append(each)
                self.step(each, attempt)
            return attempt

        driver = Driver(self.worker, attempt)
        turn = Attempt(attempt, self.generation, self.failed)
        reason = self.ended.pop(attempt, "")
        last = next((each for each in steps if each in ENDS), None)
        if reason:
            expected: list[Step] = []
        else:
            expected = steps if last is None else steps[: steps.index(last) + 1]
        end = self._called(turn, function, kind)
        assert done == expected
        reports = done.count("report")
        if reason:
            assert isinstance(end, TrainingFailed)
            assert driver.over() == (0, reason) == (reports, end.problem)
        elif last is None:
            assert end == attempt
            assert driver.over() == (reports, "finished")
        else:
            assert driver.over() == (reports, ENDS[last].format(attempt))
            assert isinstance(end, ValueError if last == "fail" else TrainingFailed)
            if last in ("interrupt", "lose"):
                assert str(end) == ENDS[last].format(attempt)
        if not reason:
            assert given == ([self.prepared] if kind != "run" and self.prepared is not None else [])
        if "interrupt the next" in expected:
            self.ended[attempt + 1] = "before it has begun"
        if end != attempt:
            self.failed, self.broken = self.failed + 1, True
        self.rejoins()

    def _called(self, turn: Attempt, function: Any, kind: str) -> Any:
        """The result of a call, or its error. The group is formed anew when something has failed in it, once."""
        formed = list[str]()
        self.worker._anew = formed.append
        try:
            if kind == "run":
                order = RunTask(function, [], False, {}, {}, self.url, CheckpointStrategy())
                return self.worker.run(turn, order)
            return self.worker.execute(turn, function, (), {}, alone=kind == "alone")
        except (TrainingFailed, ValueError) as error:
            return error
        finally:
            if kind != "alone":
                assert len(formed) == len(self.hooks.told) == self.broken
                self.broken = False
            assert len(formed) == len(self.hooks.told)
            self.hooks.told.clear()
            assert not train.in_worker()

    @rule(ahead=st.integers(-1, 2))
    def interrupt(self, ahead: int) -> None:
        """Nothing runs: the attempts that are over stay so, and one that is to come ends when it begins."""
        attempt = self.attempt + ahead
        self.worker.interrupt(attempt, f"early {attempt}")
        if ahead >= 0:
            self.ended[attempt] = f"early {attempt}"

    @rule()
    def lose(self) -> None:
        """A rank is lost while nothing runs."""
        self.loses()
        self.rejoins()

    @rule(made=st.booleans())
    def prepare(self, made: bool) -> None:
        """The functions of `execute` get the object that was prepared last."""
        attempt, self.attempt = self.attempt, self.attempt + 1
        turn, new = Attempt(attempt, self.generation, self.failed), object() if made else None
        reason = self.ended.pop(attempt, "")
        kind = (lambda: new) if made else None
        try:
            self.worker.prepare(turn, None, kind, (), alone=True)
        except TrainingFailed as error:
            assert reason == error.problem
            self.failed, self.broken = self.failed + 1, True
        else:
            assert not reason
            self.prepared = new

    @rule()
    def report_in_no_run(self) -> None:
        """A function of `execute` has nothing to report to."""
        attempt, self.attempt = self.attempt, self.attempt + 1
        reason = self.ended.pop(attempt, "")
        turn = Attempt(attempt, self.generation, self.failed)
        with pytest.raises(TrainingFailed if reason else UsageError):
            self.worker.execute(turn, lambda *_: train.report(a=1), (), {}, alone=True)
        self.failed, self.broken = self.failed + 1, True

    @invariant()
    def who_asks_for_an_attempt_that_is_over_is_told(self) -> None:
        if self.attempt > 2:
            assert self.worker.take(self.attempt - 2, 1) == "another attempt has begun"

    @invariant()
    def nothing_is_kept_of_attempts_that_are_over(self) -> None:
        assert self.worker._ended == self.ended
        eventually(lambda: not _interrupting(), "its threads have ended")


def _interrupting() -> Sequence[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "unirun-interrupt"]


TestRanks = Ranks.TestCase
TestRanks.settings = settings(examples(100, shrunk=False), stateful_step_count=12)
