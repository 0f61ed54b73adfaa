"""A real spawner that imports nothing, spoken to as its agent does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from unirun.errors import ConnectionLost
from unirun.wire import BlockingStream, encode, encode_frame
from unirun.wire.messages import Message
from unirun.wire.spawning import (
    Forked,
    Kill,
    Preloaded,
    Reaped,
    ServeStore,
    Spawn,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
)

M = TypeVar("M")
SOON = 20.0


class Spawner:
    """The agent's end."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder = folder
        ours, theirs = socket.socketpair()
        about = [str(theirs.fileno()), str(os.getpid())]
        command = [sys.executable, "-P", "-m", "unirun.launcher.spawner", *about, *modules]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, start_new_session=True
        )
        theirs.close()
        self.stream = BlockingStream(ours)

    def next(self, kind: type[M]) -> M:
        message = self.stream.receive(SOON)
        assert isinstance(message, kind), message
        return message

    def until(self, kind: type[M]) -> M:
        while not isinstance(message := self.stream.receive(SOON), kind):
            continue
        return message

    def send(self, *messages: Message) -> None:
        """All at once, so that they arrive together."""
        self.stream.socket.sendall(b"".join(encode_frame(encode(message)) for message in messages))

    def program(self, number: int, *command: str, **more: object) -> Spawn:
        fields: dict[str, object] = {
            "title": f"actor:{number}",
            "kind": "program",
            "target": command[0],
            "args": command[1:],
            "fresh": True,
            "env": {"PATH": os.environ["PATH"], "ROLE_NAME": "actor", "RANK": str(number)},
            "cwd": str(self.folder),
            "logs": str(self.folder),
            "folder": str(number),
            **more,
        }
        return Spawn(number, **fields)  # type: ignore[arg-type]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> int:
        self.stream.close()
        code = self.process.wait(SOON)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Spawner]]:
    started: list[Spawner] = []

    def make(*modules: str) -> Spawner:
        started.append(Spawner(tmp_path, *modules))
        return started[-1]

    yield make
    for spawner in started:
        if spawner.process.returncode is None:
            spawner.process.kill()
            spawner.close()


@pytest.fixture
def spawner(start: Callable[..., Spawner]) -> Spawner:
    made = start()
    made.next(Preloaded)
    return made


def gone(pid: int) -> bool:
    """Whether there is no such process, or a zombie, which may be reaped between two looks at it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_program_runs_and_its_end_is_told(spawner: Spawner) -> None:
    spawner.send(spawner.program(1, "sh", "-c", "echo out; echo err >&2; exit 7"))
    assert spawner.next(Forked).id == 1
    end = spawner.next(Reaped)
    assert (end.id, end.code, end.signal) == (1, 7, None)
    assert (spawner.folder / "1" / "stdout.log").read_text() == "out\n"
    assert (spawner.folder / "1" / "stderr.log").read_text() == "err\n"


def test_a_signal_that_comes_right_after_the_order_is_not_lost(spawner: Spawner) -> None:
    """The child may have no group and no handlers of its own yet, and the spawner ignores SIGTERM."""
    for number in range(1, 41):
        signum = int((signal.SIGTERM, signal.SIGKILL)[number % 2])
        spawner.send(spawner.program(number, "sleep", "100"), Kill(number, signum))
        spawner.next(Forked)
        end = spawner.next(Reaped)
        assert (end.id, end.signal) == (number, signum)


def test_a_child_finds_the_usual_signal_handlers(spawner: Spawner) -> None:
    code = (
        "import signal; print([int(signal.getsignal(s)) for s in (1, 3, 15)], signal.pthread_sigmask(0, []))"
    )
    spawner.send(spawner.program(1, sys.executable, "-c", code))
    spawner.next(Forked)
    assert spawner.next(Reaped).code == 0
    assert (spawner.folder / "1" / "stdout.log").read_text() == "[0, 0, 0] set()\n"


def test_nothing_of_a_workers_group_is_left_when_its_end_is_told(spawner: Spawner) -> None:
    spawner.send(spawner.program(1, "sh", "-c", "sleep 100 & echo $!; exit 0"))
    spawner.next(Forked)
    spawner.until(Reaped)
    assert gone(int((spawner.folder / "1" / "stdout.log").read_text()))


def test_nothing_is_left_when_the_agent_is_gone(spawner: Spawner) -> None:
    spawner.send(spawner.program(1, "sleep", "100"), spawner.program(2, "setsid", "sleep", "100"))
    pids = [spawner.next(Forked).pid, spawner.next(Forked).pid]
    assert spawner.close() == 0
    assert all(gone(pid) for pid in pids)


def test_one_that_comes_after_its_agent_has_died_ends_before_it_imports_anything() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-P", "-m", "unirun.launcher.spawner", str(theirs.fileno())]
        done = subprocess.run(
            [*command, str(os.getppid()), "no_such_module"],
            pass_fds=[theirs.fileno()],
            timeout=SOON,
            check=False,
        )
        assert done.returncode == 128 + signal.SIGKILL
        theirs.close()
        assert ours.recv(1) == b""


def test_what_cannot_be_started_is_told(spawner: Spawner) -> None:
    (spawner.folder / "blocked").touch()
    spawner.send(
        spawner.program(1, "true", folder="blocked/1"),
        spawner.program(2, "no-such-program"),
        spawner.program(3, "true", cwd=str(spawner.folder / "nowhere")),
    )
    failed = spawner.next(SpawnFailed)
    assert (failed.id, failed.time > 0) == (1, True)
    assert "its log cannot be written" in failed.reason
    ends = {end.id: end.code for end in (spawner.until(Reaped), spawner.until(Reaped))}
    assert ends == {2: 127, 3: 126}
    assert "no-such-program cannot be executed" in (spawner.folder / "2" / "stderr.log").read_text()
    assert "could not be set up" in (spawner.folder / "3" / "stderr.log").read_text()


def test_a_module_that_cannot_be_imported_is_named(start: Callable[..., Spawner]) -> None:
    spawner = start("json", "no_such_module")
    failed = spawner.next(SpawnFailed)
    assert failed.id == 0
    assert "cannot import no_such_module: ModuleNotFoundError" in failed.reason
    with pytest.raises(ConnectionLost):
        spawner.stream.receive(SOON)
    assert spawner.process.wait(SOON) == 1


def test_a_store_takes_the_place_of_the_one_before_it_and_its_end_is_told(spawner: Spawner) -> None:
    """What it would import is of no interest here: it is told of as soon as it is forked."""
    spawner.send(ServeStore("actor", 3, 0))
    assert spawner.next(StoreOpened) == StoreOpened("actor", 3)
    first = spawner.children()
    spawner.send(ServeStore("actor", 4, 0))
    assert spawner.next(StoreOpened) == StoreOpened("actor", 4)
    second = spawner.children()
    assert len(first) == len(second) == 1
    assert first != second
    os.kill(second[0], signal.SIGKILL)
    end = spawner.next(StoreEnded)
    assert (end.role, end.generation, end.reason) == ("actor", 4, "its process was killed")
