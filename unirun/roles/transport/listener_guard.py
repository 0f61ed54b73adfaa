"""`ListenerGuard`: notices when a library closes the sockets on which it listens.

TensorPipe closes its listener when it gets bytes of another protocol. It writes a warning and goes on with the
connections that it has, but nobody can connect to the process any more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable

from unirun.roles.transport.scheduler import await_end

PERIOD = 1.0
"""Seconds between two checks; a check takes a microsecond."""

Listeners = dict[int, int]
"""Descriptors of listening sockets with their inodes, as the number of a closed one may be used again."""


def listeners() -> Listeners:
    """Every socket on which this process listens."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # A descriptor may be closed meanwhile, like that of this directory.
        with contextlib.suppress(OSError):
            info = os.fstat(int(name))
            if stat.S_ISSOCK(info.st_mode) and _listens(int(name)):
                found[int(name)] = info.st_ino
    return found


def _listens(handle: int) -> bool:
    with socket.socket(fileno=os.dup(handle)) as sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


class ListenerGuard:
    """Calls `lost` once, in a thread of its own, when one of `guarded` is closed before `close` was called."""

    def __init__(self, guarded: Listeners, lost: Callable[[], None]) -> None:
        self._guarded, self._lost = guarded, lost
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unirun-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking."""
        self._closed.set()
        await_end(self._thread)

    def _watch(self) -> None:
        while not self._closed.wait(PERIOD):
            if not all(_is_open(handle, inode) for handle, inode in self._guarded.items()):
                self._lost()
                return


def _is_open(handle: int, inode: int) -> bool:
    try:
        return os.fstat(handle).st_ino == inode
    except OSError:
        return False
