"""Watch for the end of a process by its pidfd: no polling, and safe against reused pids."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Calls `when_gone` once, in the running loop, when process `pid` has ended or does not exist."""

    def __init__(self, pid: int, when_gone: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._when_gone = when_gone
        self._handle: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
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
