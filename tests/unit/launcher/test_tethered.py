"""A program that gets SIGTERM when another process ends, on real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT

pytestmark = pytest.mark.starts_processes

PROGRAM = """
import os, signal, sys, time

# A handler does not print: it may run amid the print of the main program, whose buffer is locked then.
def end(signum, frame):
    os.write(1, b"told\\n")
    sys.exit(5)

signal.signal(signal.SIGTERM, end)
# Handlers run in the order of their signals, and this one is the last.
signal.signal(signal.SIGRTMIN, lambda *_: os.write(1, b"not told\\n"))
assert __name__ == "__main__"
print("child", os.getpid(), *sys.argv, flush=True)
if sys.argv[1] == "waits":
    while True:
        time.sleep(60)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[1]))
"""

# A thread starts the program and ends; its process goes on until it is told to end by a line.
OWNER = """
import os, subprocess, sys, threading

def start():
    subprocess.Popen([sys.executable, "-m", "unirun.launcher.tethered", str(os.getpid()), "program", "waits"])

thread = threading.Thread(target=start)
thread.start()
thread.join()
while len(os.listdir("/proc/self/task")) > 1:
    pass
print("the thread has ended", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def tethered(*args: str, owner: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unirun.launcher.tethered", str(owner or os.getpid()), *args]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=WAIT_TIMEOUT, check=False)


def ends(handle: int) -> bool:
    return bool(select.select([handle], [], [], WAIT_TIMEOUT)[0])


def test_the_program_has_its_arguments_and_its_code_is_passed_on() -> None:
    done = tethered("program", "3", "more")
    assert done.stdout.split()[3:] == ["3", "more"]
    assert done.returncode == 3


def test_a_program_that_is_killed_is_no_success() -> None:
    assert tethered("program", "killed").returncode not in (0, 3)


def test_an_owner_that_is_not_the_parent_has_ended() -> None:
    """Its number may be that of another process by now."""
    done = tethered("program", "0", owner=os.getppid())
    assert (done.stdout, done.returncode) == ("", 128 + signal.SIGTERM)


def test_the_program_is_told_when_its_owner_is_killed_and_not_when_the_thread_ends_that_started_it(
    owner: subprocess.Popen[str],
) -> None:
    assert owner.stdin is not None
    assert owner.stdout is not None
    lines = {owner.stdout.readline(), owner.stdout.readline()}
    (said,) = lines - {"the thread has ended\n"}
    pid = int(said.split()[1])
    child = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGRTMIN)
        assert owner.stdout.readline() == "not told\n"
        owner.stdin.write("go\n")
        owner.stdin.close()
        assert ends(child)
    finally:
        os.close(child)
    assert owner.stdout.read() == "told\n"
    assert owner.wait(WAIT_TIMEOUT) == -signal.SIGKILL


def test_the_program_is_told_when_the_process_that_watches_is_killed() -> None:
    command = [sys.executable, "-m", "unirun.launcher.tethered", str(os.getpid()), "program", "waits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        child = os.pidfd_open(int(watching.stdout.readline().split()[1]))
        watching.kill()
        try:
            assert ends(child)
        finally:
            os.close(child)
        assert watching.stdout.read() == "told\n"


def test_a_program_that_a_signal_has_killed_is_told_as_by_a_shell() -> None:
    assert tethered("program", "killed").returncode == 128 + signal.SIGKILL


def test_an_owner_that_is_gone_is_no_error() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, "-m", "unirun.launcher.tethered", str(gone.pid), "program", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 128 + signal.SIGTERM)
