"""Threads that run one at a time, in an order that a seed decides, in fake time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from tests.sim.fake_clock import FakeClock
from unirun.roles.transport.protocol import Scheduler


class ThreadKilled(BaseException):
    """The process of a thread was killed; nothing of it runs any more."""


class FakeScheduler(Scheduler):
    """The thread of a caller, as actions of the clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__("simulated")
        self._clock = clock

    def now(self) -> float:
        return self._clock.now

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._clock.after(max(when - self._clock.now, 0.0), action)

    def close(self) -> None:
        """Nothing to end."""


class SimulatedThread:
    """A thread that runs between two waits, when the clock says so. It may be killed while it waits."""

    def __init__(self, clock: FakeClock, rng: random.Random, run: Callable[[], None], name: str) -> None:
        self._clock, self._rng, self._run = clock, rng, run
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._until: Callable[[], Any] = lambda: True
        self._due = False
        self.over = self.killed = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self.wake()

    def _work(self) -> None:
        self._mine.acquire()
        try:
            if not self.killed:
                self._run()
        except ThreadKilled:
            pass
        except BaseException as error:  # noqa: BLE001 - the history fails with it
            self.error = error
        self.over = True
        self._theirs.release()

    def wait(self, until: Callable[[], Any]) -> Any:
        """In the thread: go on when `until()` is true."""
        while not (value := until()):
            self._until = until
            self._theirs.release()
            self._mine.acquire()
            if self.killed:
                raise ThreadKilled
        return value

    def wake(self) -> None:
        """Something that it waits for may have come: it looks, in a moment."""
        if not self._due and not self.over:
            self._due = True
            self._clock.after(self._rng.choice((0.0, 0.0, 0.001, 0.02)), self._go_on)

    def _go_on(self) -> None:
        self._due = False
        if not self.over and (self.killed or self._until()):
            self._mine.release()
            self._theirs.acquire()

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        if not self.over:
            self._mine.release()
            self._theirs.acquire()
        self._thread.join()
