"""The producing end of a queue: items in shared memory, until a consumer has used them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch

from unirun.errors import QueueTimeout
from unirun.roles.calls.codec import dump
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.protocol import Lent, Parcel, Reply, writable
from unirun.values import Value, WorkerId
from unirun.weights.packing import Block, Blocks
from unirun.weights.queues.admission import Ack, AwaitItem, Demand, Done, Hold, Offered, Take, encode

KEPT = "queue"
"""The reader of a block whose item nobody has used yet."""

SPARE = 16
"""Blocks that are kept for the next items."""


class _Item(Value):
    """An item, and where it is: a pickle and buffers of these `sizes`, in bytes, in `block`."""

    number: int
    version: int | None
    sizes: tuple[int, ...]
    block: Block


class _Taken(Value):
    """An item that `taker` has."""

    item: _Item
    taker: WorkerId


class _WaitingConsumer(Value):
    """A consumer that waits for an item, and when its time is over."""

    reply: Reply
    until: float


class Producer:
    """The items that one process has put into one queue, first in, first out. Thread-safe; `handle` is called
    in a thread of the transport."""

    def __init__(self, queue: str, now: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._now = queue, now
        self._changed = threading.Condition()
        self._blocks = Blocks(SPARE)
        self._items: deque[_Item] = deque()
        self._taken: dict[int, _Taken] = {}
        self._waiting: list[_WaitingConsumer] = []
        self._number = 0
        self._filling = 0
        self._sent = 0
        self._dropped = 0
        self.delivered = 0
        """Items that consumers have used."""

    def __len__(self) -> int:
        """The number of items that no consumer has taken."""
        return len(self._items)

    @property
    def left(self) -> int:
        """The number of items that no consumer has used."""
        with self._changed:
            return len(self._items) + len(self._taken) + self._filling

    @property
    def dropped(self) -> int:
        """Items that were too old when they were taken."""
        return self._dropped

    def has_room(self, most: int) -> bool:
        """Return True if `put` would not wait."""
        return len(self._items) + self._filling < most

    def put(self, value: object, version: int | None, most: int, deadline: float) -> None:
        """Add an item, as soon as fewer than `most` are there. Raises `QueueTimeout`, `EncodingError`."""
        head, buffers = dump(value, f"an item of queue {self._queue!r}")
        parts = (memoryview(head), *(buffer.cast("B") for buffer in buffers))
        sizes = tuple(part.nbytes for part in parts)
        places, total = offsets(sizes)
        with self._changed:
            while not self.has_room(most):
                left = deadline - self._now()
                if left <= 0:
                    raise QueueTimeout(
                        f"queue {self._queue!r} was full, with {most} items, until the deadline",
                        "consume faster, or produce less",
                        queue=self._queue,
                    )
                self._changed.wait(left)
            self._filling += 1
            block = self._blocks.take(total, KEPT)
        for place, part in zip(places, parts, strict=True):
            if part.nbytes:
                # torch copies without the GIL.
                block.memory[place : place + part.nbytes] = torch.frombuffer(
                    writable(part), dtype=torch.uint8
                )
        with self._changed:
            self._filling -= 1
            self._number += 1
            self._items.append(_Item(self._number, version, sizes, block))
            woken = self._woken()
        self._tell(woken)

    def _woken(self) -> list[Reply]:
        """The consumers that wait for an item, when there is one."""
        now = self._now()
        self._waiting = [each for each in self._waiting if each.until > now]
        if not self._items:
            return []
        woken, self._waiting = self._waiting, []
        return [each.reply for each in woken]

    def _tell(self, woken: list[Reply]) -> None:
        for reply in woken:
            reply(Parcel(encode(Ack())))

    def handle(self, request: Demand, reply: Reply) -> None:
        """Answer a consumer, now or when there is an item."""
        match request:
            case AwaitItem(patience=patience):
                with self._changed:
                    self._waiting.append(_WaitingConsumer(reply, self._now() + patience))
                    woken = self._woken()
                self._tell(woken)
                return
            case Take(taker=taker, here=here):
                reply(self._take(taker, here=here))
                return
            case Hold(taker=taker, numbers=numbers):
                self._put_back(lambda number, taken: taken.taker == taker and number not in numbers)
            case Done():
                self._used(request)
        reply(Parcel(encode(Ack())))

    def _take(self, taker: WorkerId, *, here: bool) -> Parcel:
        with self._changed:
            if not self._items:
                return Parcel(encode(Offered(0)))
            item = self._items.popleft()
            self._taken[item.number] = _Taken(item, taker)
            self._sent += 1
            reader = f"{taker} {self._sent}"
            item.block.readers.add(reader)
            self._changed.notify_all()
        head = encode(Offered(item.number, item.version, item.sizes))
        _, total = offsets(item.sizes)
        block = item.block

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
                taken = self._taken.get(number)
                if taken is None or taken.taker != request.taker:
                    # It was thought dead, and another one has it now.
                    continue
                del self._taken[number]
                taken.item.block.readers.discard(KEPT)
                if request.dropped:
                    self._dropped += 1
                else:
                    self.delivered += 1
            self._changed.notify_all()

    def lost(self, alive: Collection[WorkerId]) -> None:
        """Items of consumers that are not `alive` are there for others again."""
        self._put_back(lambda number, taken: taken.taker not in alive)

    def _put_back(self, which: Callable[[int, _Taken], bool]) -> None:
        with self._changed:
            back = [number for number, taken in self._taken.items() if which(number, taken)]
            self._items.extendleft(self._taken.pop(number).item for number in sorted(back, reverse=True))
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
        """Give the memory back, with all items; those that consumers have count as used."""
        with self._changed:
            self.delivered += len(self._taken)
            self._items.clear()
            self._taken.clear()
            self._waiting.clear()
            self._blocks.close()
