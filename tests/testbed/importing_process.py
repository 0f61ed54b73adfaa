"""A process that imports modules once, and forks others for tests: warm processes (`unirun warm`), also into hosts of test
beds, and the command.

Run as a file with ``PADDING ADDRESS STARTER KIND MODULE…``, where KIND is ``warm`` or ``command``. It listens at an abstract
address, and ends with the process STARTER. Each connection asks for one fork (`next_request`).
"""

import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import socket
import sys
from pathlib import Path
from typing import Any

NAMESPACES = ("net", "uts", "ipc", "mnt")
IDLE = 3600.0
LONGEST_REQUEST = 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def next_request(listener: socket.socket, starter: int) -> tuple[dict[str, Any], list[int]]:
    """The request for which this process, a fork, is, and the descriptors that came with it. The first process stays here
    until its end. It answers each request with the pid of the fork, and then with its exit status."""
    forks: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    for each in (listener.fileno(), starter):
        poll.register(each, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if number == starter:
                os._exit(0)
            elif number in forks:
                pid, connection = forks.pop(number)
                poll.unregister(number)
                os.close(number)
                tell(connection, os.waitpid(pid, 0)[1])
                connection.close()
            else:
                connection, _ = listener.accept()
                data, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
                if (child := os.fork()) == 0:
                    os.setsid()
                    connection.close()
                    listener.close()
                    for handle, (_, others) in forks.items():
                        os.close(handle)
                        others.close()
                    os.close(starter)
                    return json.loads(data), descriptors
                for each in descriptors:
                    os.close(each)
                tell(connection, child)
                handle = os.pidfd_open(child)
                forks[handle] = child, connection
                poll.register(handle, select.POLLIN)


def tell(connection: socket.socket, value: int) -> None:
    """Answer a test, if it still listens."""
    try:
        connection.sendall(str(value).encode())
    except OSError:
        return


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


def be_warm(listener: socket.socket, starter: int, names: list[str]) -> None:
    """Import the modules `names`, and be a warm process in each fork."""
    from msgspec.structs import replace

    # No others: forks have the modules that a warm process has.
    from unirun.launcher.warm.key import state_of
    from unirun.launcher.warm.process import prepare, serve

    description, files, modules = prepare(names, IDLE)
    request, _ = next_request(listener, starter)
    show_home(request["home"])
    if request["holder"]:
        enter(request["holder"])
    folder = Path(request["folder"])
    take_folder(folder)
    serve(folder, 0, replace(description, pid=os.getpid(), state=state_of()), files, modules)


def be_command(listener: socket.socket, starter: int, names: list[str]) -> None:
    """Import the modules `names`, and be the command with the arguments, the environment, the directory and the standard
    streams of the request in each fork, with other values of `constants` (`patched.py`)."""
    from unirun.cli import main
    from unirun.launcher.process import set_command_line, set_title
    from unirun.launcher.warm.files import VARIABLE, folders_of

    patch = runpy.run_path(str(Path(__file__).with_name("patched.py")))["patch"]
    for name in names:
        importlib.import_module(name)
    # A collection in a fork would copy the pages of all objects that it looks at.
    gc.freeze()
    request, descriptors = next_request(listener, starter)
    show_home(request["env"]["UNIRUN_HOME"])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        binary = io.FileIO(number, "w" if number else "r", closefd=False)
        buffered = io.BufferedWriter(binary) if number else io.BufferedReader(binary)
        errors = "backslashreplace" if name == "stderr" else None
        lines = name == "stderr" or os.isatty(number)
        setattr(sys, name, io.TextIOWrapper(buffered, errors=errors, line_buffering=lines))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    folders = folders_of(os.environ.get(VARIABLE), os.getcwd())
    sys.path[:0] = dict.fromkeys([os.path.dirname(sys.argv[0]), *folders])
    set_title("unirun")
    set_command_line(" ".join(sys.argv))
    patch(request["constants"])
    main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # This directory: its modules must not be importable as top-level modules.
        del sys.path[0]
    begun_by = os.pidfd_open(int(sys.argv[3]))
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Before the imports, as another one may have been started at the same moment: it ends here.
    try:
        asked.bind(f"\0{sys.argv[2]}")
    except OSError:
        raise SystemExit from None
    asked.listen(128)
    become = {"warm": be_warm, "command": be_command}[sys.argv[4]]
    become(asked, begun_by, sys.argv[5:])
