"""`Queue`: from the ranks of one role to those of another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import index
from typing import Any

from unirun.errors import FrameError, PeerLost, QueueEnded, QueueTimeout, UsageError
from unirun.roles.calls.codec import load
from unirun.roles.context import init
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.protocol import Parcel
from unirun.values import Value, WorkerId
from unirun.weights.admitting import Admission, counts_of, settled
from unirun.weights.gate import Bound, Counts
from unirun.weights.hub import MAX_WAIT_SECONDS, hub_of
from unirun.weights.messages import WEIGHTS
from unirun.weights.producing import AwaitItem, Done, Hold, Offered, Take, offered
from unirun.weights.sources import PeerConnection
from unirun.wire.progress import page
from unirun.wire.reports import Metrics

# The consuming end of a queue: takes items from producers in turn, and says when they were used.


class Item(Value, gc=True):
    """An item that was put into a queue as `value`, made with the weights of `version`. An item has the same
    `id` when it is taken again, after the death of the consumer that had it."""

    id: str
    value: Any
    version: int | None


def _name(who: WorkerId, number: int) -> str:
    return f"{who}/{who.incarnation}/{number}"


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
        counted: Callable[[WorkerId, Counts], None] = lambda who, counts: None,
    ) -> None:
        """`held`: the items of this producer that the consumer has, as it has connected before. `here`: the producer is
        on this host. `counted` is called, in some thread, with the counts that it tells."""
        self.line, self._queue, self._me, self._here = line, queue, me, here
        self._changed = changed
        self._asked: list[Future[Parcel]] = []
        self._woken: Future[Parcel] | None = None
        self._counted = counted
        self._tell(Hold(queue, me, tuple(held))).add_done_callback(self._held)

    def _held(self, answer: Future[Parcel]) -> None:
        with suppress(PeerLost):
            self._counted(self.line.who, counts_of(answer.result().head))

    def _tell(self, request: AwaitItem | Take | Hold | Done) -> Future[Parcel]:
        """Send a request. The future raises `PeerLost` when the producer has ended."""
        try:
            return self.line.ask(request)
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
                self._woken = self._tell(AwaitItem(self._queue))
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

    def leave(self) -> None:
        """Say that no item is needed, also none that was asked for and has not come."""
        self._tell(Hold(self._queue, self._me, ()))


class Consumer:
    """The items that one process takes from one queue. Not thread-safe, but for `changed`."""

    def __init__(self, queue: str, bound: Bound | None, now: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._bound, self._now = queue, bound, now
        self._news: Future[None] = Future()
        self._of_news = threading.Lock()
        self._turn = 0
        self._ready: list[tuple[WorkerId, int, Item]] = []
        self._out: dict[WorkerId, list[int]] = {}
        self.dropped = 0
        self.version = 0
        """The version of the weights that are trained; items that are too old for it are dropped."""

    def changed(self) -> None:
        """There may be new items or new producers. Called in any thread."""
        with self._of_news:
            news, self._news = self._news, Future()
        news.set_result(None)

    def held(self, who: WorkerId) -> list[int]:
        """The items of a producer that are here and were not said to be used."""
        return [*self._out.get(who, ()), *(number for each, number, _ in self._ready if each == who)]

    def get(self, count: int, feeds: Callable[[], Sequence[RemoteProducer]], deadline: float) -> list[Item]:
        """Take `count` items. What came before a `QueueTimeout` is given out by the next call.

        `feeds` returns the producers that can be reached now.
        """
        while True:
            news = self._news
            if (found := self._taken(count, feeds)) is not None:
                return found
            left = self._left(count, deadline)
            with suppress(TimeoutError):
                news.result(left)

    def get_some(
        self, most: int, feeds: Callable[[], Sequence[RemoteProducer]], deadline: float
    ) -> list[Item]:
        """Take what has come, at least one item and at most so many."""
        while True:
            news = self._news
            try:
                found = self._taken(most, feeds)
            except QueueEnded:
                if not self._ready:
                    raise
                found = None
            if found is None and self._ready:
                found = self._taken(len(self._ready), feeds)
            if found is not None:
                return found
            left = self._left(1, deadline)
            with suppress(TimeoutError):
                news.result(left)

    async def get_async(
        self,
        count: int,
        feeds: Callable[[], Sequence[RemoteProducer]],
        deadline: float,
        connect: Callable[[], Awaitable[None]],
    ) -> list[Item]:
        """As `get`, in an event loop. It awaits `connect` before it asks for `feeds`."""
        while True:
            news = self._news
            await connect()
            if (found := self._taken(count, feeds)) is not None:
                return found
            await settled(news, self._left(count, deadline))

    def _left(self, count: int, deadline: float) -> float:
        left = deadline - self._now()
        if left <= 0:
            raise QueueTimeout(
                f"queue {self._queue!r} had {len(self._ready)} of {count} items until the deadline",
                "produce faster, or wait longer",
                queue=self._queue,
            )
        return left

    def _taken(self, count: int, feeds: Callable[[], Sequence[RemoteProducer]]) -> list[Item] | None:
        """The items, if there are so many; otherwise ask for the rest."""
        there = feeds() if len(self._ready) < count else ()
        for feed in there:
            self._collect(feed)
        self._drop_old(there)
        if len(self._ready) < count:
            self._ask(count - len(self._ready) - sum(feed.asked for feed in there), there)
            return None
        given, self._ready = self._ready[:count], self._ready[count:]
        for who, number, _ in given:
            self._out.setdefault(who, []).append(number)
        return [item for _, _, item in given]

    def _ask(self, count: int, feeds: Sequence[RemoteProducer]) -> None:
        """Ask for `count` items, in turn those producers that may have some."""
        full = [feed for feed in feeds if not feed.is_empty and not feed.line.lost]
        for _ in range(count if full else 0):
            self._turn += 1
            full[self._turn % len(full)].ask()

    def _collect(self, feed: RemoteProducer) -> None:
        who = feed.line.who
        for said, value in feed.came():
            self._ready.append((who, said.number, Item(_name(who, said.number), value, said.version)))

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

    def drop(self, item: Item, feeds: Sequence[RemoteProducer]) -> None:
        """An item that was given out is not used."""
        for feed in feeds:
            who, numbers = feed.line.who, self._out.get(feed.line.who, [])
            for number in numbers:
                if item.id == _name(who, number):
                    numbers.remove(number)
                    feed.used([number], dropped=True)
                    return

    def done(self, feeds: Sequence[RemoteProducer]) -> None:
        """All items that were given out were used."""
        out, self._out = self._out, {}
        for feed in feeds:
            if numbers := out.get(feed.line.who):
                feed.used(numbers)
        self._drop_old(feeds)

    def close(self, feeds: Sequence[RemoteProducer]) -> None:
        """All items that were given out were used, and others take those that were not."""
        self.done(feeds)
        self._ready.clear()
        for feed in feeds:
            feed.leave()


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
    too old when its turn comes; and ``put(..., version=...)``. Versions count from 0 by one. At most
    `max_concurrent_rollouts` items are made at the same time, by all producers together.

    `admit`, `put`, `get` and `get_batch` block a thread. Those whose names end in ``_async`` are awaited, so that one
    event loop has thousands of items open::

        with await queue.admit_async():
            await queue.put_async(await episode(), version=version)
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
        max_concurrent_rollouts: int | None = None,
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
            self._bound = Bound(batch, max_head_offpolicyness, max_concurrent_rollouts)
            if batch < 1 or max_head_offpolicyness < 0:
                raise UsageError(
                    f"queue {name!r}: batch is {batch}, max_head_offpolicyness {max_head_offpolicyness}",
                    "give at least 1 and 0",
                )
        if max_concurrent_rollouts is not None and (self._bound is None or max_concurrent_rollouts < 1):
            raise UsageError(
                f"queue {name!r}: max_concurrent_rollouts is {max_concurrent_rollouts}",
                "give at least 1, and batch and max_head_offpolicyness",
            )
        self._hub = hub_of(self._context)
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._told = 0.0
        self._feeds: dict[int, RemoteProducer] = {}
        # Connections to producers, by rank. One thread at a time makes them.
        self._lines: dict[int, PeerConnection] = {}
        self._connecting = threading.Lock()
        self._consumer = Consumer(name, self._bound)
        peers = self._context.peers
        if self._context.role == producer:
            self._items = self._hub.producer(name)
            if self._bound is not None:
                self._entrance = self._hub.entrance(name, consumer)
        else:
            peers.when_changed(self._consumer.changed)

    def put(self, value: object, *, version: int | None = None, timeout: float | None = None) -> None:
        """Add an item, as soon as fewer than `maxsize` items of this rank are there. It may be changed afterwards.

        `version` is that of the weights that it was made with. Raises `QueueTimeout` after `timeout` seconds, by
        default those of calls; `EncodingError` for what cannot be pickled.
        """
        version = self._may_put(version)
        with self._waiting("full_s"), page().idle():
            self._items.put(value, version, self.maxsize, self._deadline(timeout))

    async def put_async(
        self, value: object, *, version: int | None = None, timeout: float | None = None
    ) -> None:
        """As `put`, in an event loop."""
        version = self._may_put(version)
        with self._waiting("full_s"), page().awaiting(asyncio.get_running_loop()):
            await self._items.put_async(value, version, self.maxsize, self._deadline(timeout))

    def _may_put(self, version: int | None) -> int | None:
        """The version of an item as it is sent, which may be one of numpy's numbers. Raises `UsageError`."""
        self._must_be(self.producer, "put")
        if self._bound is not None and version is None:
            raise UsageError(
                f"queue {self.name!r} bounds the age of its items, and this one has no version",
                "put(..., version=...)",
            )
        return None if version is None else index(version)

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
        with self._waiting("held_back_s"), page().idle():
            return self._entrance.admit(self._deadline(timeout))

    async def admit_async(self, *, timeout: float | None = None) -> Admission:
        """As `admit`, in an event loop. When the task is cancelled while it waits, nothing is admitted."""
        self._must_be(self.producer, "admit")
        if self._bound is None:
            return Admission()
        with self._waiting("held_back_s"), page().awaiting(asyncio.get_running_loop()):
            return await self._entrance.admit_async(self._deadline(timeout))

    def join(self, *, timeout: float | None = None) -> None:
        """Wait until all items of this rank were used. Raises `QueueTimeout`."""
        self._must_be(self.producer, "join")
        with page().idle():
            self._items.join(self._deadline(timeout))

    def get(self, *, timeout: float | None = None) -> Item:
        """The next item. Raises `QueueTimeout`, and `QueueEnded` when there is none and all producers have ended."""
        return self.get_batch(1, timeout=timeout)[0]

    def get_batch(self, count: int, *, timeout: float | None = None) -> list[Item]:
        """The next `count` items. Raises as `get`; what has come before that is there for the next call. Raises
        `UsageError` for a number below 0."""
        self._may_get(count)
        with self._waiting("empty_s"), page().idle():
            return self._consumer.get(count, self._connected, self._deadline(timeout))

    def get_some(self, most: int, *, timeout: float | None = None) -> list[Item]:
        """The items that have come, at most so many of them; waits for one. Raises as `get`, and `UsageError` for a
        number below 1."""
        self._may_get(most, least=1)
        with self._waiting("empty_s"), page().idle():
            return self._consumer.get_some(most, self._connected, self._deadline(timeout))

    async def get_async(self, *, timeout: float | None = None) -> Item:
        """As `get`, in an event loop."""
        return (await self.get_batch_async(1, timeout=timeout))[0]

    async def get_batch_async(self, count: int, *, timeout: float | None = None) -> list[Item]:
        """As `get_batch`, in an event loop."""
        self._may_get(count)
        with self._waiting("empty_s"), page().awaiting(asyncio.get_running_loop()):
            feeds, deadline = partial(self._connected, connect=False), self._deadline(timeout)
            return await self._consumer.get_async(count, feeds, deadline, self._connect_async)

    def _may_get(self, count: int, least: int = 0) -> None:
        self._must_be(self.consumer, "get")
        if count < least:
            raise UsageError(
                f"{count} items of queue {self.name!r} are asked for", f"ask for {least} or more"
            )
        self.done()
        if self._bound is not None and self._context.rank == 0:
            self._hub.gate(self.name).open(self._bound, self._consumer.version, self._listening)

    def _listening(self) -> frozenset[WorkerId]:
        """The producers that may have made items."""
        view = self._context.peers.view(self.producer)
        return frozenset(
            WorkerId(self.producer, worker.rank, worker.incarnation)
            for worker in (view.workers if view is not None else ())
            if worker.addresses.get(WEIGHTS) and worker.phase not in ("ended", "lost")
        )

    def done(self) -> None:
        """All items that this process has got were used."""
        self._consumer.done(list(self._feeds.values()))

    def drop(self, item: Item) -> None:
        """An item that was got since the last `done` is not used: its admission is given back, and another one may be
        made in its place."""
        self._must_be(self.consumer, "drop")
        self._consumer.drop(item, list(self._feeds.values()))

    def keep(self, count: int) -> None:
        """Rank 0 of the consumer has `count` items, said to be used, that wait for a later batch: of a consumer before,
        which has left them on disk. Below 0: so many of those are dropped, and others take their place."""
        self._must_be(self.consumer, "keep")
        if self._bound is not None and self._context.rank == 0:
            self._hub.gate(self.name).keep(count)

    def advance(self, version: int) -> None:
        """Weights of `version` are trained now. Every rank of the consumer calls it after each batch, and after a
        restart before its first `get`."""
        self._must_be(self.consumer, "advance")
        self._consumer.version = version = index(version)
        if self._bound is not None and self._context.rank == 0:
            self._hub.gate(self.name).advance(version)

    def close(self) -> None:
        """Producer: give the memory back, with all items that no consumer has taken. Consumer: all items that it has
        got were used; others get the rest."""
        if self._context.role == self.producer:
            self._items.close()
            if self._bound is not None:
                self._entrance.close()
        else:
            self._consumer.close(list(self._feeds.values()))
        for line in self._lines.values():
            line.close()
        self._feeds.clear()
        self._lines.clear()

    def _line(self, rank: int, *, connect: bool) -> PeerConnection | None:
        """The connection to a producer, as `Hub.line` has it. Raises `PeerLost`."""
        found = self._hub.line(self.producer, rank, self._lines.get(rank), connect=connect)
        if connect and found is not None:
            self._lines[rank] = found
        return found

    async def _connect_async(self) -> None:
        """Connect to the producers that can be reached, in a thread, as it may take seconds."""
        if self._connect(connect=False):
            await asyncio.to_thread(self._connect, connect=True)

    def _connect(self, *, connect: bool) -> bool:
        """Return True if a producer is not connected that may be."""
        missing = False
        with self._connecting if connect else contextlib.nullcontext():
            for rank in range(self._context.peers.size(self.producer)):
                with suppress(PeerLost):
                    missing |= self._line(rank, connect=connect) is None
        return missing

    def _connected(self, *, connect: bool = True) -> list[RemoteProducer]:
        """The producers that can be reached now. Raises `QueueEnded`."""
        ended, size = 0, self._context.peers.size(self.producer)
        for rank in range(size):
            known = self._feeds.pop(rank, None)
            try:
                line = self._line(rank, connect=connect)
            except PeerLost:
                ended += 1
                continue
            if line is None:
                continue
            if known is None or known.line is not line:
                held, here = self._consumer.held(line.who), self._hub.is_here(line)
                known = RemoteProducer(
                    self.name,
                    self._context.session.me,
                    line,
                    held,
                    self._consumer.changed,
                    here=here,
                    counted=self._counted,
                )
            self._feeds[rank] = known
        if ended == size:
            raise QueueEnded(
                f"all ranks of {self.producer} have ended, and queue {self.name!r} is empty",
                "end here, too",
                queue=self.name,
            )
        return list(self._feeds.values())

    def _counted(self, who: WorkerId, counts: Counts) -> None:
        if self._bound is not None and self._context.rank == 0:
            self._hub.gate(self.name).counted(who, counts)

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
        figures: dict[str, float | None] = {
            f"{self.name}/{what}": sec for what, sec in [*self._waits.items()]
        }
        if self._context.role == self.producer:
            figures[f"{self.name}/items"] = float(len(self._items))
            if self._bound is not None:
                figures[f"{self.name}/admitted"] = float(self._items.counts().open)
        elif self._bound is not None:
            figures[f"{self.name}/too_old"] = float(self._consumer.dropped)
        self._context.peers.tell(Metrics(figures, time.time()))
