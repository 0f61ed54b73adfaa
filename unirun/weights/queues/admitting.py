"""Admissions of a producer: permissions to make one item each, used by `put` or given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType

_blocks: ContextVar[tuple[Admission, ...]] = ContextVar("unirun_admissions", default=())
"""The admissions in whose blocks the code of this thread or task is, the innermost last."""


class Admission:
    """Permission to make one item of a queue, which `Queue.admit` returns. The next `put` uses it.

    As a context manager it is used by a `put` in its block. Without a `put` there it is given back at the end of the
    block, also after an exception.
    """

    def __init__(self, end: Callable[[Admission], None] | None = None) -> None:
        """`end` is called with it when it is given back; None for a queue without a bound."""
        self._end = end
        self.in_block = False

    def reject(self) -> None:
        """Give it back, as no item will be put for it. Does nothing when it was used or given back before."""
        if self._end is not None:
            self._end(self)

    def __enter__(self) -> Admission:
        self.in_block = True
        _blocks.set((*_blocks.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _blocks.set(tuple(each for each in _blocks.get() if each is not self))
        self.reject()
        self.in_block = False


class Admissions:
    """The admissions of one producer. Thread-safe."""

    def __init__(self, given_back: Callable[[], None]) -> None:
        """`given_back` is called when an admission was."""
        self._given_back = given_back
        self._lock = threading.Lock()
        self._made = 0
        # Admissions without an item, the oldest first.
        self._open: list[Admission] = []
        # Admissions of open blocks that were used by a put whose block is not known.
        self._taken: list[Admission] = []

    @property
    def begun(self) -> int:
        """Items that were put, and admissions without one."""
        with self._lock:
            return self._made + len(self._open)

    @property
    def open(self) -> int:
        """Admissions without an item."""
        return len(self._open)

    def admit(self) -> Admission:
        """Add an admission."""
        made = Admission(self._reject)
        with self._lock:
            self._open.append(made)
        return made

    def put(self) -> None:
        """Count an item that was put. It uses the admission of the innermost block, else the oldest one, if there is
        any."""
        mine = _blocks.get()
        with self._lock:
            inner = [each for each in mine if each in self._open]
            used = inner[-1] if inner else next(iter(self._open), None)
            if used is not None:
                self._open.remove(used)
                if not inner and used.in_block:
                    self._taken.append(used)
            self._made += 1

    def _reject(self, admission: Admission) -> None:
        with self._lock:
            if admission in self._taken:
                self._taken.remove(admission)
                return
            if admission not in self._open:
                return
            self._open.remove(admission)
            if admission.in_block and self._taken:
                # The item may be that of this block, made in a thread that does not know it. The block of which the
                # admission was taken has it back, and gives it back if it does not need it.
                self._open.insert(0, self._taken.pop(0))
                return
        self._given_back()

    def close(self, kept: int) -> None:
        """Note that the producer puts no more, and that all but `kept` of its items are gone."""
        with self._lock:
            self._made = kept
            self._open.clear()
            self._taken.clear()
