"""The notes that an agent adds to a spawner's news that a worker has ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from unirun import atomic
from unirun.failover.diagnosis import OOM_KILLED
from unirun.launcher.environment import ERROR_FILE
from unirun.launcher.events import TAIL_BYTES, AgentState, error_tail
from unirun.values import Value
from unirun.wire.reports import Message, Reaped

# Evidence that the kernel's out-of-memory killer has ended a process.

PERHAPS = "perhaps for lack of memory: the kernel has killed a process of this host for that"

_KERNEL_LOG = Path("/dev/kmsg")
_RECORDS = 1 << 16
"""Maximum number of records of the kernel's log that are read."""

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the namespace whose pids the kernel's log has."""


class Kills(Value):
    """Numbers of processes that the kernel has killed for lack of memory: `own` in this control group, None where the
    kernel does not count them; `host` on the whole host."""

    own: int | None
    host: int


def kills_so_far(proc: Path = Path("/proc"), mounts: Path = Path("/sys/fs/cgroup")) -> Kills:
    """Read the kernel's counts."""
    return Kills(_own(proc, mounts), _count(proc / "vmstat") or 0)


def explain(pid: int | None, before: Kills, now: Kills, log: Path | None) -> str:
    """The note on the end of process `pid` by SIGKILL, between two readings of the counts; empty when it was not the
    kernel, as far as is known.

    The kernel's log names the processes, so it decides where it may be read. Elsewhere, a count of this control group
    means a process of the job's; a worker may have a group of its own, and is not counted here then.
    """
    if now == before:
        return ""
    if log is not None and (named := _killed(log)) is not None:
        return OOM_KILLED if pid in named else ""
    if now.own is not None and before.own is not None and now.own > before.own:
        return OOM_KILLED
    return PERHAPS


def _own(proc: Path, mounts: Path) -> int | None:
    """The count of this process's control group of version 2, with the groups below it. With version 1 there is no such
    count."""
    found = None
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return None
            if number == "0":
                found = _count(mounts / path.lstrip("/") / "memory.events")
    return found


def _count(path: Path) -> int | None:
    """The number after ``oom_kill``."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _killed(log: Path) -> set[int] | None:
    """The processes that the kernel's log names; None where this user may not read it."""
    found: set[int] = set()
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # Each read gives one record.
        for _ in range(_RECORDS):
            try:
                record = os.read(handle, 8192)
            except BrokenPipeError:
                # The record was overwritten; the next one is there.
                continue
            except OSError:
                break
            if not record:
                break
            found |= {int(pid) for pid in re.findall(rb"[Kk]illed process (\d{1,9})", record)}
    finally:
        os.close(handle)
    return found


def _log() -> Path | None:
    """The kernel's log, if it has the pids of this process's namespace."""
    try:
        initial = os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return None
    return _KERNEL_LOG if initial else None


def kill_note(state: AgentState, message: Message, before: Kills) -> str:
    """A note for the report on a SIGKILL that unirun has not sent, empty when nothing is known of it. `before` are the
    counts a moment before."""
    if not isinstance(message, Reaped) or message.signal != signal.SIGKILL:
        return ""
    worker = state.workers.get(message.id)
    if worker is None or worker.cause != "own":
        return ""
    return explain(worker.pid, before, kills_so_far(), _log())


def tail(state: AgentState, message: Message) -> str:
    """The last lines of the stderr of a worker that failed; of a program, which may log to either, those of the file
    that it has written to last, whatever its exit code is."""
    if not isinstance(message, Reaped) or message.id not in state.workers:
        return ""
    request = state.workers[message.id].request
    program = request.kind == "program"
    if message.code == 0 and not program:
        return ""
    names = ("stdout.log", "stderr.log") if program else ("stderr.log",)
    try:
        paths = [os.path.join(request.logs, request.folder, name) for name in names]
        # An empty file is as old as the process.
        with open(
            max(paths, key=lambda path: (os.path.getsize(path) > 0, os.path.getmtime(path))), "rb"
        ) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return error_tail(file.read().decode(errors="replace"))
    except OSError:
        return ""


def remove_draft(state: AgentState, message: Message) -> None:
    """Remove what a worker has left that was killed while it wrote its error file."""
    if isinstance(message, Reaped) and message.id in state.workers:
        request = state.workers[message.id].request
        # Where it cannot be removed, it is in nobody's way.
        with contextlib.suppress(OSError):
            atomic.remove_draft(Path(request.logs, request.folder, ERROR_FILE))
