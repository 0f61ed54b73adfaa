"""An event loop in simulated time, with real sockets: when none is ready, its clock goes on to the next timer at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never waits. Both ends of each socket are in this process, so what is sent is there at once."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now; if nothing is, the time-out has passed."""
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen"
            self.now += max(timeout, 0.0)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs coroutines until they are done; `passes` lets time go by. What would run in a thread runs at once."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self.errors: list[dict[str, Any]] = []
        """Errors of tasks and callbacks that no caller has got."""
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self) -> float:
        """The simulated time in seconds."""
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call `func` now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
            future.set_exception(error)
        return future

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it until it is done."""
        return self.run_until_complete(coroutine)

    def passes(self, seconds: float = 0.001) -> None:
        """Let all happen that follows from what was done, and so many seconds go by."""
        self.do(asyncio.sleep(seconds))

    def end(self) -> None:
        """Cancel what still runs, and close. What the loop cannot close is left open."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.passes(100.0)
        self.close()
