"""The stub of an engine misbehaves as it was told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.testbed import engine
from tests.waiting import WAIT_TIMEOUT, eventually

pytestmark = pytest.mark.processes


@contextmanager
def stub(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its URL."""
    command = [sys.executable, str(Path(engine.__file__)), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=WAIT_TIMEOUT) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_is_ready_when_it_says_so_and_ends_at_once_with_sigterm() -> None:
    with stub("--ready-after", "0.2") as (process, url):
        assert health(url) == 503
        assert line(process) == "Application startup complete."
        assert health(url) == 200
        process.terminate()
        assert process.wait(WAIT_TIMEOUT) == 0


def test_its_health_flaps() -> None:
    with stub("--flap", "4") as (process, url):
        line(process)
        assert [health(url) for _ in range(6)] == [200, 503, 200, 503, 200, 200]


def test_it_crashes_with_a_code() -> None:
    with stub("--crash-after", "0.05", "--exit-code", "7", "--never-ready") as (process, _):
        assert line(process).startswith("EngineDeadError")
        assert process.wait(WAIT_TIMEOUT) == 7


def test_it_goes_on_with_a_closed_port_and_ignores_sigterm() -> None:
    with stub("--close-port-after", "0.1", "--ignore-term") as (process, url):
        line(process)
        with suppress(OSError):
            while health(url) == 200:
                pass
        with pytest.raises(OSError, match="refused"):
            health(url)
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)


def test_it_answers_500() -> None:
    with stub("--answer-500-after", "0") as (process, url):
        line(process)
        while health(url) != 500:
            pass


def test_its_child_outlives_it() -> None:
    command = [sys.executable, str(Path(engine.__file__)), "--leak-child", "--log-line", "hello"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert line(process) == "hello"
            child = int(line(process).removeprefix("child "))
        finally:
            process.kill()
        process.wait(WAIT_TIMEOUT)
        eventually(lambda: os.getsid(child) == child, "it has a session of its own")
        os.kill(child, signal.SIGKILL)
