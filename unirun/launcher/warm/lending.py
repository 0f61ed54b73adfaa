"""A fork of the warm process: checks whether it fits, then becomes a job's spawner and its guard.

The job's agent cannot be the spawner's parent. So the guard does what an agent does for other spawners: it adopts and
kills the descendants of a killed spawner, and reports its exit code to the agent.
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
from unirun.launcher.warm.files import VARIABLE, LoadedFiles, folders_of, take_over
from unirun.launcher.warm.likeness import Description, differences, state_of, unlike
from unirun.wire.blocking import BlockingStream
from unirun.wire.spawning import Borrow, Declined

STALE = 3
"""Exit code of a fork that found loaded files replaced."""

PATIENCE = 5.0
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
        # The agent is gone or has stopped waiting.
        os._exit(1)
    if why:
        os._exit(STALE if files.replaced() else 0)
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


def _why_not(description: Description, files: LoadedFiles, wanted: Borrow) -> str:
    if path := files.replaced():
        return f"{path} was replaced since it was loaded"
    return "; ".join([*unlike(description, wanted), *differences(wanted.state, state_of())])


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
