"""News of a process's end, by its handle: no polling, and a reused pid cannot deceive."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path


def started_at(pid: int) -> int:
    """When a process began, in clock ticks since the machine did: with its pid, which process it is. 0: it is gone."""
    try:
        # The name, in parentheses, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


class ProcessWatch:
    """Calls `when_gone` once, from the running loop, when process `pid` has ended or is not there.

    With `started`, a process that has begun at another time is not the one that is meant.
    """

    def __init__(self, pid: int, when_gone: Callable[[], object], started: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._when_gone = when_gone
        self._handle: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(when_gone)
            return
        if started is not None and started_at(pid) != started:
            self.close()
            self._loop.call_soon(when_gone)
            return
        self._loop.add_reader(self._handle, self._gone)

    def _gone(self) -> None:
        self.close()
        self._when_gone()

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        if self._handle is not None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None
