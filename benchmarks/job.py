"""Measured jobs: started by unirun or by torchrun, with a deadline for each wait, and removed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from benchmarks.figure import BenchmarkError

SCRIPT = Path(__file__).with_name("ranks.py")
"""The script of the ranks, under every launcher."""

DEADLINE = 90.0
"""Seconds for any single wait: several times as long as 16 interpreters need to import torch at once."""

SWEEP_DEADLINE = 15.0
"""Seconds for the processes of a job to be gone after SIGKILL."""

T = TypeVar("T")

_FOREIGN = (
    *("PET_", "UNIRUN_", "TORCHELASTIC_", "OMP_", "MASTER_", "TORCH_DISABLE_SHARE_"),
    "PYTHONDONTWRITEBYTECODE",
)
"""Variables of the caller that would change what is measured. An installed package has its bytecode: without it, each
process compiles its modules."""

Then = Literal["once", "sit", "train", "stubborn"]
"""The action of ranks after their first all_reduce; see `benchmarks.ranks`."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that starts ranks, and the variables that it needs."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def program(name: str) -> str:
    """The program that is installed beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


UNIRUN = Launcher("unirun", (program("unirun"), "--quiet"), {"UNIRUN_WARM": "0"})
TORCHRUN = Launcher("torchrun", (program("torchrun"), "--standalone"))
TORCHRUN_OWN_STORE = Launcher("torchrun", TORCHRUN.command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
"""torchrun with a store per group: with the shared one, restarted gloo ranks find the addresses of dead peers."""


@dataclass(frozen=True, slots=True)
class Point:
    """One line of a rank: it is past its first all_reduce, at `time` seconds since the epoch."""

    rank: int
    restarts: int
    pid: int
    time: float


def parse_points(text: str) -> list[Point]:
    """The points in the file to which the ranks append, without an incomplete last line."""
    rows = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Point(int(rank), int(restarts), int(pid), float(when)) for rank, restarts, pid, when in rows]


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was started. `began` is the time just before its command was executed."""

    home: Path
    process: subprocess.Popen[bytes]
    ranks: int
    began: float

    def points(self, restarts: int = 0) -> list[Point]:
        """Wait until every rank is past an all_reduce in its group number `restarts`; their points by rank."""

        def complete() -> list[Point] | None:
            with contextlib.suppress(FileNotFoundError):
                found = parse_points((self.home / "points").read_text())
                mine = [point for point in found if point.restarts == restarts]
                if len(mine) == self.ranks:
                    return sorted(mine, key=lambda point: point.rank)
            code = self.process.poll()
            if code:
                raise BenchmarkError(f"the launcher ended with {code}\n{self.output()}")
            return None

        return self.wait(complete, f"all {self.ranks} ranks past an all_reduce (restart {restarts})")

    def wait(self, look: Callable[[], T | None], what: str) -> T:
        """Poll until there is a result. Raises `BenchmarkError` at the deadline."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            found = look()
            if found is not None:
                return found
            time.sleep(0.005)
        raise BenchmarkError(f"waited {DEADLINE:g} s for: {what}\n{self.output()}")

    def succeed(self) -> None:
        """Wait for the end of the job; anything but success is a `BenchmarkError`."""
        try:
            code = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"the job did not end within {DEADLINE:g} s\n{self.output()}") from error
        if code != 0:
            raise BenchmarkError(f"the job ended with {code}\n{self.output()}")

    def output(self) -> str:
        """The last lines that the launcher and the ranks wrote."""
        return "\n".join((self.home / "output").read_text(errors="replace").splitlines()[-12:])

    def members(self) -> list[psutil.Process]:
        """Every live process of the job."""
        return members(self.home)

    def sweep(self) -> None:
        """Send SIGKILL to all remaining processes of the job and wait until they have ended."""
        sweep(self.home, self.process.poll)
        self.process.wait(SWEEP_DEADLINE)


def members(home: Path) -> list[psutil.Process]:
    """Every live process that has inherited `home` from `environment`, whatever its parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("UNIRUN_HOME") == str(home):
                found.append(process)
    return found


def sweep(home: Path, reap: Callable[[], object] = lambda: None) -> None:
    """Send SIGKILL to all processes with this `home` and wait until they have ended. `reap` collects ended children."""
    end = time.monotonic() + SWEEP_DEADLINE
    while left := members(home):
        if time.monotonic() > end:
            raise BenchmarkError(f"processes {', '.join(str(each.pid) for each in left)} do not end")
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        reap()
        time.sleep(0.01)


def environment(home: Path) -> dict[str, str]:
    """The caller's environment without variables that would change the measurement. All files are in `home`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**env, "UNIRUN_HOME": str(home), "TMPDIR": str(home)}


@contextlib.contextmanager
def started(launcher: Launcher, ranks: int, then: Then, max_restarts: int = 0) -> Iterator[Job]:
    """A job of `ranks` ranks on this host. At the end of the context, none of its processes and files is left."""
    options = (f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}")
    with running(launcher, ranks, lambda home: (*options, str(SCRIPT), str(home / "points"), then)) as job:
        yield job


@contextlib.contextmanager
def running(launcher: Launcher, ranks: int, arguments: Callable[[Path], tuple[str, ...]]) -> Iterator[Job]:
    """The job that the launcher starts with these arguments; they may name files in the job's own directory. At the end
    of the context, none of its processes and files is left."""
    home = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    try:
        command = (*launcher.command, *arguments(home))
        with (home / "output").open("wb") as output:
            began = time.time()
            process = subprocess.Popen(
                command,
                env={**environment(home), **launcher.env},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        job = Job(home, process, ranks, began)
        try:
            yield job
        finally:
            job.sweep()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def start_time(launcher: Launcher, ranks: int) -> float:
    """Seconds from just before exec of the command until all ranks are past ``init_process_group`` and one
    all_reduce. The job must end well, too; that is not part of the time."""
    with started(launcher, ranks, "once") as job:
        ready = max(point.time for point in job.points())
        job.succeed()
    return ready - job.began


def timed(command: list[str], env: dict[str, str]) -> tuple[float, str]:
    """Seconds that `command` took, and its stdout; it must end with 0."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{' '.join(command)} did not end within {DEADLINE:g} s") from error
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    return seconds, done.stdout


def proportional_set_size(pid: int) -> float:
    """The PSS of a process in MB."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    raise BenchmarkError(f"the kernel gives no PSS of process {pid}")
