"""The connection of a worker to its agent, one per process: the bootstrap opens it, `unirun.init` uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import load_credentials
from unirun.wire.messages import Hello

_HIGHEST = 1024
"""Upper limit of the descriptor numbers used: the kernel's table of descriptors grows with the highest one."""

_ROOM = 64
"""Descriptors reserved below the limit, so that the link survives a script that closes descriptors from 3 on."""

_moved: set[int] = set()
"""Descriptors to close in forks of this process."""

_current: dict[int, BlockingStream] = {}


def open_link(environ: Mapping[str, str]) -> BlockingStream:
    """Return the link of this process; the first call opens it. A fork closes it and opens its own.

    Raises `WireError`, `RendezvousError` or `JobError` when the agent does not answer.
    """
    pid = os.getpid()
    if pid not in _current:
        path = Path(environ["UNIRUN_SOCKET"])
        link = BlockingStream.connect(UnixAddress.here(path), load_credentials(path.parent))
        link.socket = socket.socket(fileno=out_of_the_way(link.socket.detach()))
        link.send(
            Hello(
                WorkerId(
                    environ["UNIRUN_ROLE"], int(environ["UNIRUN_RANK"]), int(environ["UNIRUN_INCARNATION"])
                ),
                pid=pid,
                running=True,
            )
        )
        _current[pid] = link
    return _current[pid]


def out_of_the_way(number: int) -> int:
    """Move a descriptor to a high number, closed on exec and in forks.

    Returns the new number, or `number` when none is free.
    """
    lowest = max(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _HIGHEST) - _ROOM, 3)
    try:
        moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        return number
    os.close(number)
    _moved.add(moved)
    return moved


def _close_in_fork() -> None:
    for link in _current.values():
        _moved.discard(link.socket.fileno())
        link.close()
    for number in _moved:
        with contextlib.suppress(OSError):
            os.close(number)
    _moved.clear()
    _current.clear()


os.register_at_fork(after_in_child=_close_in_fork)
