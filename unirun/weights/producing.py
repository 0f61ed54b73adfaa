"""The producing end of a queue: items in shared memory until they are used, and who may make one more."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from unirun.errors import FrameError, QueueTimeout
from unirun.roles.calls.codec import dump
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.protocol import Lent, Parcel, Reply, writable
from unirun.values import Value, WorkerId
from unirun.weights.publishing import Block, Blocks

# The requests of consumers to producers and of producers to the gate, and the answers: JSON in the head of a parcel.
#
# The item itself is the only buffer of the parcel: its pickle, then the memory of its tensors.


class AwaitItem(Value, tag=True):
    """Asks whether there is an item. Answered when there is, or not at all after `patience` seconds."""

    queue: str
    patience: float


class Take(Value, tag=True):
    """Asks for the first item. Answered at once. `here`: it is to be in shared memory, as the taker is on the same
    host."""

    queue: str
    taker: WorkerId
    here: bool


class Hold(Value, tag=True):
    """The taker has these items and no others: it has connected anew, and answers may have been lost."""

    queue: str
    taker: WorkerId
    numbers: tuple[int, ...]


class Done(Value, tag=True):
    """The taker has used these items, or has `dropped` them as they were too old."""

    queue: str
    taker: WorkerId
    numbers: tuple[int, ...]
    dropped: bool


class Enter(Value, tag=True):
    """The producer asks whether it may begin one more item. It has begun `count` so far, without those that were
    dropped, and consumers have used `delivered`. Answered as soon as it may, or not at all after `patience` seconds.

    With None it tells the counts alone, as it has given an admission back, or waits no longer. Answered at once.
    """

    queue: str
    producer: WorkerId
    count: int
    delivered: int
    patience: float | None = None


class Offered(Value, tag=True):
    """The answer to all requests: an item of `version`. `sizes` are those of its pickle and of each buffer, in bytes.
    Number 0: there is no item with it."""

    number: int = 0
    version: int | None = None
    sizes: tuple[int, ...] = ()


Demand = AwaitItem | Take | Hold | Done

_offers = msgspec.json.Decoder(Offered)


def encode(message: Demand | Enter | Offered) -> bytes:
    """The head of a parcel."""
    return msgspec.json.encode(message)


def offered(head: bytes) -> Offered:
    """The inverse of `encode` for answers. Raises `FrameError` for anything else."""
    try:
        return _offers.decode(head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"this is no answer of a queue: {error}") from error


ACK = Parcel(encode(Offered()))
"""The answer to what needs no other."""


# The decision about who may make one more item: the bound on the age of its weights when it is trained on.


class Bound(Value):
    """An item is trained on at most `max_head_offpolicyness` versions after the weights that it was made with; each
    version takes `batch` items."""

    batch: int
    max_head_offpolicyness: int

    def may_begin(self, made: int, version: int) -> bool:
        """Return True if, after `made` items, the next one will be in a batch that is trained on early enough.

        It will be in batch ``made // batch``, which is trained on with that version at the earliest. This is AReaL's
        rule (``is_staled`` of its rollout manager).
        """
        return made // self.batch <= version + self.max_head_offpolicyness

    def is_stale(self, made_with: int, version: int) -> bool:
        """Return True if an item is too old to be trained on."""
        return version - made_with > self.max_head_offpolicyness


class Gate:
    """Lets producers begin. It is in rank 0 of the consumer, which knows the version. `handle` is called in a thread of
    the transport.

    A new gate takes it that each version before its own has had its batch.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._bound: Bound | None = None
        self._version = 0
        # Items in the batches before, without those that producers count themselves.
        self._before = 0
        # The latest counts of each producer.
        self._counts: dict[WorkerId, Enter] = {}
        # Producers that want to begin, and when their time is over.
        self._waiting: dict[WorkerId, tuple[Reply, float]] = {}

    def open(self, bound: Bound, version: int) -> None:
        """Let producers begin; `version` weights were trained before."""
        with self._lock:
            if self._bound is None:
                self._bound, self._version = bound, version
                self._before += version * bound.batch
        self._let_in()

    def advance(self, version: int) -> None:
        """These weights are trained now."""
        with self._lock:
            self._version = max(self._version, version)
        self._let_in()

    def lost(self, alive: Collection[WorkerId]) -> None:
        """Producers that are not `alive` have taken with them what they had not delivered."""
        with self._lock:
            for who in [who for who in self._counts if who not in alive]:
                self._before += self._counts.pop(who).delivered
            self._waiting = {who: each for who, each in self._waiting.items() if who in alive}
        self._let_in()

    def handle(self, request: Enter, reply: Reply) -> None:
        """Answer when the producer may begin; at once when it does not want to."""
        with self._lock:
            if request.producer not in self._counts:
                # What was delivered before this gate was there is in the batches of earlier versions.
                self._before -= request.delivered
            self._counts[request.producer] = request
            # A producer has one request at a time: an earlier one that still waits was given up.
            self._waiting.pop(request.producer, None)
            if request.patience is not None:
                self._waiting[request.producer] = reply, self._now() + request.patience
        self._let_in()
        if request.patience is None:
            reply(ACK)

    def _let_in(self) -> None:
        replies = []
        with self._lock:
            now = self._now()
            self._waiting = {who: each for who, each in self._waiting.items() if each[1] > now}
            while self._waiting and self._bound is not None and self._may_begin(self._bound):
                first = next(iter(self._waiting))
                count = self._counts[first]
                self._counts[first] = replace(count, count=count.count + 1)
                replies.append(self._waiting.pop(first)[0])
        for reply in replies:
            reply(ACK)

    def _may_begin(self, bound: Bound) -> bool:
        made = self._before + sum(each.count for each in self._counts.values())
        return bound.may_begin(made, self._version)


KEPT = "queue"
"""The reader of a block whose item nobody has used yet."""

SPARE = 16
"""Blocks that are kept for the next items."""


_Item = tuple[Offered, Block]
"""An item, and the block in which its pickle and its buffers are."""


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
        # Consumers that wait for an item, and when their time is over.
        self._waiting: list[tuple[Reply, float]] = []
        self._number = 0
        self._filling = 0
        self._sent = 0
        self.dropped = 0
        """Items that were too old when they were taken."""
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
            self._items.append((Offered(self._number, version, sizes), block))
            woken = self._woken()
        self._tell(woken)

    def _woken(self) -> list[Reply]:
        """The consumers that wait for an item, when there is one."""
        now = self._now()
        waiting = [each for each in self._waiting if each[1] > now]
        self._waiting = [] if self._items else waiting
        return [reply for reply, _ in waiting] if self._items else []

    def _tell(self, woken: list[Reply]) -> None:
        for reply in woken:
            reply(ACK)

    def handle(self, request: Demand, reply: Reply) -> None:
        """Answer a consumer, now or when there is an item."""
        match request:
            case AwaitItem(patience=patience):
                with self._changed:
                    self._waiting.append((reply, self._now() + patience))
                    woken = self._woken()
                self._tell(woken)
                return
            case Take(taker=taker, here=here):
                reply(self._take(taker, here=here))
                return
            case Hold(taker=taker, numbers=numbers):
                self._put_back(lambda number, who: who == taker and number not in numbers)
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
            self._changed.notify_all()
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

    def lost(self, alive: Collection[WorkerId]) -> None:
        """Items of consumers that are not `alive` are there for others again."""
        self._put_back(lambda _, who: who not in alive)

    def _put_back(self, which: Callable[[int, WorkerId], bool]) -> None:
        with self._changed:
            back = [number for number, (_, who) in self._taken.items() if which(number, who)]
            self._items.extendleft(self._taken.pop(number)[0] for number in sorted(back, reverse=True))
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
