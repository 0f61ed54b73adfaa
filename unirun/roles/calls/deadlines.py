"""`Deadlines`: which calls are not answered in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from unirun.roles.transport.scheduler import Scheduler

T = TypeVar("T")


class Deadlines(Generic[T]):
    """A FIFO of items that share one timeout: they expire in the order in which they were added.

    So the scheduler looks at the first item only, and an item that is dropped in time costs it nothing.
    """

    def __init__(self, seconds: float, scheduler: Scheduler, late: Callable[[T], None]) -> None:
        """`late` is called, by `scheduler`, with what was not dropped `seconds` after it was added."""
        self.seconds = seconds
        self._scheduler, self._late = scheduler, late
        self._open: dict[T, float] = {}
        self._lock = threading.Lock()
        self._watched = False

    def add(self, thing: T) -> None:
        """Add `thing`; its timeout begins."""
        self._open[thing] = self._scheduler.now() + self.seconds
        if not self._watched:
            self._watch()

    def drop(self, thing: T) -> None:
        """Forget `thing`, which was in time or has expired already."""
        self._open.pop(thing, None)

    def _watch(self) -> None:
        with self._lock:
            if self._watched:
                return
            self._watched = True
        self._scheduler.at(self._scheduler.now() + self.seconds, self._look)

    def _look(self) -> None:
        for thing in list(self._open):
            when = self._open.get(thing)
            if when is not None and when > self._scheduler.now():
                self._scheduler.at(when, self._look)
                return
            if when is not None:
                self.drop(thing)
                self._scheduler.soon(partial(self._late, thing))
        self._watched = False
        # `add` starts no watch while this function runs, so what was added meanwhile needs one now.
        if self._open:
            self._watch()
