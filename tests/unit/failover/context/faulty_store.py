"""A store in memory that can be made to fail in every way that a store may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from unirun.errors import OutcomeUnknown, StoreAway
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, KeyValue, Listing, Outcome, Put

Fault = Literal["away", "done", "lost", "late"]
"""Of a call: it was not made; it was, and nobody heard so; it was not, and nobody heard so; nobody heard so, and it is
made after two others were."""


class FaultyStore(MemoryStore):
    """`faults` are those of the next transactions and, when `reads` is set, of the next reads; then all is well.

    `transactions` counts those that have changed something. Before each one `interfere` is called.
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(clock)
        self.faults: deque[Fault | None] = deque()
        self.reads: deque[Fault | None] = deque()
        self.asked = 0
        self._late: list[tuple[int, Sequence[Compare], Sequence[Put], Sequence[str]]] = []
        self.written: list[tuple[list[str], list[str]]] = []
        self.interfere: Callable[[], object] = lambda: None

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """As it should be, unless it is the turn of a fault."""
        self.asked += 1
        self.interfere()
        fault = self.faults.popleft() if self.faults else None
        if fault == "away":
            raise StoreAway("it is away")
        if fault == "late":
            self._late.append((len(self.written) + 2, compares, puts, deletes))
        if fault in ("lost", "late"):
            raise OutcomeUnknown("no answer came")
        outcome = super().txn(compares, puts, deletes)
        if outcome.succeeded:
            self.written.append(([put.key for put in puts], list(deletes)))
            for each in [each for each in self._late if each[0] <= len(self.written)]:
                self._late.remove(each)
                super().txn(*each[1:])
        if fault == "done":
            raise OutcomeUnknown("no answer came")
        return outcome

    def get(self, key: str) -> KeyValue | None:
        """As it should be, unless it is the turn of a fault."""
        self._read()
        return super().get(key)

    def get_prefix(self, prefix: str) -> Listing:
        """As it should be, unless it is the turn of a fault."""
        self._read()
        return super().get_prefix(prefix)

    def _read(self) -> None:
        if self.reads and self.reads.popleft() is not None:
            raise StoreAway("it is away")
