"""The decision about who may make one more item: the bound on the age of its weights when it is trained on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import msgspec
from msgspec.structs import replace

from unirun.errors import FrameError
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import Value, WorkerId

# The requests of consumers to producers and of producers to the gate, and the answers: JSON in the head of a parcel.
#
# The item itself is the only buffer of the parcel: its pickle, then the memory of its tensors.


class AwaitItem(Value, tag=True):
    """Asks whether there is an item. Answered with `Ack` when there is, or not at all after `patience` seconds."""

    queue: str
    patience: float


class Take(Value, tag=True):
    """Asks for the first item. Answered with `Offered` at once; its `number` is 0 when there is none. `here`: it is to
    be in shared memory, as the taker is on the same host."""

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
    dropped, and consumers have used `delivered`. Answered with `Ack` as soon as it may, or not at all after
    `patience` seconds."""

    queue: str
    producer: WorkerId
    count: int
    delivered: int
    patience: float


class Begun(Value, tag=True):
    """The counts of `Enter`, without a request to begin an item: the producer has given an admission back, or waits no
    longer. Answered with `Ack` at once."""

    queue: str
    producer: WorkerId
    count: int
    delivered: int


class Offered(Value, tag=True):
    """An item of `version`; `sizes` are those of its pickle and of each buffer, in bytes. Number 0: there is none."""

    number: int
    version: int | None = None
    sizes: tuple[int, ...] = ()


class Ack(Value, tag=True):
    """The answer to what needs no other."""


Demand = AwaitItem | Take | Hold | Done
Supply = Offered | Ack

_supplies = msgspec.json.Decoder(Supply)


def encode(message: Demand | Enter | Begun | Supply) -> bytes:
    """The head of a parcel."""
    return msgspec.json.encode(message)


def supply_of(head: bytes) -> Supply:
    """The inverse of `encode` for answers. Raises `FrameError` for anything else."""
    try:
        found: Supply = _supplies.decode(head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"this is no answer of a queue: {error}") from error
    return found


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


class _Count(Value):
    """Items that a producer has begun, and those that consumers have used, since the gate knows it."""

    base: int
    made: int
    delivered: int


class _WaitingProducer(Value):
    """A producer that wants to begin, and when its time is over."""

    producer: WorkerId
    reply: Reply
    until: float


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
        self._before = 0
        self._counts: dict[WorkerId, _Count] = {}
        self._waiting: list[_WaitingProducer] = []

    def open(self, bound: Bound, version: int) -> None:
        """Let producers begin; `version` weights were trained before."""
        with self._lock:
            if self._bound is None:
                self._bound, self._version, self._before = bound, version, version * bound.batch
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
            self._waiting = [each for each in self._waiting if each.producer in alive]
        self._let_in()

    def handle(self, request: Enter | Begun, reply: Reply) -> None:
        """Answer when the producer may begin; at once when it does not want to."""
        with self._lock:
            # What was delivered before this gate was there is in the batches of earlier versions.
            known = self._counts.get(request.producer)
            base = known.base if known is not None else request.delivered
            self._counts[request.producer] = _Count(base, request.count - base, request.delivered - base)
            # A producer has one request at a time: an earlier one that still waits was given up.
            self._waiting = [each for each in self._waiting if each.producer != request.producer]
            if isinstance(request, Enter):
                self._waiting.append(
                    _WaitingProducer(request.producer, reply, self._now() + request.patience)
                )
        self._let_in()
        if isinstance(request, Begun):
            reply(Parcel(encode(Ack())))

    def _let_in(self) -> None:
        replies = []
        with self._lock:
            now = self._now()
            self._waiting = [each for each in self._waiting if each.until > now]
            while self._waiting and self._bound is not None and self._may_begin(self._bound):
                first = self._waiting.pop(0)
                count = self._counts[first.producer]
                self._counts[first.producer] = replace(count, made=count.made + 1)
                replies.append(first.reply)
        for reply in replies:
            reply(Parcel(encode(Ack())))

    def _may_begin(self, bound: Bound) -> bool:
        made = self._before + sum(count.made for count in self._counts.values())
        return bound.may_begin(made, self._version)
