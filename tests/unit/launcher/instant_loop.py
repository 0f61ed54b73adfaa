"""An event loop in simulated time: when nothing is to be done, it is at once as late as the next timer."""

from __future__ import annotations

import asyncio
import selectors


class InstantLoop(asyncio.SelectorEventLoop):
    """It begins at time 1000. Sockets work in it, threads and processes do not."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds

    def wait(self, seconds: float) -> None:
        """Let the tasks go on for so long."""
        self.run_until_complete(asyncio.sleep(seconds))

    def end(self) -> None:
        """Cancel what is not done, and close."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.wait(tasks))
        self.close()


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: InstantLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "all wait for what nobody will do"
            self._loop.skip(timeout)
        return found
