"""A process that imports modules once, and forks warm processes (`unirun warm`), on this machine and into hosts of test beds.

Run as a file with ``PADDING ADDRESS STARTER MODULE…``. It listens at an abstract address, and ends with the process STARTER.
Each connection asks for one warm process: its home, its folder, which is made, and the pid of a process of its host (0: of
none). The answer is a byte, after the fork.
"""

import ctypes
import fcntl
import os
import select
import socket
import sys
from pathlib import Path

NAMESPACES = ("net", "uts", "ipc", "mnt")
IDLE = 3600.0

_libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: int) -> None:
    """Move this process into the namespaces of another one, of a host."""
    # As sshd and Slurm start processes of root.
    os.setgroups([0])
    for name in NAMESPACES:
        handle = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if _libc.setns(handle, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(handle)


def show_home(home: str) -> None:
    """Put `home` into the environment of this process as the kernel shows it: tests find processes by it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    name = b"UNIRUN_HOME="
    place = begin + ctypes.string_at(begin, end - begin).index(name) + len(name)
    room = len(ctypes.string_at(place))
    ctypes.memmove(place, home.encode().ljust(room, b"\0"), room)


def take_folder(folder: Path) -> None:
    """Make the folder, and hold its lock, as a warm process does that `start` has started."""
    for each in (folder.parent.parent, folder.parent):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Others see it when it is locked.
    draft = folder.with_name(f".{folder.name}")
    draft.mkdir(mode=0o700)
    log = os.open(draft / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fcntl.flock(log, fcntl.LOCK_EX)
    draft.rename(folder)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)


def next_request(listener: socket.socket, starter: int) -> list[str]:
    """The request for the warm process that this process, a fork, is. The first process stays here until its end."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(starter, select.POLLIN)
    while True:
        if starter in dict(poll.poll()):
            os._exit(0)
        connection = listener.accept()[0]
        request = connection.recv(8192).decode()
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                connection.close()
                listener.close()
                os.close(starter)
                return request.split("\0")
            os._exit(0)
        os.waitpid(child, 0)
        connection.sendall(b"f")
        connection.close()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # This directory: its modules must not be importable as top-level modules.
        del sys.path[0]
    from msgspec.structs import replace

    # No others: forks have the modules that a warm process has.
    from unirun.launcher.warm.key import state_of
    from unirun.launcher.warm.process import prepare, serve

    begun_by = os.pidfd_open(int(sys.argv[3]))
    asked = socket.socket(socket.AF_UNIX)
    # Before the imports, as another one may have been started at the same moment: it ends here.
    try:
        asked.bind(f"\0{sys.argv[2]}")
    except OSError:
        raise SystemExit from None
    asked.listen(128)
    description, files, modules = prepare(sys.argv[4:], IDLE)
    home, place, holder = next_request(asked, begun_by)
    show_home(home)
    if holder != "0":
        enter(int(holder))
    take_folder(Path(place))
    serve(Path(place), 0, replace(description, pid=os.getpid(), state=state_of()), files, modules)
