"""The publishing end: the latest version in shared memory, and the answers to those who want it.

A version is written into a block that nobody reads, then becomes the current one at once. So a receiver has all of a
version or nothing of it, and a publisher does not wait for its receivers.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace

from unirun.errors import UsageError
from unirun.roles.transport.protocol import Lent, Parcel, Reply
from unirun.values import Value
from unirun.weights.blocks import Block, Blocks
from unirun.weights.messages import (
    Describe,
    Described,
    Fetch,
    Fetched,
    Part,
    Peek,
    Release,
    Released,
    Request,
    encode,
)
from unirun.weights.packing import Packing
from unirun.weights.tensors import Piecewise, layout_of

_numbers = itertools.count(1)
"""Of layouts; 0 is the number of none."""


class _Waiting(Value):
    """A request that cannot be answered yet, and when its time is over."""

    request: Describe | Peek | Fetch
    reply: Any
    until: float


class _Version(Value):
    """A version and where it is."""

    version: int
    packing: Packing
    block: Block


class Publisher:
    """What one process publishes in one channel. `handle` is called in a thread of the transport."""

    def __init__(self, channel: str, now: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._now = channel, now
        self._lock = threading.RLock()
        self._blocks = Blocks()
        self._current: _Version | None = None
        self._waiting: list[_Waiting] = []
        self._sent = 0
        # By host and part, who was the first to get it of the current version.
        self._first: dict[tuple[str, Part], str] = {}
        # The versions in which tensors have changed; all others in `_all`.
        self._changed: dict[str, int] = {}
        self._all = 0

    def publish(self, tensors: Mapping[str, Piecewise], version: int, *, delta: bool = False) -> None:
        """Make `tensors` the current version. They may be changed when this returns. `delta`: find out which of them
        have changed.

        Raises `UsageError` for a version that is not after the current one.
        """
        before = self._current
        if before is not None and version <= before.version:
            raise UsageError(
                f"version {version} of channel {self._channel!r} comes after {before.version}",
                "publish each version once, in ascending order",
            )
        layout = layout_of(tensors)
        same = before is not None and before.packing.layout == layout
        packing = before.packing if before is not None and same else Packing(layout, next(_numbers))
        with self._lock:
            block = self._blocks.take(packing.size, before.block if before is not None else None)
        # Nobody reads it: it is not current, and nobody has borrowed it.
        packing.pack(tensors, block)
        changed = packing.changed(tensors, before.block) if delta and same and before is not None else None
        with self._lock:
            self._current = _Version(version, packing, block)
            if changed is None:
                self._changed, self._all = {}, version
            else:
                self._changed |= dict.fromkeys(changed, version)
            self._first.clear()
            self._expire()
            ready = [each for each in self._waiting if self._can_answer(each.request)]
            self._waiting = [each for each in self._waiting if not self._can_answer(each.request)]
        for each in ready:
            each.reply(self._answer(each.request))

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or when there is something to answer."""
        if isinstance(request, Release):
            held = self._reads if request.keep else self._release
            reply(Parcel(encode(Released(held(request.block, request.reader)))))
            return
        with self._lock:
            self._expire()
            wait = not self._can_answer(request)
            if wait and request.patience is not None:
                self._waiting.append(_Waiting(request, reply, self._now() + request.patience))
        if not wait:
            reply(self._answer(request))
        elif request.patience is None:
            reply(Parcel(encode(Fetched(0, 0, 0))))

    def _expire(self) -> None:
        """Forget those who do not wait any more. They know themselves when their time is over."""
        now = self._now()
        self._waiting = [each for each in self._waiting if each.until > now]

    def _can_answer(self, request: Describe | Peek | Fetch) -> bool:
        if self._current is None:
            return False
        return not isinstance(request, Fetch) or request.at_least <= self._current.version

    def _answer(self, request: Describe | Peek | Fetch) -> Parcel:
        with self._lock:
            assert self._current is not None
            packing, block = self._current.packing, self._current.block
            if isinstance(request, Describe):
                return Parcel(encode(Described(packing.number, packing.layout, packing.offsets)))
            lendable = block.handle is not None
            fetched = Fetched(self._current.version, packing.number, block.number if lendable else 0)
            head = encode(fetched)
            if isinstance(request, Peek) or request.layout != packing.number:
                return Parcel(head)
            if request.parts is None and not lendable:
                return Parcel(head)
            if request.parts is None:
                reader = request.reader
            else:
                # Until the buffers are sent.
                self._sent += 1
                reader = f"{request.reader} {self._sent}"
                parts, elsewhere, unchanged = self._divided(request)
                if elsewhere or unchanged:
                    head = encode(replace(fetched, elsewhere=elsewhere, same=unchanged))
            block.readers.add(reader)

        def release() -> None:
            self._release(block.number, reader)

        if request.parts is not None:
            views = [packing.view(block.memory, part.name, part.box) for part in parts]
            return Parcel(head, buffers_of(views, release))
        if block.number in request.mapped:
            return Parcel(head)
        assert block.handle is not None
        return Parcel(head, lent=Lent(block.handle, block.size, release))

    def _divided(self, request: Fetch) -> tuple[list[Part], dict[str, tuple[int, ...]], tuple[int, ...]]:
        """The parts that the reader gets from here, and the places of those that it gets from others on its host, and
        of those that have not changed."""
        here: list[Part] = []
        others: dict[str, list[int]] = {}
        same: list[int] = []
        for place, part in enumerate(request.parts or ()):
            if request.have is not None and self._changed.get(part.name, self._all) <= request.have:
                same.append(place)
                continue
            first = self._first.setdefault((request.host, part), request.reader) if request.host else ""
            if first in ("", request.reader):
                here.append(part)
            else:
                others.setdefault(first, []).append(place)
        return here, {reader: tuple(places) for reader, places in others.items()}, tuple(same)

    def _reads(self, number: int, reader: str) -> bool:
        """Whether nobody has written to the block since the reader has asked for it."""
        with self._lock:
            block = self._blocks.find(number)
            return block is not None and reader in block.readers

    def _release(self, number: int, reader: str) -> bool:
        """The reader does not need the block any more. Returns whether it was the reader's until now."""
        with self._lock:
            held = self._reads(number, reader)
            block = self._blocks.find(number)
            if block is not None:
                block.readers.discard(reader)
            return held

    @contextmanager
    def current(self) -> Iterator[tuple[int, Packing, Block]]:
        """The current version, which nobody writes to within the block. Raises `UsageError` when there is none."""
        with self._lock:
            version = self._current
            if version is None:
                raise UsageError(f"nothing is published in channel {self._channel!r}", "publish before")
            self._sent += 1
            reader = f"this process {self._sent}"
            version.block.readers.add(reader)
        try:
            yield version.version, version.packing, version.block
        finally:
            self._release(version.block.number, reader)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._waiting.clear()
            self._blocks.close()


def buffers_of(views: Sequence[torch.Tensor], release: Callable[[], object]) -> tuple[memoryview, ...]:
    """The bytes of `views`, where they are if they are contiguous. `release` is called when all are freed."""
    left = len(views)

    def freed() -> None:
        nonlocal left
        left -= 1
        if not left:
            release()

    if not views:
        release()
    found = []
    for view in views:
        array: Any = view.contiguous().view(-1).view(torch.uint8).numpy()
        weakref.finalize(array, freed).atexit = False
        found.append(memoryview(array))
    return tuple(found)
