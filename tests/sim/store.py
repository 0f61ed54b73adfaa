"""The model of the way to the store: partitions, time-outs with an unknown outcome, and writes that land late."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Sequence

from tests.sim.fake_clock import FakeClock
from tests.sim.scenario import Scenario
from unirun.errors import OutcomeUnknown, StoreAway, StoreError
from unirun.rendezvous.election import job_prefix
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, KeyValue, Lease, Listing, Outcome, Put, Watch

RUN = "sim"


class ProcessKilled(Exception):
    """The process that has asked the store was killed while it did."""


class FencedStore(MemoryStore):
    """The store, which takes no write of an earlier term."""

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """As in `MemoryStore`; a write to the context that is done must come from the latest term."""
        outcome = super().txn(compares, puts, deletes)
        head = next((put for put in puts if put.key == f"{job_prefix(RUN)}head"), None)
        if outcome.succeeded and head is not None:
            epoch = self.get(f"{job_prefix(RUN)}lead/epoch")
            assert epoch is not None
            assert json.loads(head.value)["epoch"] == int(epoch.value), "a write of an old term was taken"
        return outcome


class StoreClient:
    """One process's way to the store: it may be cut off, answers may get lost, and a write may be done when whoever has
    made it has long stopped waiting. `interrupt` is called before each write and after it."""

    url = "memory:"

    def __init__(self, store: MemoryStore, clock: FakeClock, rng: random.Random, scenario: Scenario) -> None:
        self._store, self._clock, self._rng, self._scenario = store, clock, rng, scenario
        self.away_until = 0.0
        self.host_away: Callable[[], float] = lambda: 0.0
        self.interrupt: Callable[[], None] = lambda: None

    def _here(self) -> None:
        if self._clock.now < max(self.away_until, self.host_away()):
            raise StoreAway("the store cannot be reached")

    def get(self, key: str) -> KeyValue | None:
        self._here()
        return self._store.get(key)

    def get_prefix(self, prefix: str) -> Listing:
        self._here()
        return self._store.get_prefix(prefix)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        self._here()
        self.interrupt()
        if self._rng.random() < self._scenario.unknown:
            match self._rng.choice(("done", "lost", "late") if self._scenario.late else ("done", "lost")):
                case "done":
                    self._store.txn(compares, puts, deletes)
                case "late":
                    delay = self._rng.choice((0.05, 1.0, 20.0))
                    self._clock.after(delay, lambda: self._land(compares, puts, deletes))
            raise OutcomeUnknown("no answer came")
        outcome = self._store.txn(compares, puts, deletes)
        self.interrupt()
        return outcome

    def _land(self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[str]) -> None:
        with contextlib.suppress(StoreError):
            self._store.txn(compares, puts, deletes)

    def grant(self, ttl: float) -> Lease:
        self._here()
        return self._store.grant(ttl)

    def keep_alive(self, lease: Lease) -> None:
        self._here()
        self._store.keep_alive(lease)

    def revoke(self, lease: Lease) -> None:
        self._here()
        self._store.revoke(lease)

    def watch(self, prefix: str, from_revision: int) -> Watch:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
