"""`Source`: one process that has weights, as a receiver sees it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from unirun.errors import FrameError
from unirun.roles.transport.protocol import Parcel, writable
from unirun.values import WorkerId
from unirun.weights.copies import Mapped, Sent
from unirun.weights.layout import Layout
from unirun.weights.lines import Line
from unirun.weights.messages import Fetch, Fetched, Part, Peek, Release, Request, encode
from unirun.weights.packing import Packing
from unirun.weights.plan import Take
from unirun.weights.tensors import dtype_of


class Source:
    """A publisher, or a receiver that holds what it has received."""

    def __init__(
        self,
        channel: str,
        line: Line,
        reader: str,
        *,
        here: bool = False,
        holder: bool = False,
        host: str = "",
    ) -> None:
        """`here`: it is a publisher on this host, so its memory can be mapped. `host`: the host of the reader, whose
        receivers give to each other what one of them has got; empty if they do not."""
        self.line, self.here, self.holder = line, here, holder
        self.packing: Packing | None = None
        self._channel, self._reader, self._host = channel, reader, host
        self._mapped: dict[int, Mapped] = {}
        self._kept = 0
        self.had: tuple[int, Sent] | None = None
        """The last version that came from here, of a publisher on another host: its number and all parts."""

    @property
    def who(self) -> WorkerId:
        """The process."""
        return self.line.who

    def ask(self, request: Request) -> Future[Parcel]:
        """Send a request. The answer raises `PeerLost` when the process has ended."""
        return self.line.ask(encode(request))

    def fetch(self, at_least: int, takes: Sequence[Take], patience: float, *, keep: bool) -> Future[Parcel]:
        """Ask for a version. `keep`: its tensors are kept, and so the memory that is lent, until they are freed."""
        layout = self.packing.number if self.packing is not None else 0
        reader, mapped = self._reader, tuple(self._mapped)
        if keep:
            self._kept += 1
            reader, mapped = f"{reader} {self._kept}", ()
        parts = None if self.here else tuple(Part(take.name, take.box) for take in takes)
        have = self.had[0] if self.had is not None else None
        return self.ask(
            Fetch(self._channel, reader, layout, at_least, patience, mapped, parts, self._host, have)
        )

    def fetch_parts(
        self, version: int, takes: Sequence[Take], patience: float, layout: int = 0
    ) -> Future[Parcel]:
        """Ask for parts that this process has itself, of `version` or a later one."""
        parts = tuple(Part(take.name, take.box) for take in takes)
        return self.ask(Fetch(self._channel, self._reader, layout, version, patience, (), parts))

    def peek(self, patience: float | None) -> Future[Parcel]:
        """Ask for the number of the latest version."""
        return self.ask(Peek(self._channel, patience))

    def mapped(self, fetched: Fetched, parcel: Parcel, *, keep: bool) -> Mapped:
        """The publisher's memory with the version. Raises `FrameError`."""
        assert self.packing is not None
        known = None if keep else self._mapped.get(fetched.block)
        if known is not None:
            return known
        if not parcel.buffers:
            raise FrameError(f"{self.who} did not lend the block with version {fetched.version}")
        found = Mapped(self.packing, torch.frombuffer(parcel.buffers[0], dtype=torch.uint8))
        if not keep:
            self._mapped[fetched.block] = found
        return found

    def sent(self, parcel: Parcel, takes: Sequence[Take], wanted: Layout) -> list[torch.Tensor]:
        """The tensors in the buffers of `parcel`: `takes` of `wanted`. Raises `FrameError`."""
        if len(parcel.buffers) != len(takes):
            raise FrameError(f"{self.who} sent {len(parcel.buffers)} parts where {len(takes)} were asked for")
        return [
            self._tensor(take, dtype_of(wanted[take.name].tensor.dtype), buffer)
            for take, buffer in zip(takes, parcel.buffers, strict=True)
        ]

    def _tensor(self, take: Take, dtype: torch.dtype, buffer: memoryview) -> torch.Tensor:
        if buffer.nbytes != take.box.count * dtype.itemsize:
            raise FrameError(f"{self.who} sent {buffer.nbytes} bytes of {take.name}")
        return torch.frombuffer(writable(buffer), dtype=torch.uint8).view(dtype).view(take.box.size)

    def was_read(self, fetched: Fetched) -> Future[Parcel] | None:
        """Ask whether nobody has written to what was read. None: it was sent from memory that nobody writes to."""
        if not self.here and not (self.holder and fetched.layout):
            return None
        return self.ask(Release(self._channel, self._reader, fetched.block, keep=True))

    def release(self, block: int) -> Future[Parcel]:
        """Say that the block is not needed any more."""
        return self.ask(Release(self._channel, self._reader, block))

    def describe(self, packing: Packing | None) -> None:
        """Set where tensors are in the publisher's memory; None when that is not known any more."""
        self.packing = packing
        self.had = None
        self._mapped.clear()
