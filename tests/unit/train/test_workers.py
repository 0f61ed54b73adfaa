"""The job behind a trainer, as the trainer's process has it."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest

from unirun.train.setup import Setup
from unirun.train.workers import Workers, shutdown_after


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


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [("", 0, "its trainer was shut down"), ("ValueError", 1, "its trainer was shut down after ValueError")],
)
def test_the_job_of_a_trainer_has_succeeded_unless_the_last_run_has_failed(
    error: str, code: int, reason: str
) -> None:
    stop = shutdown_after(error)
    assert (stop.exit_code, stop.reason) == (code, reason)


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
