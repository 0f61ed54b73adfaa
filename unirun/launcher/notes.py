"""The notes that an agent adds to a spawner's news that a worker has ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from unirun.failover.diagnosis import OOM_KILLED
from unirun.launcher.events import TAIL_BYTES, AgentState, error_tail
from unirun.values import Value
from unirun.wire.reports import Message, Reaped

# Evidence that the kernel's out-of-memory killer has ended a process.

PERHAPS = "perhaps for lack of memory: the kernel has killed a process of this host for that"

_KERNEL_LOG = Path("/dev/kmsg")
_RECORDS = 4096
"""Maximum number of records of the kernel's log that are read."""


class Kills(Value):
    """Numbers of processes that the kernel has killed for lack of memory: `own` in this control group, None where the
    kernel does not count them; `host` on the whole host."""

    own: int | None
    host: int


def kills_so_far(proc: Path = Path("/proc"), mounts: Path = Path("/sys/fs/cgroup")) -> Kills:
    """Read the kernel's counts."""
    return Kills(_own(proc, mounts), _count(proc / "vmstat") or 0)


def explain(pid: int | None, before: Kills, now: Kills, log: Path = _KERNEL_LOG) -> str:
    """The note on the end of process `pid` by SIGKILL, between two readings of the counts; empty when it was not the
    kernel, as far as is known.

    A worker may have a control group of its own, so that it is not counted in this process's; then the kernel's log
    tells, where it may be read.
    """
    if now.own is not None and before.own is not None and now.own > before.own:
        return OOM_KILLED
    if now.host == before.host:
        return ""
    return OOM_KILLED if pid is not None and pid in _killed(log) else PERHAPS


def _own(proc: Path, mounts: Path) -> int | None:
    """The count of this process's control group: version 2, else the controller ``memory`` of version 1."""
    with contextlib.suppress(OSError):
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            if "memory" in controllers.split(","):
                return _count(mounts / "memory" / path.lstrip("/") / "memory.oom_control")
        for number, _, path in groups:
            if number == "0":
                return _count(mounts / path.lstrip("/") / "memory.events")
    return None


def _count(path: Path) -> int | None:
    """The number after ``oom_kill``."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _killed(log: Path) -> set[int]:
    """The processes that the kernel's log names; none where this user may not read it."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # Each read gives one record; it fails when there is no other.
            for _ in range(_RECORDS):
                if not (record := os.read(handle, 8192)):
                    break
                found |= {int(pid) for pid in re.findall(rb"[Kk]illed process (\d+)", record)}
        finally:
            os.close(handle)
    return found


def kill_note(state: AgentState, message: Message, before: Kills) -> tuple[str, Kills]:
    """A note for the report on a SIGKILL that unirun has not sent, empty when nothing is known of it; and the counts
    now, for the next call. `before` are those of the last one."""
    if not isinstance(message, Reaped) or message.signal != signal.SIGKILL:
        return "", before
    worker = state.workers.get(message.id)
    if worker is None or worker.cause != "own":
        return "", before
    now = kills_so_far()
    return explain(worker.pid, before, now), now


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
