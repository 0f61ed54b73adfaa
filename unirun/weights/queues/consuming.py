"""The consuming end of a queue: takes items from producers in turn, and says when they were used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from unirun.errors import FrameError, PeerLost, QueueTimeout
from unirun.roles.calls.codec import load
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.protocol import Parcel
from unirun.values import Value, WorkerId
from unirun.weights.messages import PeerConnection
from unirun.weights.queues.admission import AwaitItem, Bound, Done, Hold, Offered, Take, encode, supply_of

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
        said = supply_of(parcel.head)
        if not isinstance(said, Offered):
            raise FrameError(f"{self.line.who} answered {type(said).__name__} to a consumer")
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
            made_with, bound = said.version, self._bound
            if bound is not None and made_with is not None and bound.is_stale(made_with, self.version):
                self.dropped += 1
                feed.used([said.number], dropped=True)
                continue
            name = f"{who}/{who.incarnation}/{said.number}"
            self._ready.append((who, said.number, Item(name, value, said.version)))

    def done(self, feeds: Sequence[RemoteProducer]) -> None:
        """All items that were given out were used."""
        out, self._out = self._out, {}
        for feed in feeds:
            if numbers := out.get(feed.line.who):
                feed.used(numbers)


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
