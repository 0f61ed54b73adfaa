"""The requests of consumers to producers and of producers to the gate, and the answers: JSON in the head of a
parcel.

The item itself is the only buffer of the parcel: its pickle, then the memory of its tensors.
"""

from __future__ import annotations

import msgspec

from unirun.errors import FrameError
from unirun.values import Value, WorkerId


class Ready(Value, tag=True):
    """Asks whether there is an item. Answered with `Heard` when there is, or not at all after `patience` seconds."""

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
    dropped, and consumers have used `delivered`. Answered with `Heard` as soon as it may, or not at all after
    `patience` seconds."""

    queue: str
    producer: WorkerId
    count: int
    delivered: int
    patience: float


class Begun(Value, tag=True):
    """The counts of `Enter`, without a request to begin an item: the producer has given an admission back, or waits no
    longer. Answered with `Heard` at once."""

    queue: str
    producer: WorkerId
    count: int
    delivered: int


class Offered(Value, tag=True):
    """An item of `version`; `sizes` are those of its pickle and of each buffer, in bytes. Number 0: there is none."""

    number: int
    version: int | None = None
    sizes: tuple[int, ...] = ()


class Heard(Value, tag=True):
    """The answer to what needs no other."""


Demand = Ready | Take | Hold | Done
Supply = Offered | Heard

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
