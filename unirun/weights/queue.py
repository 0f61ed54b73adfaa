"""`Queue`: from the ranks of one role to those of another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

from unirun.errors import PeerLost, QueueEnded, QueueTimeout, UsageError
from unirun.roles.context import init
from unirun.values import WorkerId
from unirun.weights.hub import MAX_WAIT_SECONDS, hub_of
from unirun.weights.messages import PeerConnection
from unirun.weights.queues.admission import Begun, Bound, Enter, encode
from unirun.weights.queues.consuming import Admission, Admissions, Consumer, Item, RemoteProducer
from unirun.wire.reports import Metrics

QUEUE_REPORT_INTERVAL = 1.0
"""Seconds between two reports of a queue's figures."""


class Queue:
    """Moves items from the ranks of one role to those of another, each item to one consumer, at least once.

    ::

        queue = Queue("experience", producer="rollout", consumer="actor", maxsize=64)
        queue.put(sample)  # in each rollout; waits while its 64 items are not taken
        samples = queue.get_batch(32)  # in each actor; sample.value, sample.id

    Items are what can be pickled. Tensors are copied into shared memory once, and consumers on the same host use them
    there; others get them over sockets, with TLS. Items of one producer come in their order.

    What a consumer got counts as used with its next `get`, `done` or `close`. If it dies before, another consumer gets
    it, or its successor, with the same `Item.id`. Items of a producer that dies are lost; `join` waits until all are
    used.

    With ``batch=512, max_head_offpolicyness=4``, no item is trained on more than four versions after the weights that
    it was made with: consumers say ``advance(version)`` after each batch of 512 items, all of them together, and an
    older item is not given out. Producers make an item ``with queue.admit():``, which waits as long as that would be
    too old when its turn comes; and ``put(..., version=...)``. Versions count from 0 by one.
    """

    def __init__(
        self,
        name: str,
        *,
        producer: str,
        consumer: str,
        maxsize: int = 64,
        batch: int | None = None,
        max_head_offpolicyness: int | None = None,
    ) -> None:
        """`maxsize`: items of each rank of `producer` that nobody has taken. Raises `UsageError` for what does not fit,
        and in a process that is in neither role."""
        self.name, self.producer, self.consumer, self.maxsize = name, producer, consumer, maxsize
        self._context = init()
        for role in (producer, consumer):
            self._context.peers.known(role)
        if producer == consumer or self._context.role not in (producer, consumer):
            raise UsageError(
                f"{self._context.role} has no part in queue {name!r}",
                f"it goes from {producer} to {consumer}, which are two roles",
            )
        if maxsize < 1:
            raise UsageError(f"queue {name!r}: maxsize is {maxsize}", "give at least 1")
        if (batch is None) != (max_head_offpolicyness is None):
            raise UsageError(
                f"queue {name!r}: batch and max_head_offpolicyness belong together", "give both or none"
            )
        self._bound: Bound | None = None
        if batch is not None and max_head_offpolicyness is not None:
            if batch < 1 or max_head_offpolicyness < 0:
                raise UsageError(
                    f"queue {name!r}: batch is {batch}, max_head_offpolicyness {max_head_offpolicyness}",
                    "give at least 1 and 0",
                )
            self._bound = Bound(batch, max_head_offpolicyness)
        self._hub = hub_of(self._context)
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._told = 0.0
        self._feeds: dict[int, RemoteProducer] = {}
        self._gate: PeerConnection | None = None
        self._admissions = Admissions(self._given_back)
        # A request to the gate has the count of all threads, so there is one at a time.
        self._asking = threading.Lock()
        self._untold = False
        self._consumer = Consumer(name, self._bound)
        if self._context.role == producer:
            self._items = self._hub.producer(name)
            self._context.peers.when_changed(lambda: self._items.lost(self._alive(consumer)))
        else:
            self._context.peers.when_changed(self._consumer.changed)
            if self._bound is not None and self._context.rank == 0:
                gate = self._hub.gate(name)
                self._context.peers.when_changed(lambda: gate.lost(self._alive(producer)))

    def put(self, value: object, *, version: int | None = None, timeout: float | None = None) -> None:
        """Add an item, as soon as fewer than `maxsize` items of this rank are there. It may be changed afterwards.

        `version` is that of the weights that it was made with. Raises `QueueTimeout` after `timeout` seconds, by
        default those of calls; `EncodingError` for what cannot be pickled.
        """
        self._must_be(self.producer, "put")
        if self._bound is not None and version is None:
            raise UsageError(
                f"queue {self.name!r} bounds the age of its items, and this one has no version",
                "put(..., version=...)",
            )
        with self._waiting("full_s"):
            self._items.put(value, version, self.maxsize, self._deadline(timeout))
        self._admissions.put()

    def admit(self, *, timeout: float | None = None) -> Admission:
        """Wait until the next item may be made, so that it will not be too old when it is trained on. Call it once for
        each item, before it is made::

            with queue.admit():
                queue.put(generate(), version=version)

        The admission is given back when the block ends without a `put`, by an exception or otherwise, and when this
        process ends; without a block, by `Admission.reject`. As long as it is neither used nor given back, it counts as
        an item, and may hold all producers back.

        Returns at once without `max_head_offpolicyness`. Raises `QueueTimeout` after `timeout` seconds, by default
        those of calls; `PeerLost` when the consumer's rank 0 has ended for good.
        """
        self._must_be(self.producer, "admit")
        if self._bound is None:
            return Admission()
        deadline = self._deadline(timeout)
        with self._waiting("held_back_s"):
            if not self._asking.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                raise self._held_back()
            try:
                while not self._admitted(deadline):
                    if time.monotonic() >= deadline:
                        raise self._held_back()
                return self._admissions.admit()
            except BaseException:
                # The gate may have admitted an item after this wait was over.
                self._untold = True
                raise
            finally:
                self._asking.release()
                self._tell_gate()

    def _held_back(self) -> QueueTimeout:
        problem = f"no item of queue {self.name!r} may be made until {self.consumer} has trained on more"
        remedy = "does it call advance(version) after each batch? else wait longer"
        if self._admissions.open:
            problem += f"; this process has {self._admissions.open} admissions for which it has put nothing"
            remedy = "put an item for each, or give them back: with queue.admit(): …"
        return QueueTimeout(problem, remedy, queue=self.name)

    def _given_back(self) -> None:
        """Tell the gate, which may admit others. A request that waits now is repeated soon, and has the new count
        then."""
        self._untold = True
        self._tell_gate()

    def _tell_gate(self) -> None:
        """Tell the gate how many items were begun, if it may think otherwise."""
        while self._untold and self._asking.acquire(blocking=False):
            try:
                self._untold = False
                with contextlib.suppress(PeerLost):
                    # The successor of a gate that is gone learns the counts from the next request.
                    self._gate = self._hub.line(self.consumer, 0, self._gate)
                    if self._gate is not None:
                        self._gate.ask(encode(Begun(self.name, self._context.session.me, *self._counts())))
            finally:
                self._asking.release()

    def _counts(self) -> tuple[int, int]:
        """Items that this process has begun, without those that were dropped; and those that were used."""
        return self._admissions.begun - self._items.dropped, self._items.delivered

    def _admitted(self, deadline: float) -> bool:
        """Return True if the gate has let this process in. It may be another one the next time."""
        # Consumers drop items meanwhile, which the gate learns from the next question.
        left = min(max(deadline - time.monotonic(), 0.0), QUEUE_REPORT_INTERVAL)
        updates = self._context.peers.updates
        self._gate = self._hub.line(self.consumer, 0, self._gate)
        if self._gate is None:
            self._context.peers.wait(updates, left)
            return False
        request = Enter(self.name, self._context.session.me, *self._counts(), left)
        try:
            self._gate.ask(encode(request)).result(left)
        except TimeoutError:
            return False
        except PeerLost:
            self._context.peers.wait(updates, left)
            return False
        return True

    def join(self, *, timeout: float | None = None) -> None:
        """Wait until all items of this rank were used. Raises `QueueTimeout`."""
        self._must_be(self.producer, "join")
        self._items.join(self._deadline(timeout))

    def get(self, *, timeout: float | None = None) -> Item:
        """The next item. Raises `QueueTimeout`, and `QueueEnded` when there is none and all producers have ended."""
        return self.get_batch(1, timeout=timeout)[0]

    def get_batch(self, count: int, *, timeout: float | None = None) -> list[Item]:
        """The next `count` items. Raises as `get`; what has come before that is there for the next call."""
        self._must_be(self.consumer, "get")
        self.done()
        if self._bound is not None and self._context.rank == 0:
            self._hub.gate(self.name).open(self._bound, self._consumer.version)
        with self._waiting("empty_s"):
            return self._consumer.get(count, self._connected, self._deadline(timeout))

    def done(self) -> None:
        """All items that this process has got were used."""
        self._consumer.done(list(self._feeds.values()))

    def advance(self, version: int) -> None:
        """Weights of `version` are trained now. Every rank of the consumer calls it after each batch, and after a
        restart before its first `get`."""
        self._must_be(self.consumer, "advance")
        self._consumer.version = version
        if self._bound is not None and self._context.rank == 0:
            self._hub.gate(self.name).advance(version)

    def close(self) -> None:
        """Producer: give the memory back, with all items that nobody has taken. Consumer: all items were used."""
        if self._context.role == self.producer:
            self._items.close()
            self._admissions.close(self._items.delivered + self._items.dropped)
            if self._bound is not None:
                self._given_back()
        else:
            self.done()
        for line in (self._gate, *(feed.line for feed in self._feeds.values())):
            if line is not None:
                line.close()
        self._feeds.clear()

    def _connected(self) -> list[RemoteProducer]:
        """The producers that can be reached now. Raises `QueueEnded`."""
        ended, size = 0, self._context.peers.size(self.producer)
        for rank in range(size):
            known = self._feeds.pop(rank, None)
            try:
                line = self._hub.line(self.producer, rank, known.line if known is not None else None)
            except PeerLost:
                ended += 1
                continue
            if line is None:
                continue
            if known is None or known.line is not line:
                held, here = self._consumer.held(line.who), self._hub.is_here(line)
                me, changed = self._context.session.me, self._consumer.changed
                known = RemoteProducer(self.name, me, line, held, changed, here=here)
            self._feeds[rank] = known
        if ended == size:
            raise QueueEnded(
                f"all ranks of {self.producer} have ended, and queue {self.name!r} is empty",
                "end here, too",
                queue=self.name,
            )
        return list(self._feeds.values())

    def _alive(self, role: str) -> set[WorkerId]:
        """The workers of a role that live."""
        view = self._context.peers.view(role)
        workers = view.workers if view is not None else ()
        return {WorkerId(role, w.rank, w.incarnation) for w in workers if w.phase not in ("ended", "lost")}

    def _must_be(self, role: str, what: str) -> None:
        if self._context.role != role:
            raise UsageError(f"{self._context.role} cannot {what} in queue {self.name!r}", f"{role} can")

    def _deadline(self, timeout: float | None) -> float:
        welcome = self._context.peers.welcome
        default = welcome.call_timeout if welcome is not None else 0.0
        return time.monotonic() + min(timeout if timeout is not None else default, MAX_WAIT_SECONDS)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Count what this takes, in seconds, and report the figures of the queue before it and after it, but not
        often: ``unirun status`` shows them."""
        began = time.monotonic()
        self._report(began)
        try:
            yield
        finally:
            now = time.monotonic()
            self._waits[what] += now - began
            self._report(now)

    def _report(self, now: float) -> None:
        if now < self._told + QUEUE_REPORT_INTERVAL:
            return
        self._told = now
        figures = {f"{self.name}/{what}": seconds for what, seconds in self._waits.items()}
        if self._context.role == self.producer:
            figures[f"{self.name}/items"] = float(len(self._items))
            if self._bound is not None:
                figures[f"{self.name}/admitted"] = float(self._admissions.open)
        elif self._bound is not None:
            figures[f"{self.name}/too_old"] = float(self._consumer.dropped)
        self._context.peers.tell(Metrics(figures, time.time()))
