"""The spawner of programs and new interpreters, which an agent forks before it does anything else.

Such a spawner imports nothing for its workers, as each of them is executed. So it needs no interpreter of its own: a
fork of the agent has imported all that it runs, and is ready in a hundredth of the time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

from unirun.launcher.preloaded import PreloadedModules
from unirun.launcher.process import die_with_parent, readable, spare_descriptors
from unirun.launcher.spawner import work
from unirun.wire.blocking import BlockingStream
from unirun.wire.reporting import flush, report_error


class ForkedSpawner:
    """A spawner that was forked, with the part of `subprocess.Popen` that an agent uses."""

    def __init__(self, pid: int, stream: socket.socket) -> None:
        self.pid, self.socket = pid, stream
        self._handle = os.pidfd_open(pid)
        self._collecting = threading.Lock()
        self._code: int | None = None

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._collecting, contextlib.suppress(ProcessLookupError):
            if self._code is None:
                signal.pidfd_send_signal(self._handle, signum)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code, negative for a signal. Raises `subprocess.TimeoutExpired`."""
        if self._code is not None:
            return self._code
        if not readable(self._handle, timeout):
            raise subprocess.TimeoutExpired("spawner", timeout or 0.0)
        with self._collecting:
            if self._code is None:
                try:
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:
                    # It was collected with adopted processes.
                    self._code = -signal.SIGKILL
                os.close(self._handle)
        return self._code


def fork_spawner(inherited: Sequence[int]) -> ForkedSpawner | None:
    """Fork a spawner whose workers may have the descriptors `inherited`. Returns None when it cannot be forked safely,
    as this process has threads, or not at all."""
    if len(os.listdir("/proc/self/task")) > 1:
        return None
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    flush()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if pid == 0:
        _serve(theirs, parent, inherited)
    theirs.close()
    return ForkedSpawner(pid, ours)


def _serve(stream: socket.socket, parent: int, inherited: Sequence[int]) -> NoReturn:
    """Be the spawner. Nothing of the agent's is closed or run by its objects, as none of them is deallocated."""
    began = time.monotonic()
    code = 1
    try:
        gc.freeze()
        atexit._clear()
        _close_all_but({0, 1, 2, stream.fileno(), *inherited})
        # Before the first worker there is nothing to clean up, so dying with the agent is enough.
        die_with_parent(parent)
        modules = PreloadedModules()
        descriptors = spare_descriptors()
        work(BlockingStream(stream), descriptors, {each: each for each in inherited}, modules, (), began)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: what is not written here is lost
        report_error(error)
    finally:
        flush()
        os._exit(code)


def _close_all_but(kept: Collection[int]) -> None:
    """Close all descriptors but those that are `kept`."""
    first = 0
    for number in sorted(kept):
        # An empty range from 0 would close all.
        if first < number:
            os.closerange(first, number)
        first = number + 1
    os.closerange(first, 2**31 - 1)
