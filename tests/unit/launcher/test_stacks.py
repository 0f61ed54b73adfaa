"""Stacks that an agent takes of processes: by the signal, by py-spy, or none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.launcher import profiling
from unirun.launcher.process import takes_signal
from unirun.launcher.sampler import STACKS_SIGNAL, shapes_in
from unirun.launcher.stacks import kernel_of, py_spy, state_of, take_stacks, take_texts, threads_of

ANSWERING = """
import time
from unirun.launcher.sampler import answer_for_stacks
answer_for_stacks()
def here():
    time.sleep(600)
here()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers the signal."""
    with subprocess.Popen([sys.executable, "-c", ANSWERING]) as started:
        try:
            eventually(lambda: takes_signal(started.pid, STACKS_SIGNAL), "it has a handler", WAIT_TIMEOUT)
            yield started
        finally:
            started.kill()


@pytest.mark.starts_processes
class TestAProcess:
    def test_it_answers_again_and_again(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(2):
            (source, threads) = asyncio.run(take_stacks({7: process.pid}, WAIT_TIMEOUT))[7]
            assert source == "the signal"
            assert [each.frames[0].rpartition(" in ")[2] for each in threads if each.main] == ["here"]

    def test_a_stopped_one_is_left_to_py_spy(self, process: subprocess.Popen[bytes]) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: state_of(process.pid)[0] == "T", "it is stopped")
        found = asyncio.run(take_stacks({7: process.pid}, 0.1))
        if py_spy() is None or os.geteuid() != 0:
            assert found == {} or found[7][0] == "py-spy"
        else:
            assert found[7][0] == "py-spy"
            assert "in here" in " ".join(found[7][1][0].frames)

    def test_the_memory_of_one_that_does_not_answer_in_time_is_closed(
        self, process: subprocess.Popen[bytes]
    ) -> None:
        assert asyncio.run(take_texts({7: process.pid}, 0.0)) == {}

    def test_one_without_a_handler_is_not_ended_by_the_signal(self) -> None:
        with subprocess.Popen(["sleep", "600"]) as other:
            try:
                assert asyncio.run(take_stacks({1: other.pid}, 0.1)) == {}
                assert other.poll() is None
                assert (state_of(other.pid)[0], kernel_of(other.pid)) >= ("S", "")
            finally:
                other.kill()


@pytest.mark.starts_processes
def test_a_process_that_has_ended_has_no_stacks() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert asyncio.run(take_stacks({1: gone.pid}, 0.1)) == {}
    assert (state_of(gone.pid), kernel_of(gone.pid)) == (("?", False), "")


@pytest.mark.starts_processes
def test_a_py_spy_that_cannot_be_executed_here_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file may be that of another kind of machine. The agent of the rank that is asked goes on."""
    (tmp_path / "py-spy").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "py-spy").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert py_spy() == str(tmp_path / "py-spy")
    assert asyncio.run(take_stacks({1: os.getpid()}, 0.0)) == {}
    assert asyncio.run(profiling._spied(os.getpid(), 0.1)) == {}


def test_the_main_thread_in_what_py_spy_writes_is_that_of_the_process() -> None:
    frame = {"name": "here", "filename": "/me/x.py", "line": 3}
    rows: list[dict[str, Any]] = [
        {"pid": 5, "os_thread_id": 6, "thread_name": "worker", "frames": []},
        {"pid": 5, "os_thread_id": 5, "thread_name": None, "frames": [frame]},
    ]
    other, main = threads_of(rows)
    assert (other.name, other.main) == ("worker", False)
    assert (main.name, main.main, main.frames) == ("5", True, ("/me/x.py:3 in here",))


def test_shapes_are_those_of_collectives_that_are_not_over() -> None:
    def entry(number: int, **about: object) -> dict[str, object]:
        plain = {"collective_seq_id": number, "is_p2p": False, "retired": False, "state": "scheduled"}
        return {**plain, "profiling_name": "gloo:all_reduce", **about}

    sizes = {"input_sizes": [[4, 2], [1]], "input_dtypes": ["Float", "Int"]}
    record = {"entries": [entry(3, retired=True), entry(4, **sizes), entry(5)]}
    assert shapes_in(record) == {("all_reduce", 4): "[4, 2] Float, [1] Int", ("all_reduce", 5): ""}
