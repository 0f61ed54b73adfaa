"""The producing end of a queue: items in shared memory until they are used."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
from msgspec.json import encode

from unirun.errors import FrameError, QueueTimeout
from unirun.roles.calls.codec import dump
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.protocol import Lent, Parcel, Reply, writable
from unirun.values import Value, WorkerId
from unirun.weights.admitting import Admissions, settled
from unirun.weights.gate import Counts
from unirun.weights.publishing import Block, Blocks

# The requests of consumers to producers, and the answers: JSON in the head of a parcel.
#
# The item itself is the only buffer of the parcel: its pickle, then the memory of its tensors.


class AwaitItem(Value, tag=True):
    """Asks whether there is an item. Answered when there is."""

    queue: str


class Take(Value, tag=True):
    """Asks for the first item. Answered at once. `here`: it is to be in shared memory, as the taker is on the same
    host."""

    queue: str
    taker: WorkerId
    here: bool


class Hold(Value, tag=True):
    """The taker has these items and no others: it has connected anew, and answers may have been lost. Answered with the
    `Counts` of the producer."""

    queue: str
    taker: WorkerId
    numbers: tuple[int, ...]


class Done(Value, tag=True):
    """The taker has used these items, or has `dropped` them as they were too old."""

    queue: str
    taker: WorkerId
    numbers: tuple[int, ...]
    dropped: bool


class Offered(Value, tag=True):
    """The answer to all requests but `Hold`: an item of `version`. `sizes` are those of its pickle and of each buffer,
    in bytes. Number 0: there is no item with it."""

    number: int = 0
    version: int | None = None
    sizes: tuple[int, ...] = ()


Demand = AwaitItem | Take | Hold | Done

_offers = msgspec.json.Decoder(Offered)


def offered(head: bytes) -> Offered:
    """The answer of a producer in a parcel. Raises `FrameError` for anything else."""
    try:
        return _offers.decode(head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"this is no answer of a queue: {error}") from error


ACK = Parcel(encode(Offered()))
"""The answer to what needs no other."""


KEPT = "queue"
"""The reader of a block whose item nobody has used yet."""

SPARE = 16
"""Blocks that are kept for the next items."""


_Item = tuple[Offered, Block]
"""An item, and the block in which its pickle and its buffers are."""

_Parts = tuple[memoryview, ...]
"""The pickle of an item, and its buffers."""


class Producer:
    """The items that one process has put into one queue, first in, first out. Thread-safe; `handle` is called
    in a thread of the transport."""

    def __init__(self, queue: str, now: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._now = queue, now
        self._changed = threading.Condition()
        self._blocks = Blocks(SPARE)
        self._items: deque[_Item] = deque()
        # The items that consumers have, by number, and who has them.
        self._taken: dict[int, tuple[_Item, WorkerId]] = {}
        # Those of consumers that wait for an item.
        self._waiting: list[Reply] = []
        # Those that wait with an item until there is room, in the order in which they have come.
        self._full: dict[Future[None], None] = {}
        self._most = 1
        self._number = 0
        self._filling = 0
        self._sent = 0
        self.dropped = 0
        """Items that were too old when they were taken."""
        self.delivered = 0
        """Items that consumers have used."""
        self.admissions = Admissions(lambda: self.counted())
        self.counted: Callable[[], None] = lambda: None
        """Called in any thread when `counts` are others."""

    def __len__(self) -> int:
        """The number of items that no consumer has taken."""
        return len(self._items)

    @property
    def left(self) -> int:
        """The number of items that no consumer has used."""
        with self._changed:
            return len(self._items) + len(self._taken) + self._filling

    def counts(self) -> Counts:
        """The items that were admitted, put and used."""
        # First, so that an item which is dropped meanwhile counts once too often, and not too rarely.
        dropped, delivered = self.dropped, self.delivered
        still_open, made = self.admissions.counts()
        return Counts(still_open, made - dropped, delivered)

    def has_room(self, most: int) -> bool:
        """Return True if `put` would not wait."""
        return len(self._items) + self._filling < most

    def put(self, value: object, version: int | None, most: int, deadline: float) -> None:
        """Add an item, as soon as fewer than `most` are there. Raises `QueueTimeout`, `EncodingError`."""
        parts, room = self._packed(value), self._reserved(most)
        try:
            room.result(max(deadline - self._now(), 0.0))
        except TimeoutError:
            raise self._too_full(room) from None
        except BaseException:
            self._give_up(room)
            raise
        self._add(parts, version, room)

    async def put_async(self, value: object, version: int | None, most: int, deadline: float) -> None:
        """As `put`, in an event loop."""
        parts, room = self._packed(value), self._reserved(most)
        try:
            there = room.done() or await settled(room, max(deadline - self._now(), 0.0))
        except BaseException:
            self._give_up(room)
            raise
        if not there:
            raise self._too_full(room)
        self._add(parts, version, room)

    def _packed(self, value: object) -> _Parts:
        head, buffers = dump(value, f"an item of queue {self._queue!r}")
        return (memoryview(head), *(buffer.cast("B") for buffer in buffers))

    def _reserved(self, most: int) -> Future[None]:
        """A place for one more item, which is there when the future has its result."""
        room: Future[None] = Future()
        with self._changed:
            self._most = most
            self._full[room] = None
            self._make_room()
        return room

    def _make_room(self) -> None:
        while self._full and self.has_room(self._most):
            room = next(iter(self._full))
            del self._full[room]
            self._filling += 1
            room.set_result(None)

    def _give_up(self, room: Future[None]) -> None:
        with self._changed:
            if room in self._full:
                del self._full[room]
            else:
                self._filling -= 1
                self._make_room()
                self._changed.notify_all()

    def _too_full(self, room: Future[None]) -> QueueTimeout:
        self._give_up(room)
        return QueueTimeout(
            f"queue {self._queue!r} was full, with {self._most} items, until the deadline",
            "consume faster, or produce less",
            queue=self._queue,
        )

    def _add(self, parts: _Parts, version: int | None, room: Future[None]) -> None:
        sizes = tuple(part.nbytes for part in parts)
        places, total = offsets(sizes)
        try:
            with self._changed:
                block = self._blocks.take(total, KEPT)
        except BaseException:
            self._give_up(room)
            raise
        for place, part in zip(places, parts, strict=True):
            if part.nbytes:
                # torch copies without the GIL.
                block.memory[place : place + part.nbytes] = torch.frombuffer(
                    writable(part), dtype=torch.uint8
                )
        with self._changed:
            self._filling -= 1
            self._number += 1
            self._items.append((Offered(self._number, version, sizes), block))
            woken = self._woken()
        self._tell(woken)
        self.admissions.put()

    def _woken(self) -> list[Reply]:
        """The consumers that wait for an item, when there is one."""
        if not self._items:
            return []
        woken, self._waiting = self._waiting, []
        return woken

    def _tell(self, woken: list[Reply]) -> None:
        for reply in woken:
            reply(ACK)

    def handle(self, request: Demand, reply: Reply) -> None:
        """Answer a consumer, now or when there is an item."""
        match request:
            case AwaitItem():
                with self._changed:
                    self._waiting.append(reply)
                    woken = self._woken()
                self._tell(woken)
                return
            case Take(taker=taker, here=here):
                reply(self._take(taker, here=here))
                return
            case Hold(taker=taker, numbers=numbers):
                self._put_back(lambda number, who: who == taker and number not in numbers)
                reply(Parcel(encode(self.counts())))
                return
            case Done():
                self._used(request)
        reply(ACK)

    def _take(self, taker: WorkerId, *, here: bool) -> Parcel:
        with self._changed:
            if not self._items:
                return ACK
            offer, block = item = self._items.popleft()
            self._taken[offer.number] = item, taker
            self._sent += 1
            reader = f"{taker} {self._sent}"
            block.readers.add(reader)
            self._make_room()
        head = encode(offer)
        _, total = offsets(offer.sizes)

        def released() -> None:
            with self._changed:
                block.readers.discard(reader)

        if here and block.handle is not None:
            return Parcel(head, lent=Lent(block.handle, total, released))
        array: Any = block.memory[:total].numpy()
        weakref.finalize(array, released).atexit = False
        return Parcel(head, (memoryview(array),))

    def _used(self, request: Done) -> None:
        with self._changed:
            for number in request.numbers:
                if number not in self._taken or self._taken[number][1] != request.taker:
                    # It was thought dead, and another one has it now.
                    continue
                (_, block), _ = self._taken.pop(number)
                block.readers.discard(KEPT)
                if request.dropped:
                    self.dropped += 1
                else:
                    self.delivered += 1
            self._changed.notify_all()
        self.counted()

    def lost(self, gone: Callable[[WorkerId], bool]) -> None:
        """Items of consumers that are gone are there for others again."""
        self._put_back(lambda _, who: gone(who))

    def _put_back(self, which: Callable[[int, WorkerId], bool]) -> None:
        with self._changed:
            back = [number for number, (_, who) in self._taken.items() if which(number, who)]
            # Those that were put back before may come after these.
            found = [*(self._taken.pop(number)[0] for number in back), *self._items]
            self._items = deque(sorted(found, key=lambda item: item[0].number))
            woken = self._woken()
        self._tell(woken)

    def join(self, deadline: float) -> None:
        """Wait until consumers have used all items. Raises `QueueTimeout`."""
        with self._changed:
            while self._items or self._taken or self._filling:
                left = deadline - self._now()
                if left <= 0:
                    raise QueueTimeout(
                        f"{self.left} items of queue {self._queue!r} were not used until the deadline",
                        "do consumers take them, and say done()?",
                        queue=self._queue,
                    )
                self._changed.wait(left)

    def close(self) -> None:
        """Give the memory back, with all items; those that consumers have count as used. There is room then for what
        waits to be put. Consumers that wait get what is put later, if this process makes the queue again."""
        with self._changed:
            self.delivered += len(self._taken)
            self._items.clear()
            self._taken.clear()
            self._blocks.close()
            self._make_room()
            self._changed.notify_all()
        self.admissions.close(self.delivered + self.dropped)
