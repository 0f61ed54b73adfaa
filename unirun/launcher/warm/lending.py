"""A fork of the warm process: sees whether it fits, and becomes a job's spawner and that spawner's guard.

The spawner's parent cannot be the job's agent. So the guard is what the agent is to other spawners: it adopts what a
spawner leaves behind when that is killed, and kills it, and tells the agent how the spawner has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from typing import Any, NoReturn

from unirun.errors import UnirunError
from unirun.launcher.preloaded import PreloadedModules, leave_files
from unirun.launcher.process import adopt_orphans, kill_children, set_title
from unirun.launcher.spawner import work
from unirun.launcher.warm.files import LoadedFiles
from unirun.launcher.warm.likeness import Description, differences, state_of, unlike
from unirun.launcher.warm.searchpath import VARIABLE, folders_of, take_over
from unirun.wire.blocking import BlockingStream
from unirun.wire.spawning import Borrow, Declined

STALE = 3
"""The exit code of a fork that has seen that the files of the warm process were replaced."""

PATIENCE = 5.0
"""Seconds in which the agent that has connected says what it wants."""

MAX_HANDLES = 250
"""Descriptors that one message may carry; the kernel takes 253."""


def lend(
    connection: socket.socket, description: Description, files: LoadedFiles, modules: PreloadedModules
) -> None:
    """In the fork: returns only in a worker, whose end it is."""
    os.setsid()
    adopt_orphans()
    set_title("unirun-guard")
    try:
        connection.settimeout(PATIENCE)
        _, handles, _, _ = socket.recv_fds(connection, 1, MAX_HANDLES)
        connection.settimeout(None)
        stream = BlockingStream(connection)
        wanted = stream.receive(PATIENCE)
        if not isinstance(wanted, Borrow) or len(handles) != 2 + len(wanted.inherited):
            os._exit(1)
        if why := _why_not(description, files, wanted):
            connection.sendall(b"n")
            stream.send(Declined(why))
    except (OSError, UnirunError):
        # The agent has gone, or waits no longer.
        os._exit(1)
    if why:
        os._exit(STALE if files.replaced() else 0)
    output, told, *inherited = handles
    # The fork must not keep the log of the warm process open: that would keep its lock.
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
        # No such directory, or the agent has started another one meanwhile.
        os._exit(1)
    os.close(handle)
    numbers = dict(zip(wanted.inherited, inherited, strict=True))
    work(stream, wanted.descriptors, numbers, modules, wanted.modules, began)


def _why_not(description: Description, files: LoadedFiles, wanted: Borrow) -> str:
    if path := files.replaced():
        return f"{path} was replaced since it was loaded"
    return "; ".join([*unlike(description, wanted), *differences(wanted.state, state_of())])


def _become(wanted: Borrow, description: Description) -> None:
    """Take over what a spawner has from its start. Raises OSError."""
    leave_files()
    os.chdir(wanted.cwd)
    os.umask(wanted.umask)
    os.environ.clear()
    os.environ.update(wanted.env)
    take_over(description.path, folders_of(wanted.env.get(VARIABLE), wanted.cwd))
    # `logging` tells times from its import on.
    now: Any = logging
    now._startTime = time.time_ns() if sys.version_info >= (3, 13) else time.time()


def _guard(spawner: int, told: int) -> NoReturn:
    """Wait for the spawner, kill what it has left, and tell how it has ended."""
    _, status = os.waitpid(spawner, 0)
    kill_children()
    with contextlib.suppress(OSError):
        os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)
