"""`Holder`: a receiver keeps what it has received, so that others get it when its publisher is gone.

It costs no copy: memory of a publisher on this host stays mapped and is not released until the next version is there,
and what came from another host is in memory of this process already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from unirun.errors import PeerLost
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import WorkerId
from unirun.weights.layout import Box, Layout, Part
from unirun.weights.messages import (
    Describe,
    Described,
    Fetch,
    Fetched,
    Peek,
    Release,
    Released,
    Request,
    encode,
)
from unirun.weights.publishing import buffers_of
from unirun.weights.sources import Copy, RemoteSource, Sent

Lease = tuple[RemoteSource, int | None]
"""A block of a publisher on this host that is not written to before it is released; None: before it is freed."""


class HeldVersion:
    """A version, the copies that it is in, and the blocks that are held for it. `number` is that of its layout."""

    def __init__(self, version: int, number: int, copies: Sequence[Copy], leases: Sequence[Lease]) -> None:
        self.version, self.number = version, number
        self.copies, self.leases = tuple(copies), tuple(leases)
        self.users = 0

    def layout(self) -> Layout:
        """The pieces of all copies."""
        found: Layout = {}
        for copy in self.copies:
            for name, part in copy.layout.items():
                known = found.get(name)
                pieces = part.pieces if known is None else (*known.pieces, *part.pieces)
                found[name] = Part(part.tensor, pieces)
        return found


class Holder:
    """The versions that one receiver holds of one channel. `handle` is called in a thread of the transport."""

    def __init__(self, gone: Callable[[WorkerId], bool], now: Callable[[], float] = time.monotonic) -> None:
        """`gone`: the worker has ended, so that it does not write to its memory any more."""
        self._gone, self._now = gone, now
        self._lock = threading.RLock()
        self._held: HeldVersion | None = None
        self._number = 0
        # What publishers have sent for all receivers of this host, and who waits for it.
        self._got: list[tuple[int, Sent]] = []
        self._waiting: list[tuple[Fetch, Reply, float]] = []

    def got(self, sent: Sequence[tuple[int, Sent]]) -> None:
        """Publishers have sent this, of these versions. Others on this host may have it now."""
        with self._lock:
            self._got = list(sent)
            now = self._now()
            waiting = [each for each in self._waiting if each[2] > now]
            answers = [(reply, self._parts(request)) for request, reply, _ in waiting]
            self._waiting = [each for each, (_, found) in zip(waiting, answers, strict=True) if found is None]
        for reply, found in answers:
            if found is not None:
                reply(found)

    def _parts(self, request: Fetch) -> Parcel | None:
        """The answer to a receiver on this host. None: the parts are not here yet."""
        for version, sent in self._got:
            if version >= request.at_least:
                try:
                    views = [sent.view(part.name, part.box) for part in request.parts or ()]
                except (KeyError, ValueError):
                    continue
                return Parcel(encode(Fetched(version, 0, 0)), buffers_of(views, lambda: None))
        return None

    def hold(
        self, version: int, copies: Sequence[Copy], leases: Sequence[Lease]
    ) -> list[tuple[RemoteSource, Future[Parcel]]]:
        """Hold this version in place of the one before. Returns the answers of publishers to come: they have back what
        is not needed any more."""
        with self._lock:
            self._number += 1
            return self._replace(HeldVersion(version, self._number, copies, leases))

    def give_back(self, leases: Sequence[Lease]) -> list[tuple[RemoteSource, Future[Parcel]]]:
        """These blocks are not needed. What is held stays. Returns the answers of publishers to come."""
        with self._lock:
            return self._give_back(HeldVersion(0, 0, (), leases))

    def _replace(self, held: HeldVersion | None) -> list[tuple[RemoteSource, Future[Parcel]]]:
        before, self._held = self._held, held
        return self._give_back(before) if before is not None and not before.users else []

    def _give_back(self, held: HeldVersion) -> list[tuple[RemoteSource, Future[Parcel]]]:
        """Release the blocks that nobody needs any more."""
        kept = self._held.leases if self._held is not None else ()
        found = []
        for source, block in held.leases:
            if block is not None and (source, block) not in kept and not source.line.lost:
                try:
                    found.append((source, source.release(block)))
                except PeerLost:
                    # It is released with the connection.
                    continue
        return found

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer at once, or when the parts are here that publishers send for all receivers of this host."""
        if isinstance(request, Fetch) and not request.layout:
            with self._lock:
                found = self._parts(request)
                if found is None:
                    self._waiting.append((request, reply, self._now() + request.patience))
            if found is not None:
                reply(found)
            return
        with self._lock:
            held = self._valid()
        if isinstance(request, Release):
            reply(Parcel(encode(Released(held is not None and held.number == request.block))))
        elif held is None:
            nothing = Described(0, {}, {}) if isinstance(request, Describe) else Fetched(0, 0, 0)
            reply(Parcel(encode(nothing)))
        elif isinstance(request, Describe):
            reply(Parcel(encode(Described(held.number, held.layout(), {}))))
        else:
            reply(self._fetched(held, request))

    def _fetched(self, held: HeldVersion, request: Peek | Fetch) -> Parcel:
        head = encode(Fetched(held.version, held.number, held.number))
        if isinstance(request, Peek) or request.layout != held.number or request.parts is None:
            return Parcel(head)
        with self._lock:
            held.users += 1
        try:
            views = [_view(held, part.name, part.box) for part in request.parts]
        except ValueError:
            self._used(held)
            return Parcel(encode(Fetched(0, 0, 0)))
        return Parcel(head, buffers_of(views, lambda: self._used(held)))

    def _valid(self) -> HeldVersion | None:
        """The version that is held, unless its connection has ended and a living publisher may have written to it."""
        held = self._held
        if held is None or any(s.line.lost and not self._gone(s.who) for s, _ in held.leases):
            return None
        return held

    def _used(self, held: HeldVersion) -> None:
        """Note that a piece that was asked for has been sent."""
        with self._lock:
            held.users -= 1
            if held is not self._held and not held.users:
                self._give_back(held)

    def close(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._got.clear()
            self._waiting.clear()
            self._replace(None)


def _view(held: HeldVersion, name: str, box: Box) -> torch.Tensor:
    for copy in held.copies:
        try:
            return copy.view(name, box)
        except (KeyError, ValueError):
            continue
    raise ValueError(f"{box} of {name} is not here")
