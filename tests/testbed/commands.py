"""The command in forks of a process that has imported it, so that not each of a thousand commands is a new interpreter."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import unirun
from tests.testbed.importing import Importing
from unirun.launcher.warm.files import AT_START, VARIABLE, folders_of

MODULES = (
    "unirun.cli.jobs",
    "unirun.cli.logs",
    "unirun.cli.run",
    "unirun.cli.status",
    "unirun.launcher.agent",
    "unirun.launcher.foreground.session",
    "unirun.launcher.forked",
    "unirun.launcher.master.lead",
    "unirun.rendezvous.store.sqlite",
)
"""The modules of most commands and jobs that are imported when they are needed."""

OF_EXPERIMENTS = (
    *MODULES,
    "unirun.cli.experiment",
    "unirun.experiments.checks",
    "unirun.experiments.models.backends",
    "unirun.experiments.starting",
)
"""Those of `unirun experiment`, with torch."""

STARTING = ("PYTHON", "LC_", "LANG", "LD_", "TZ", "MALLOC_", "GLIBC_")
"""The beginnings of variables that an interpreter, or the C library, reads when it starts."""


def _starting(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(STARTING) and name != VARIABLE}


# Commands never get this one from here.
_AT_START = _starting({name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"})


def may_fork(env: Mapping[str, str], cwd: Path) -> bool:
    """Return True if a command in the environment `env` and the directory `cwd` may be a fork of one in the environment of
    these tests. It cannot be if a folder of its PYTHONPATH has what an interpreter imports when it starts, or another
    unirun."""
    folders = [Path(folder) for folder in folders_of(env.get(VARIABLE), str(cwd))]
    programs = (folder / f"{name}.py" for folder in folders for name in AT_START)
    packages = (folder / "unirun" for folder in folders if (folder / "unirun" / "cli").exists())
    return (
        _starting(env) == _AT_START
        and not any(program.exists() for program in programs)
        and all(package.samefile(unirun.__path__[0]) for package in packages)
    )


class ForkedCommand:
    """A command that runs, with as much of `subprocess.Popen` as tests need of it. It has its own session."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        constants: Mapping[str, float] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.PIPE,
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        request = {"argv": [*args], "cwd": str(cwd), "env": {**env}, "constants": {**(constants or {})}}
        with contextlib.ExitStack() as theirs:
            numbers: list[int] = []
            ours: list[IO[bytes] | None] = []
            for number, stream in enumerate((stdin, stdout, stderr)):
                given, kept = _ends(number, stream, numbers)
                if stream in (subprocess.PIPE, subprocess.DEVNULL):
                    theirs.callback(os.close, given)
                numbers.append(given)
                ours.append(kept)
            self.stdin, self.stdout, self.stderr = ours
            modules = OF_EXPERIMENTS if "experiment" in args[1:2] else MODULES
            importing = Importing("command", modules, {**env, VARIABLE: ""}, ())
            self.pid, self._connection = importing.fork(request, numbers)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Returns the exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([*self.args], timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._connection.recv(64)))
            self._connection.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def _ends(number: int, stream: int | IO[Any] | None, others: Sequence[int]) -> tuple[int, IO[bytes] | None]:
    """The descriptor that the command gets as `number`, and this process's end of a pipe."""
    match stream:
        case None:
            return number, None
        case subprocess.DEVNULL:
            return os.open(os.devnull, os.O_RDWR), None
        case subprocess.STDOUT:
            return others[1], None
        case subprocess.PIPE:
            reading, writing = os.pipe()
            return (writing, open(reading, "rb")) if number else (reading, open(writing, "wb"))
        case int():
            return stream, None
        case _:
            return stream.fileno(), None
