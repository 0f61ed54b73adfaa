"""Linux process control: parent-death signals, subreapers, process groups, pidfds, limits."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_TITLE_LENGTH = 15

BOOT = str(Path(__file__).with_name("boot.py"))
"""The entry point of spawners, warm processes and fresh workers."""

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Set the signal that this process gets when `parent` ends. Exits at once when `parent` has already ended."""
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def ignore_signals(*signums: signal.Signals) -> None:
    """Ignore `signums`, SIGUSR1 and SIGUSR2. The last two are for users' programs: a batch system may send
    them to all processes of a job, and by default they kill."""
    for signum in (*signums, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)


def takes_signal(pid: int, signum: int) -> bool:
    """Return True if process `pid` has a handler for `signum`, or all of its threads block it, as for ``sigwait``.

    Raises `ProcessLookupError` when it is gone.
    """

    def has(status: Path, name: str) -> bool:
        value = next(line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
        return bool(int(value.split()[1], 16) >> (signum - 1) & 1)

    try:
        if has(Path(f"/proc/{pid}/status"), "SigCgt"):
            return True
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    for thread in Path(f"/proc/{pid}/task").glob("*/status"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if not has(thread, "SigBlk"):
                return False
    return True


def set_title(title: str) -> None:
    """Set the name of this process in ps and top; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, title.encode()[:_TITLE_LENGTH] + b"\0")


def set_command_line(text: str) -> None:
    """Set this process's command line in ps to `text`, cut to the size of the original one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(stat[45]), int(stat[46])
        room = end - begin
        data = text.encode(errors="replace")[: room - 2]
        # If the last byte is not 0, the kernel shows the text up to the first 0.
        ctypes.memmove(begin, data + bytes(room - len(data) - 1) + b"\x01", room)


def title_of(pid: int) -> str:
    """The name of a process; empty when it is gone, or when the name may have been cut."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""
    return name if len(name) < _TITLE_LENGTH else ""


def adopt_orphans() -> None:
    """Become the subreaper: the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(group: int, signum: int) -> None:
    """Send `signum` to a process group; a missing one is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


TRACKER = b"multiprocessing.resource_tracker"
TRACKER_EXIT_TIMEOUT = 1.0
"""Seconds in which a resource tracker removes what others have left; it takes some milliseconds."""


def is_tracker(pid: int) -> bool:
    """Return True for a resource tracker of Python's multiprocessing. When all processes that it works for are gone, it
    removes the shared memory and the semaphores that they have left, and ends."""
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_family(group: int, members: Collection[int]) -> None:
    """SIGKILL the process group `group`, of which `members` are known, but not the resource trackers among these."""
    trackers = {pid for pid in members if is_tracker(pid)}
    if not trackers:
        kill_group(group, signal.SIGKILL)
    for pid in {*members} - trackers if trackers else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The children of `pid`, theirs, and so on."""
    found: list[int] = []
    left = [pid]
    while left:
        more = children(left.pop())
        found += more
        left += more
    return found


def group_of(pid: int) -> int:
    """The process group of `pid`; 0 when it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def children(parent: int | None = None) -> list[int]:
    """The children of a process, by default of this one, including adopted ones."""
    found: list[int] = []
    for task in Path(f"/proc/{parent or 'self'}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in task.read_text().split()]
    return found


def collect_orphans(ours: Collection[int]) -> None:
    """Collect adopted children that have ended: those that are not among `ours`.

    An ended child among `ours` that has not been waited for yet stops the collection; the next call continues.
    """
    with contextlib.suppress(ChildProcessError):
        while (
            end := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) is not None and end.si_pid not in ours:
            os.waitid(os.P_PID, end.si_pid, os.WEXITED | os.WNOHANG)


def environment_of(pid: int) -> dict[str, str]:
    """The initial environment of `pid`; empty when it is gone or not readable."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def kill_children(keep: Collection[int] = (), deadline: float = 2.0) -> None:
    """SIGKILL every child that is not in `keep`, and their children as they are adopted, for at most `deadline`
    seconds. Resource trackers have `TRACKER_EXIT_TIMEOUT` to end by themselves."""
    end = time.monotonic() + deadline
    patience = time.monotonic() + TRACKER_EXIT_TIMEOUT
    while time.monotonic() < end:
        left = [pid for pid in children() if pid not in keep]
        if not left:
            return
        strays = [pid for pid in left if time.monotonic() >= patience or not is_tracker(pid)]
        if not strays:
            for pid in left:
                _reap(pid, patience)
            continue
        for pid in strays:
            kill_family(pid, [pid, *descendants(pid)])
            # A process of another user is left.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in strays:
            _reap(pid, end)


def _reap(pid: int, end: float) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable(handle, end - time.monotonic())
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    finally:
        os.close(handle)


def readable(handle: int | socket.socket, seconds: float | None) -> bool:
    """Wait until a descriptor can be read, or its process has ended: at most so many seconds, if they are given."""
    # Not select(), which is limited to descriptors below 1024.
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(seconds, 0.0) * 1000))


_NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
"""The errors for a number that no process has. The last two, by the version of Linux, are for that of a thread."""


def process_has_ended(pid: int) -> bool:
    """Return True if there is no such process, or its end was not collected yet."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        return True
    try:
        return readable(handle, 0.0)
    finally:
        os.close(handle)


def spare_descriptors() -> int:
    """Raise this process's soft limit of descriptors to the hard one. Returns the old limit, for child programs.

    An agent has a socket for each of its workers, a spawner a pidfd, the command two log files. The usual limit of 1024
    exists for programs that use ``select``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft
