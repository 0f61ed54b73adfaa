"""The requests of receivers to the processes that have weights, and the answers: JSON in the head of a
parcel. The weights themselves are in its buffers or in memory that is lent with it.

A publisher waits until it can answer. A receiver that holds a version for others answers at once.
"""

from __future__ import annotations

from typing import Final

import msgspec

from unirun.values import Value, WorkerId
from unirun.weights.tensors import Layout, NamedBox

WEIGHTS: Final = "weights"
"""The name of the handler of weights and queues, and of its address among those of a worker."""


Origin = tuple[WorkerId, int]
"""A publisher, and how often it has withdrawn: its versions since then are of one state."""


class Describe(Value, tag=True):
    """Asks for the layout of what is there. Answered when something is, or not at all after `patience` seconds."""

    channel: str
    patience: float


class Described(Value, tag=True):
    """The `layout` with this `number`, and where in a block the pieces of each tensor are, in bytes. `device`: they are
    in memory of a device. `withdrawals`: how often the publisher has withdrawn."""

    number: int
    layout: Layout
    offsets: dict[str, tuple[int, ...]]
    device: bool = False
    withdrawals: int = 0


class Fetch(Value, tag=True):
    """Asks for a version that is not before `at_least`, in the layout with this number. Answered when it is there, at
    once if there is another layout or none, or not at all after `patience` seconds.

    With `parts`, the answer has a buffer for each, without those that another reader on the same `host` has got.
    Without, the block is lent, unless it is one of `mapped`, and is not written again before `reader` says `Release`,
    or frees what was lent with this answer.

    With a `link`, as ``gloo 3``, the parts are sent through the process group with this backend and this number, in
    place of buffers; `checked`: with checksums. With `device`, memory of the publisher's device is lent or sent, if the
    version is there.

    A receiver that is asked for layout 0 sends parts that it has got for its host from this `origin`, as soon as it has
    them: not those of a version that was withdrawn, whatever its number.
    """

    channel: str
    reader: str
    layout: int
    at_least: int
    patience: float
    mapped: tuple[int, ...] = ()
    parts: tuple[NamedBox, ...] | None = None
    host: str = ""
    link: str = ""
    checked: bool = True
    device: bool = False
    origin: Origin | None = None


class Peek(Value, tag=True):
    """Asks which version there is. Answered with `Fetched` when there is one, or not at all after `patience` seconds.
    With None it is answered at once; the layout 0 says that there is none."""

    channel: str
    patience: float | None


class Fetched(Value, tag=True):
    """The `version`, which is in the block with this number; `layout` is that of the version. If it is not the one that
    was asked for, there is nothing with it. Number 0: it is in no shared memory, and has to be asked for by parts.

    `elsewhere` are the readers that have got some parts already, and which ones: their places in the request.
    `handle` is that of memory of a device, which is lent. With a `path`, the block is a safetensors file there, as long
    as it is lent; `token` is in it, and in no other. `origins` are those of a version that a receiver holds.
    """

    version: int
    layout: int
    block: int
    elsewhere: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    handle: bytes = b""
    path: str = ""
    token: str = ""
    origins: tuple[Origin, ...] = ()


class Release(Value, tag=True):
    """The reader has read the block. With `keep`, it holds it for others and releases it later."""

    channel: str
    reader: str
    block: int
    keep: bool = False


class Released(Value, tag=True):
    """`held`: the block was the reader's until now. Else what it has read may be of several versions."""

    held: bool


Request = Describe | Peek | Fetch | Release
Answer = Described | Fetched | Released
