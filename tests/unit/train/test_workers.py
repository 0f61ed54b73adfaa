"""The job behind a trainer, as the trainer's process has it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import TrainingFailed, WorkerLost
from unirun.observe.status import FailureStatus
from unirun.train import workers as module
from unirun.train.losses import LIMIT
from unirun.train.setup import ROLE, Setup
from unirun.train.workers import Workers, shutdown_after
from unirun.wire.messages import RoleView, WorkerView


class Faulty(io.StringIO):
    """Takes the first line only."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise RuntimeError("the tee is broken")
        return super().write(text)


class Calls:
    """Counts how often it is closed, as the calls of a trainer to its workers."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class Ranks:
    """The peers of a trainer, and the process of its job: each look at the peers sees the next view of them."""

    def __init__(self, *views: tuple[str, tuple[int, ...]]) -> None:
        """A view: the phase of all workers, and their incarnations."""
        self.peers = self
        self._views = [*views]

    def view(self, role: str) -> RoleView:
        phase, incarnations = self._views[0]
        workers = tuple(WorkerView(rank, each, phase, {}) for rank, each in enumerate(incarnations))
        return RoleView(role, len(workers), 0, "", "running" if phase == "serving" else "forming", workers)

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        while not condition():
            if len(self._views) == 1:
                return False
            self._views.pop(0)
        return True

    def poll(self) -> int | None:
        return None if self._views[0][0] != "ended" else 0


@pytest.fixture
def workers() -> Workers:
    """Workers that were not started."""
    return Workers(Setup(1, 1, "none"))


class TestWhatWorkersWrite:
    def test_it_is_written_where_the_program_writes(
        self, workers: Workers, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workers._pass_on(io.BytesIO(b"one\ntwo\n"), "stdout")
        workers._pass_on(io.BytesIO(b"unirun: a line of its own\nthree\n"), "stderr")
        assert capsys.readouterr() == ("one\ntwo\n", "three\n")

    @pytest.mark.parametrize("out", ["stdout", "stderr"])
    @pytest.mark.parametrize("stream", [None, object()])
    def test_it_is_read_to_its_end_where_the_program_cannot_write(
        self, workers: Workers, monkeypatch: pytest.MonkeyPatch, out: str, stream: Any
    ) -> None:
        """A pipe that nobody reads would end the job."""
        pipe = io.BytesIO(b"one\ntwo\n")
        monkeypatch.setattr(sys, out, stream)
        workers._pass_on(pipe, out)
        assert pipe.closed

    def test_an_output_that_fails_loses_its_lines_only(
        self, workers: Workers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pipe, out = io.BytesIO(b"one\ntwo\n"), Faulty()
        monkeypatch.setattr(sys, "stdout", out)
        workers._pass_on(pipe, "stdout")
        assert (pipe.closed, out.getvalue()) == (True, "one\n")


@given(
    st.tuples(st.integers(0, 2 * LIMIT), st.integers(0, 2 * LIMIT)),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4),
    st.sampled_from(["serving", "starting", "ended"]),
)
def test_ranks_that_come_back_are_waited_for_unless_one_ends_as_often_as_it_starts(
    first: tuple[int, int], more: list[tuple[int, int]], end: str
) -> None:
    """Those of a wait before do not count: a trainer has many."""
    seen = [first]
    for rise in more:
        seen.append((seen[-1][0] + rise[0], seen[-1][1] + rise[1]))
    ranks: Any = Ranks(*(("starting", each) for each in seen), (end, seen[-1]))
    workers = Workers(Setup(2, 2, "none"))
    workers._visitor = workers._process = ranks
    most = max(last - before for before, last in zip(first, seen[-1], strict=True))
    if most < LIMIT and end == "serving":
        workers.wait_until_whole(0.0)
        return
    with pytest.raises(TrainingFailed) as failed:
        workers.wait_until_whole(0.0)
    reason = (
        "and does not come up" if most >= LIMIT else "ended" if end == "ended" else "not all ranks were up"
    )
    assert reason in str(failed.value)


ENDS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 9)), max_size=8)
"""The ends of workers in their order: rank, incarnation and exit code."""


@given(ENDS, st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2))
def test_a_loss_is_told_by_the_last_end_of_the_worker_that_was_called_or_of_one_after_it(
    ends: list[tuple[int, int, int]], called: list[int], rank: int
) -> None:
    """An end that came before the call is that of another loss. A rank that is new was not started before."""
    failures = tuple(
        FailureStatus(ROLE, each, number, "n", 1.0, f"exit code {code}") for each, number, code in ends
    )
    workers, given = Workers(Setup(3, 3, "none")), [*called, 0, 0, 0]
    handle: Any = SimpleNamespace(status=lambda: SimpleNamespace(failures=failures))
    visitor: Any = SimpleNamespace(peers=SimpleNamespace(updates=0))
    workers._handle, workers._visitor = handle, visitor
    codes = [code for each, number, code in ends if each == rank and number >= given[rank]]
    who = f"{ROLE}:{rank}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOSS_REPORT_TIMEOUT", 0.0)
        told = workers.loss(WorkerLost(f"{who} was lost", worker=who), called)
    assert told == (f"{who} ended with exit code {codes[-1]}" if codes else f"{who} was lost")


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [("", 0, "its trainer was shut down"), ("ValueError", 1, "its trainer was shut down after ValueError")],
)
def test_the_job_of_a_trainer_has_succeeded_unless_the_last_run_has_failed(
    error: str, code: int, reason: str
) -> None:
    stop = shutdown_after(error)
    assert (stop.exit_code, stop.reason) == (code, reason)


class Command:
    """The process of the command of a job that has begun, and does not come up."""

    def __init__(self, *args: object, **how: object) -> None:
        self.stdout, self.stderr = io.BytesIO(b"a line\n"), io.BytesIO()
        self.ended = 0

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def terminate(self) -> None:
        self.ended += 1

    def wait(self, timeout: float) -> int:
        assert self.ended
        return 0


@pytest.mark.parametrize("error", [TrainingFailed("they do not come up"), KeyboardInterrupt()])
def test_workers_that_do_not_come_up_are_ended(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    made: list[Command] = []

    def begin(*args: Any, **how: Any) -> Command:
        made.append(Command())
        return made[-1]

    def fails(deadline: float) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(workers, "_connect", fails)
    for _ in range(2):
        with pytest.raises(type(error)):
            workers.start()
        assert not any(reader.is_alive() for reader in workers._readers)
    assert [command.ended for command in made] == [1, 1]


def test_only_the_process_that_has_made_them_ends_them(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of ``os.fork`` has the finalizers of its parent, and calls them at its exit."""
    calls = Calls()
    monkeypatch.setattr(workers, "_visitor", calls)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        workers.stop()
    assert calls.closed == 0
    workers.stop()
    assert calls.closed == 1
