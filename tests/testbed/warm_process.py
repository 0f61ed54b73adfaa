"""A process that imports torch once and forks a warm process (`unirun warm`) into each host of a test bed.

Run as a file with ``PADDING``. Each line that it reads is the pid of a process of the host, and the folder of the warm
process, which exists there. It writes a line when it has imported torch, and one when it has forked.
"""

import ctypes
import fcntl
import os
import sys
from pathlib import Path

NAMESPACES = ("net", "uts", "ipc", "mnt")
IDLE = 3600.0

_libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: int) -> None:
    """Move this process into the namespaces of another one."""
    for name in NAMESPACES:
        handle = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if _libc.setns(handle, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(handle)


def take_folder(folder: Path) -> None:
    """Hold the lock of the folder, as a warm process does that `start` has started."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fcntl.flock(log, fcntl.LOCK_EX)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)


def next_host() -> tuple[int, Path] | None:
    """The host in which this process, a fork, is the warm process. None at the end of the tests, in the first process."""
    while line := os.read(0, 4096).decode():
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                pid, folder = line.split()
                return int(pid), Path(folder)
            os._exit(0)
        os.waitpid(child, 0)
        os.write(1, b"forked\n")
    return None


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # This directory: its modules must not be importable as top-level modules.
        del sys.path[0]
    from msgspec.structs import replace

    from unirun.launcher.warm.borrowing import LOG
    from unirun.launcher.warm.key import state_of
    from unirun.launcher.warm.process import prepare, serve

    # As sshd and Slurm start processes of root.
    os.setgroups([0])
    description, files, modules = prepare(["torch"], IDLE)
    os.write(1, b"ready\n")
    if (host := next_host()) is not None:
        enter(host[0])
        take_folder(host[1])
        serve(host[1], 0, replace(description, pid=os.getpid(), state=state_of()), files, modules)
