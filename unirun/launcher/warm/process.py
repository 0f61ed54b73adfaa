"""The warm process: imports modules, computes nothing, and forks for each job that connects.

Run by `boot` with ``FOLDER IDLE UNTIL PADDING [MODULE…]``: FOLDER is its own. It ends after IDLE seconds without a
connection or a job, and when the process UNTIL ends (0: none). It reads nothing from a connection: its fork does
(`lending`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import ItemsView, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

from msgspec import to_builtins

from unirun import atomic
from unirun.errors import UnirunError
from unirun.launcher.environment import for_workers
from unirun.launcher.preloaded import PreloadedModules, leave_files
from unirun.launcher.process import adopt_orphans, ignore_signals, kill_children, set_title, spare_descriptors
from unirun.launcher.spawner import work
from unirun.launcher.warm import files as searchpath
from unirun.launcher.warm.files import VARIABLE, LoadedFiles, folders_of, imported, take_over
from unirun.launcher.warm.key import (
    DESCRIPTION,
    SOCKET,
    Description,
    differences,
    peer_of,
    state_of,
    variables_that_count,
)
from unirun.wire.address import unix_address
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Dismissed
from unirun.wire.reports import Borrow

# A fork of the warm process: checks that it is as described, then becomes a job's spawner and its guard.
#
# The job's agent cannot be the spawner's parent. So the guard does what an agent does for other spawners: it adopts and
# kills the descendants of a killed spawner, and reports its exit code to the agent.

STALE = 3
"""Exit code of a fork that found loaded files replaced, or itself changed."""

BORROW_REQUEST_TIMEOUT = 5.0
"""Seconds to wait for the request of an agent that has connected."""

MAX_HANDLES = 250
"""Maximum number of descriptors in one message; the kernel's limit is 253."""


def lend(
    connection: socket.socket, description: Description, files: LoadedFiles, modules: PreloadedModules
) -> None:
    """Run the fork. Returns only in a worker, at its end."""
    os.setsid()
    adopt_orphans()
    set_title("unirun-guard")
    try:
        connection.settimeout(BORROW_REQUEST_TIMEOUT)
        _, handles, _, _ = socket.recv_fds(connection, 1, MAX_HANDLES)
        connection.settimeout(None)
        stream = BlockingStream(connection)
        wanted = stream.receive(BORROW_REQUEST_TIMEOUT)
        if not isinstance(wanted, Borrow) or len(handles) != 2 + len(wanted.inherited):
            os._exit(1)
        if why := _changes(description, files):
            connection.sendall(b"n")
            stream.send(Dismissed(why))
            os._exit(STALE)
    except (OSError, UnirunError):
        # The agent is gone or has stopped waiting.
        os._exit(1)
    output, told, *inherited = handles
    # Close the log of the warm process, as it carries the lock.
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    spawner = os.fork()
    if spawner:
        connection.close()
        for handle in inherited:
            os.close(handle)
        _guard(spawner, told)
    began = time.monotonic()
    os.close(told)
    try:
        _become(wanted, description)
        socket.send_fds(connection, [b"y"], [handle := os.pidfd_open(os.getpid())])
    except OSError:
        # No such directory, or the agent has started another spawner meanwhile.
        os._exit(1)
    os.close(handle)
    numbers = dict(zip(wanted.inherited, inherited, strict=True))
    work(stream, wanted.descriptors, numbers, modules, wanted.modules, began)


def _changes(description: Description, files: LoadedFiles) -> str:
    """The changes since the process was described, by which jobs have chosen it; empty: none."""
    if path := files.replaced():
        return f"{path} was replaced since it was loaded"
    return "; ".join(differences(state_of(), description.state))


def _become(wanted: Borrow, description: Description) -> None:
    """Set what a new spawner would have from its start: directory, umask, environment. Raises OSError."""
    leave_files()
    os.chdir(wanted.cwd)
    os.umask(wanted.umask)
    os.environ.clear()
    os.environ.update(wanted.env)
    take_over(description.path, folders_of(wanted.env.get(VARIABLE), wanted.cwd))
    # `logging` measures relative times from its import.
    now: Any = logging
    now._startTime = time.time_ns() if sys.version_info >= (3, 13) else time.time()


def _guard(spawner: int, told: int) -> NoReturn:
    """Wait for the spawner, kill its remaining descendants, and report its exit code."""
    _, status = os.waitpid(spawner, 0)
    kill_children()
    with contextlib.suppress(OSError):
        os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


LOADED_FILES_POLL_INTERVAL = 60.0
"""Seconds between two checks of the loaded files."""

_DONTNEED = 4
"""``MADV_DONTNEED`` of ``madvise``."""

_libc = ctypes.CDLL(None)


_OF_A_PREFIX = frozenset(("fsspec.config", "tqdm.utils"))
"""Modules that copy all variables for those with their prefix, which are compared in any case (`counts_in_warm`)."""


class _Noting(os._Environ):  # type: ignore[type-arg]
    """Records which variables are read, and whether all of them are (`every`)."""

    names: ClassVar[set[str]] = set()
    every: ClassVar[bool] = False

    def __getitem__(self, name: str) -> str:
        if not _for_a_prefix():
            self.names.add(name)
        value: str = super().__getitem__(name)
        return value

    def __iter__(self) -> Iterator[str]:
        # Also called by keys(), values() and copies.
        type(self).every |= not _for_a_prefix()
        return super().__iter__()

    def items(self) -> ItemsView[str, str]:
        return {name: super(_Noting, self).__getitem__(name) for name in self}.items()


def _for_a_prefix() -> bool:
    """Return True if a module of `_OF_A_PREFIX` reads the environment, by itself or through an iterator of ``os``
    or ``collections.abc``, which are frames in between."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is None or frame.f_globals.get("__name__") in _OF_A_PREFIX:
            return frame is not None
        frame = frame.f_back
    return False


class WarmProcess:
    """Listens for jobs. `serve` returns in each fork, with the connection of its job, and never in this process."""

    def __init__(self, folder: Path, idle: float, until: int, files: LoadedFiles) -> None:
        self._folder, self._idle, self._files = folder, idle, files
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        with unix_address(folder / SOCKET) as address:
            self._listener.bind(address)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guards: set[int] = set()
        self._until = os.pidfd_open(until) if until else None
        if self._until is not None:
            self._selector.register(self._until, selectors.EVENT_READ, self._until)
        signal.signal(signal.SIGTERM, lambda *_: self._end())

    def serve(self) -> socket.socket:
        """Fork for each connection of this user. Returns the connection, in the fork."""
        asked = time.monotonic()
        while True:
            left = LOADED_FILES_POLL_INTERVAL if self._guards else asked + self._idle - time.monotonic()
            ready = self._selector.select(max(min(left, LOADED_FILES_POLL_INTERVAL), 0.0))
            over = left <= 0 and not self._guards
            if not ready and (over or not self._folder.exists() or self._files.replaced()):
                self._end()
            for key, _ in ready:
                asked = time.monotonic()
                if key.data is None:
                    if (connection := self._accept()) is not None:
                        return connection
                elif key.data == self._until:
                    self._end()
                else:
                    self._reap(key.data)

    def _accept(self) -> socket.socket | None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        connection.setblocking(True)
        with connection:
            if peer_of(connection)[1] != os.getuid():
                return None
            try:
                pid = os.fork()
            except OSError:
                # The job then starts cold.
                return None
            if pid == 0:
                self._forget()
                return connection.dup()
        handle = os.pidfd_open(pid)
        self._guards.add(handle)
        self._selector.register(handle, selectors.EVENT_READ, handle)
        return None

    def _forget(self) -> None:
        """In a fork: close all descriptors of the warm process."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._selector.close()
        self._listener.close()
        for handle in (*self._guards, *([] if self._until is None else [self._until])):
            os.close(handle)

    def _reap(self, handle: int) -> None:
        end = os.waitid(os.P_PIDFD, handle, os.WEXITED)
        self._selector.unregister(handle)
        os.close(handle)
        self._guards.remove(handle)
        if end is not None and end.si_code == os.CLD_EXITED and end.si_status == STALE:
            self._end()

    def _end(self) -> NoReturn:
        """Remove the folder and exit. Jobs that have a fork are not affected."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def leave_code() -> None:
    """Unmap the pages of executable code, a third of this process's memory. They stay in the page cache, and are mapped
    again when they run. Code with text relocations has anonymous pages and is left mapped."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            is_code = rest[0] == "r-xp" and rest[-1].startswith("/")
            begin, end = (int(each, 16) for each in name.split("-")) if is_code else (0, 0)
        elif name == "Anonymous:" and rest[0] == "0" and end:
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)


def prepare(names: list[str], idle: float) -> tuple[Description, LoadedFiles, PreloadedModules]:
    """Import the modules `names`, and describe this process."""
    began = time.time()
    modules = PreloadedModules()
    set_title("unirun-warm")
    ignore_signals(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    spare_descriptors()
    env: Any = os.environ
    before = for_workers(env)
    env.__class__ = _Noting
    # These have run before their reads of variables could be recorded.
    every = "sitecustomize" in sys.modules or "usercustomize" in sys.modules
    for name in names:
        try:
            modules.load(name)
        except ModuleNotFoundError as error:
            raise SystemExit(f"{name} cannot be imported: {error}") from None
    every |= _Noting.every
    env.__class__ = os._Environ
    if modules.threads:
        raise SystemExit(f"unirun: {', '.join(modules.threads)} starts threads, which a fork would lack")
    read = None if every else tuple(sorted(_Noting.names))
    description = Description(
        pid=os.getpid(),
        began=began,
        idle=idle,
        modules=tuple(names),
        path=folders_of(before.get(searchpath.VARIABLE), os.getcwd()),
        imported=imported(),
        names=read,
        variables=variables_that_count(before, read),
        state=state_of(),
    )
    os.chdir("/")
    files = LoadedFiles()
    if path := files.changed_since(began):
        raise SystemExit(f"unirun: {path} has changed while it was loaded")
    # Workers must not have modules that only this process uses.
    for name in [name for name in sys.modules if name.startswith("unirun.launcher.warm")]:
        del sys.modules[name]
    modules.freeze()
    leave_code()
    return description, files, modules


def serve(
    folder: Path, until: int, description: Description, files: LoadedFiles, modules: PreloadedModules
) -> None:
    """Write the description into `folder`, and lend forks to jobs. Returns only in a worker, at its end."""
    warm = WarmProcess(folder, description.idle, until, files)
    atomic.replace(folder / DESCRIPTION, json.dumps(to_builtins(description)))
    connection = warm.serve()
    del warm
    lend(connection, description, files, modules)


def main(argv: list[str]) -> None:
    """Import, write the description, serve; in a fork, lend it to a job."""
    serve(Path(argv[0]), int(argv[2]), *prepare(argv[4:], float(argv[1])))
