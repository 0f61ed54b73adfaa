"""`Queue`: from the ranks of one role to those of another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from unirun.errors import FrameError, PeerLost, QueueEnded, QueueTimeout, UsageError
from unirun.roles.calls.codec import load
from unirun.roles.context import init
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.protocol import Parcel
from unirun.values import Value, WorkerId
from unirun.weights.hub import MAX_WAIT_SECONDS, hub_of
from unirun.weights.producing import (
    AwaitItem,
    Bound,
    Done,
    Enter,
    Hold,
    Offered,
    Take,
    encode,
    offered,
)
from unirun.weights.sources import PeerConnection
from unirun.wire.progress import page
from unirun.wire.reports import Metrics

# The consuming end of a queue: takes items from producers in turn, and says when they were used.

LONG_POLL_TIMEOUT = 60.0
"""Seconds after which an idle consumer asks a producer again."""


class Item(Value):
    """An item that was put into a queue as `value`, made with the weights of `version`. An item has the same
    `id` when it is taken again, after the death of the consumer that had it."""

    id: str
    value: Any
    version: int | None


class RemoteProducer:
    """A producer as one consumer sees it. `changed` is called, in some thread, when it may have answered."""

    def __init__(
        self,
        queue: str,
        me: WorkerId,
        line: PeerConnection,
        held: Sequence[int],
        changed: Callable[[], None],
        *,
        here: bool,
    ) -> None:
        """`held`: the items of this producer that the consumer has, as it has connected before. `here`: the producer is
        on this host."""
        self.line, self._queue, self._me, self._here = line, queue, me, here
        self._changed = changed
        self._asked: list[Future[Parcel]] = []
        self._woken: Future[Parcel] | None = None
        self._tell(Hold(queue, me, tuple(held)))

    def _tell(self, request: AwaitItem | Take | Hold | Done) -> Future[Parcel]:
        """Send a request. The future raises `PeerLost` when the producer has ended."""
        try:
            return self.line.ask(encode(request))
        except PeerLost as error:
            future: Future[Parcel] = Future()
            future.set_exception(error)
            return future

    @property
    def asked(self) -> int:
        """The number of items that were asked for and have not come."""
        return len(self._asked)

    @property
    def is_empty(self) -> bool:
        """True if the producer has said that it has no item, and not yet that it has one again."""
        return self._woken is not None and not self._woken.done()

    def ask(self) -> None:
        """Ask for one item."""
        future = self._tell(Take(self._queue, self._me, self._here))
        self._asked.append(future)
        future.add_done_callback(lambda _: self._changed())

    def came(self) -> Iterator[tuple[Offered, Any]]:
        """The items that have come. Raises `FrameError`, and what unpickling raises."""
        while self._asked and self._asked[0].done():
            future = self._asked.pop(0)
            if isinstance(future.exception(), PeerLost):
                continue
            found = self._item(future.result())
            if found is not None:
                yield found
            elif not self.is_empty:
                self._woken = self._tell(AwaitItem(self._queue, LONG_POLL_TIMEOUT))
                self._woken.add_done_callback(lambda _: self._changed())

    def _item(self, parcel: Parcel) -> tuple[Offered, Any] | None:
        said = offered(parcel.head)
        if not said.number:
            return None
        places, total = offsets(said.sizes)
        if len(parcel.buffers) != 1 or parcel.buffers[0].nbytes < total or not places:
            raise FrameError(f"{self.line.who} sent an item that is not whole")
        parts = [parcel.buffers[0][at : at + size] for at, size in zip(places, said.sizes, strict=True)]
        try:
            return said, load(parts[0], tuple(parts[1:]))
        except BaseException:
            # Others could not use it either.
            self.used([said.number], dropped=True)
            raise

    def used(self, numbers: Sequence[int], *, dropped: bool = False) -> None:
        """Say that these items are not needed any more. If that does not arrive, another consumer takes them."""
        self._tell(Done(self._queue, self._me, tuple(numbers), dropped))


class Consumer:
    """The items that one process takes from one queue. Not thread-safe, but for `changed`."""

    def __init__(self, queue: str, bound: Bound | None, now: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._bound, self._now = queue, bound, now
        self._news = threading.Event()
        self._turn = 0
        self._ready: list[tuple[WorkerId, int, Item]] = []
        self._out: dict[WorkerId, list[int]] = {}
        self.dropped = 0
        self.version = 0
        """The version of the weights that are trained; items that are too old for it are dropped."""

    def changed(self) -> None:
        """There may be new items or new producers. Called in any thread."""
        self._news.set()

    def held(self, who: WorkerId) -> list[int]:
        """The items of a producer that are here and were not said to be used."""
        return [*self._out.get(who, ()), *(number for each, number, _ in self._ready if each == who)]

    def get(self, count: int, feeds: Callable[[], Sequence[RemoteProducer]], deadline: float) -> list[Item]:
        """Take `count` items. What came before a `QueueTimeout` is given out by the next call.

        `feeds` returns the producers that can be reached now.
        """
        while True:
            self._news.clear()
            there = feeds() if len(self._ready) < count else ()
            for feed in there:
                self._collect(feed)
            self._drop_old(there)
            if len(self._ready) >= count:
                given, self._ready = self._ready[:count], self._ready[count:]
                for who, number, _ in given:
                    self._out.setdefault(who, []).append(number)
                return [item for _, _, item in given]
            self._ask(count - len(self._ready) - sum(feed.asked for feed in there), there)
            left = deadline - self._now()
            if left <= 0 or not self._news.wait(left):
                raise QueueTimeout(
                    f"queue {self._queue!r} had {len(self._ready)} of {count} items until the deadline",
                    "produce faster, or wait longer",
                    queue=self._queue,
                )

    def _ask(self, count: int, feeds: Sequence[RemoteProducer]) -> None:
        """Ask for `count` items, in turn those producers that may have some."""
        full = [feed for feed in feeds if not feed.is_empty and not feed.line.lost]
        for _ in range(count if full else 0):
            self._turn += 1
            full[self._turn % len(full)].ask()

    def _collect(self, feed: RemoteProducer) -> None:
        who = feed.line.who
        for said, value in feed.came():
            name = f"{who}/{who.incarnation}/{said.number}"
            self._ready.append((who, said.number, Item(name, value, said.version)))

    def _is_old(self, item: Item) -> bool:
        bound = self._bound
        return bound is not None and item.version is not None and bound.is_stale(item.version, self.version)

    def _drop_old(self, feeds: Sequence[RemoteProducer]) -> None:
        """Drop the items that are too old by now. A producer that cannot be told gives them out again."""
        old = [(who, number) for who, number, item in self._ready if self._is_old(item)]
        if not old:
            return
        self._ready = [each for each in self._ready if not self._is_old(each[2])]
        self.dropped += len(old)
        for feed in feeds:
            if numbers := [number for who, number in old if who == feed.line.who]:
                feed.used(numbers, dropped=True)

    def done(self, feeds: Sequence[RemoteProducer]) -> None:
        """All items that were given out were used."""
        out, self._out = self._out, {}
        for feed in feeds:
            if numbers := out.get(feed.line.who):
                feed.used(numbers)
        self._drop_old(feeds)


# Admissions of a producer: permissions to make one item each, used by `put` or given back.

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
        """`maxsize`: items of each rank of `producer` that no consumer has taken. Raises `UsageError` for
        values that do not fit, and in a process that is in neither role."""
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
                        self._gate.ask(encode(Enter(self.name, self._context.session.me, *self._counts())))
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
        """Producer: give the memory back, with all items that no consumer has taken. Consumer: all items were used."""
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
            with page().idle():
                yield
        finally:
            now = time.monotonic()
            self._waits[what] += now - began
            self._report(now)

    def _report(self, now: float) -> None:
        if now < self._told + QUEUE_REPORT_INTERVAL:
            return
        self._told = now
        figures: dict[str, float | None] = {f"{self.name}/{what}": sec for what, sec in self._waits.items()}
        if self._context.role == self.producer:
            figures[f"{self.name}/items"] = float(len(self._items))
            if self._bound is not None:
                figures[f"{self.name}/admitted"] = float(self._admissions.open)
        elif self._bound is not None:
            figures[f"{self.name}/too_old"] = float(self._consumer.dropped)
        self._context.peers.tell(Metrics(figures, time.time()))
