"""The command as a user calls it, and helpers that wait for events with a deadline."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.testbed.commands import ForkedCommand
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.cli.commands import call

from .invariants import Invariants

T = TypeVar("T")
Command = TypeVar("Command", bound="Unirun")

START_TIMEOUT = 120.0
"""Deadline in seconds for everything that imports torch on a busy machine."""


UNIRUN = str(Path(sys.executable).with_name("unirun"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SCRIPTS = Path(__file__).parent / "scripts"
PATCHED = Path(__file__).parents[1] / "testbed" / "patched.py"
ENVIRON = SCRIPTS / "environ.py"
"""A worker that prints its environment."""

EXEC = ("--start-method", "exec")
"""Each worker is a new interpreter: tests that do not need torch do not wait for its import."""

SHORT_TERM = {
    "unirun.launcher.master.lead.TERM_TTL": 3.0,
    "unirun.rendezvous.election.CALM_POLL_INTERVAL": 0.3,
    "unirun.rendezvous.masters.SUCCESSOR_POLL_INTERVAL": 0.3,
}
"""Constants by which a hanging first master loses its term after three seconds, and others notice it at once."""

EVEN_DELAY = {"unirun.launcher.standby.MAX_DELAY": 1.0}
"""Constants by which agents start one master after another without growing delays."""

SHORT_DELAYS = {
    "unirun.launcher.foreground.session.FORCED_KILL_DELAY": 0.5,
    "unirun.launcher.foreground.session.JOB_EXIT_TIMEOUT": 2.0,
}
"""Constants by which a command that was interrupted twice soon kills remaining processes."""

Script = Callable[..., Path]
"""The fixture `script`: it writes a worker's script and returns its path."""


def gone(pid: int, within: float) -> bool:
    """Return True if process `pid` ends within `within` seconds, watched by its pidfd."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], max(within, 0.0))[0])
    finally:
        os.close(handle)


def state_of(pid: int) -> str:
    """The state of a process as ps shows it. Raises OSError when it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    """Return True if `pid` is a running process, not a zombie."""
    try:
        return state_of(pid) not in "ZX"
    except OSError:
        return False


def processes_of(home: Path) -> dict[int, str]:
    """Every live process that has `home` in its initial environment, with its title."""
    mark = f"UNIRUN_HOME={home}".encode()
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            # All processes of the machine are looked at several times in each test, so this does no more than it must.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb", buffering=0) as environ:
                if mark in (text := environ.read()) and mark in text.split(b"\0") and alive(int(name)):
                    found[int(name)] = Path("/proc", name, "comm").read_text().strip()
    return found


@dataclass(frozen=True)
class Result:
    """The end of a command."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """stdout without the prefixes of the workers, sorted: the order between workers is not defined."""
        return sorted(re.sub(r"^\[[\w-]+:\d+\] ", "", line) for line in self.out.splitlines())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The JSON objects that workers printed, in order of role and rank if they have them."""
        rows = [json.loads(line) for line in self.lines if line.startswith("{")]
        return sorted(rows, key=lambda row: (str(row.get("role")), int(row.get("rank", 0))))


class _Reader(threading.Thread):
    """Collects the lines of a pipe, and wakes up those that wait for one."""

    def __init__(self, pipe: Any, changed: threading.Condition) -> None:
        super().__init__(daemon=True)
        self.text, self.ended = "", False
        self._pipe, self._changed = pipe, changed
        self.start()

    def run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        while data := os.read(self._pipe.fileno(), 1 << 20):
            with self._changed:
                self.text += decoder.decode(data)
                self._changed.notify_all()
        self._pipe.close()
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Running:
    """A started `unirun`."""

    def __init__(
        self, command: Unirun, popen: subprocess.Popen[bytes] | ForkedCommand, *, read: bool
    ) -> None:
        self.command, self.popen, self.pid = command, popen, popen.pid
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._readers = [
            _Reader(pipe, self._changed) for pipe in (popen.stdout, popen.stderr) if pipe and read
        ]

    @property
    def text(self) -> str:
        """Its output so far, stdout first."""
        return "\n".join(reader.text for reader in self._readers)

    def lines(self, pattern: str, count: int = 1, within: float = START_TIMEOUT) -> list[str]:
        """Wait until `count` lines match `pattern`; the matches, or the first group of each."""
        deadline = time.monotonic() + within
        with self._changed:
            while True:
                found = [m.group(m.lastindex or 0) for m in re.finditer(pattern, self.text, re.MULTILINE)]
                if len(found) >= count:
                    return found
                over = all(reader.ended for reader in self._readers)
                if over or not self._changed.wait(deadline - time.monotonic()):
                    raise AssertionError(
                        f"{len(found)} of {count} lines match {pattern!r} {'at the end' if over else 'in time'}:\n{self.text[-3000:]}"
                    )

    def signal(self, signum: int) -> None:
        """Send a signal to the command itself."""
        self.popen.send_signal(signum)

    def end(self, within: float = START_TIMEOUT) -> Result:
        """Wait for the end."""
        assert gone(self.pid, within), f"unirun did not end within {within:g} s:\n{self.text[-3000:]}"
        code = self.popen.wait()
        for reader in self._readers:
            reader.join(WAIT_TIMEOUT)
        out, err = (*(reader.text for reader in self._readers), "", "")[:2]
        return Result(code, out, err, time.monotonic() - self._began)


class Unirun:
    """The command, with its own home."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.started: list[Running] = []
        self.breaks = "(?!)"
        """A pattern of invariants that the test breaks on purpose."""

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of the command: this process's, without what a launcher around it would set, and without
        PYTHONUNBUFFERED, which would hide that a worker is not ``python -u``."""
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_", "UNIRUN_"))
        }
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
            "PYTHONUNBUFFERED",
        ):
            clean.pop(name, None)
        own = {"UNIRUN_HOME": str(self.home), "UNIRUN_RUN_DIR": str(self.root / "run")}
        return {**clean, **own, **(extra or {})}

    def start(
        self,
        *args: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        read: bool = True,
        constants: Mapping[str, float] | None = None,
        **popen: Any,
    ) -> Running:
        """Start it in a session of its own, so that signals reach it alone. `constants` of the product have other values
        in the command, the agents and the first master."""
        program = [sys.executable, str(PATCHED), json.dumps(constants)] if constants else [UNIRUN]
        return self.start_program([*program, *map(str, args)], env=env, cwd=cwd, read=read, **popen)

    def start_program(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        read: bool = True,
        **popen: Any,
    ) -> Running:
        """Start another program with this home, in the same way."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            command,
            cwd=cwd or self.root,
            env=self.environment(env),
            start_new_session=True,
            **{**pipes, **popen},
        )
        self.started.append(Running(self, process, read=read))
        return self.started[-1]

    def __call__(self, *args: object, within: float = START_TIMEOUT, **how: Any) -> Result:
        """Run the command until it ends."""
        return self.start(*args, **how).end(within)

    def status(self) -> dict[str, Any]:
        """``unirun status --json`` of the newest job, without a process, as it is called often."""
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.setenv("UNIRUN_HOME", str(self.home))
            assert call("status", ["--json"]) == 0
        found: dict[str, Any] = json.loads(out.getvalue())
        return found

    def workers(self) -> dict[str, dict[str, Any]]:
        """The workers of the newest job in its status, by ``role:rank``. Of a job that goes on, each has, or has had, a process."""

        def look() -> dict[str, dict[str, Any]] | None:
            now = self.status()
            found = {f"{role['name']}:{w['rank']}": w for role in now["roles"] for w in role["workers"]}
            return found if now["ended"] or all(w["pid"] or w["exit"] for w in found.values()) else None

        return eventually(look, "the status has the pids of all workers", START_TIMEOUT)

    def job_dir(self) -> Path:
        """The directory of the only job."""
        (path,) = (self.home / "jobs").iterdir()
        return path

    def events(self, kind: str) -> list[str]:
        """The texts of the job's events of one kind."""
        lines = (self.job_dir() / "events.jsonl").read_text().splitlines()
        return [row["text"] for row in map(json.loads, lines) if row["kind"] == kind]

    def log(self, role: str, rank: int, incarnation: int = 0, stream: str = "stdout") -> bytes:
        """The output of one worker."""
        path = self.job_dir() / "logs" / role / str(rank) / str(incarnation) / f"{stream}.log"
        return path.read_bytes()

    def processes(self) -> dict[int, str]:
        """The live processes of every job of this home, commands included: pid → title."""
        return processes_of(self.home)

    def pid_of(self, title: str) -> int:
        """The pid of the only process with this title, as ps shows it.

        Between fork and exec a child still has its parent's title, so there may be two for a moment.
        """

        def only() -> int | None:
            found = [pid for pid, name in self.processes().items() if name == title[:15]]
            return found[0] if len(found) == 1 else None

        return eventually(only, f"one process is called {title}")

    def assert_nothing_left(self, within: float = WAIT_TIMEOUT) -> None:
        """Fail unless all processes of all jobs are gone within `within` seconds."""
        deadline = time.monotonic() + within
        while (left := self.processes()) and time.monotonic() < deadline:
            gone(next(iter(left)), deadline - time.monotonic())
        assert not left, f"left behind: {left}"

    def clean_up(self) -> dict[int, str]:
        """Kill the remaining processes, and return them."""
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for running in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.popen.wait(WAIT_TIMEOUT)
        return left


@contextlib.contextmanager
def command_in(root: Path) -> Iterator[Unirun]:
    """A `Unirun` with cold starts, whose jobs must leave no process when the context ends."""
    with swept(Unirun(root)) as command:
        yield command


@contextlib.contextmanager
def home_of(command: Unirun) -> Iterator[Unirun]:
    """`command`, in whose home this process starts its own jobs until the context ends."""
    with swept(command), pytest.MonkeyPatch.context() as patch:
        environ = command.environment()
        for name in ("UNIRUN_HOME", "UNIRUN_RUN_DIR"):
            patch.setenv(name, environ[name])
        # What pytest has imported is no business of the workers, which would have other streams than warm processes.
        for name in ("PYTHONPATH", "PYTHONUNBUFFERED"):
            patch.delenv(name, raising=False)
        yield command


@contextlib.contextmanager
def swept(command: Command) -> Iterator[Command]:
    """Fail when a job of `command` has broken an invariant at the end of the context, or has left a process."""
    failed = True
    invariants = Invariants(lambda: [running.pid for running in command.started])
    invariants.start()
    try:
        yield command
        failed = False
    finally:
        try:
            if not failed:
                command.assert_nothing_left()
        finally:
            command.clean_up()
            invariants.close()
        if not failed:
            outputs = [running.text for running in command.started]
            broken = [
                each
                for each in invariants.broken(command.home, outputs)
                if not re.search(command.breaks, each)
            ]
            assert not broken, "\n".join(broken)
