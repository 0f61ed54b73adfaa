"""The receiving end: asks the publishers, and copies what is the receiver's once all of a version is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch

from unirun.errors import FrameError, WeightsError, WeightsTimeout
from unirun.roles.transport.protocol import Parcel, writable
from unirun.values import Value, WorkerId
from unirun.weights.layout import Layout, shared
from unirun.weights.lines import Line
from unirun.weights.messages import (
    Answer,
    Describe,
    Described,
    Fetch,
    Fetched,
    Part,
    Peek,
    Release,
    Released,
    Request,
    answer_of,
    encode,
)
from unirun.weights.packing import Packing, blend, copy_all
from unirun.weights.plan import Take, by_source, plan
from unirun.weights.tensors import dtype_of, is_dtensor, layout_of, local, part_of


class _Mapped(Value):
    """A block of the publisher that stays mapped, and views of what was taken from it last."""

    memory: torch.Tensor
    takes: Sequence[Take]
    views: list[torch.Tensor]


class Source:
    """A publisher as one receiver sees it."""

    def __init__(self, channel: str, line: Line, reader: str, *, here: bool) -> None:
        """`here`: it is on this host, so its memory can be mapped."""
        self.line, self.here = line, here
        self.packing: Packing | None = None
        self._channel, self._reader = channel, reader
        self._mapped: dict[int, _Mapped] = {}
        self._kept = 0

    @property
    def who(self) -> WorkerId:
        """The publisher."""
        return self.line.who

    def ask(self, request: Request) -> Future[Parcel]:
        """Send a request. The answer raises `PeerLost` when the publisher has ended."""
        return self.line.ask(encode(request))

    def fetch(self, at_least: int, takes: Sequence[Take], patience: float, *, keep: bool) -> Future[Parcel]:
        """Ask for a version. `keep`: its tensors are kept, and so the memory that is lent, until they are freed."""
        layout = self.packing.number if self.packing is not None else 0
        reader, mapped = self._reader, tuple(self._mapped)
        if keep:
            self._kept += 1
            reader, mapped = f"{reader} {self._kept}", ()
        parts = None if self.here else tuple(Part(take.name, take.box) for take in takes)
        return self.ask(Fetch(self._channel, reader, layout, at_least, patience, mapped, parts))

    def peek(self, patience: float) -> Future[Parcel]:
        """Ask for the number of the latest version."""
        return self.ask(Peek(self._channel, patience))

    def tensors(
        self, fetched: Fetched, parcel: Parcel, takes: Sequence[Take], *, keep: bool
    ) -> list[torch.Tensor]:
        """What was taken: views of the publisher's memory, or of the buffers of `parcel`. Raises `FrameError`."""
        assert self.packing is not None
        if not self.here:
            if len(parcel.buffers) != len(takes):
                raise FrameError(
                    f"{self.who} sent {len(parcel.buffers)} parts where {len(takes)} were asked for"
                )
            return [self._sent(take, buffer) for take, buffer in zip(takes, parcel.buffers, strict=True)]
        known = None if keep else self._mapped.get(fetched.block)
        if known is not None and known.takes is takes:
            return known.views
        if known is None and not parcel.buffers:
            raise FrameError(f"{self.who} did not lend the block with version {fetched.version}")
        memory = torch.frombuffer(parcel.buffers[0], dtype=torch.uint8) if known is None else known.memory
        views = [self.packing.view(memory, take.name, take.box) for take in takes]
        if not keep:
            self._mapped[fetched.block] = _Mapped(memory, takes, views)
        return views

    def _sent(self, take: Take, buffer: memoryview) -> torch.Tensor:
        assert self.packing is not None
        dtype = dtype_of(self.packing.layout[take.name].tensor.dtype)
        if buffer.nbytes != take.box.count * dtype.itemsize:
            raise FrameError(f"{self.who} sent {buffer.nbytes} bytes of {take.name}")
        return torch.frombuffer(writable(buffer), dtype=torch.uint8).view(dtype).view(take.box.size)

    def release(self, fetched: Fetched) -> Future[Parcel] | None:
        """Say that the block was read."""
        if not self.here:
            return None
        return self.ask(Release(self._channel, self._reader, fetched.block))

    def describe(self, packing: Packing | None) -> None:
        """Set where tensors are in the publisher's memory; None when that is not known any more."""
        self.packing = packing
        self._mapped.clear()


class Receiver:
    """One process as a receiver of one channel. Not thread-safe."""

    def __init__(self, channel: str, turn: int, now: Callable[[], float] = time.monotonic) -> None:
        """`turn`: receivers with different numbers prefer different publishers among those with the same data."""
        self._channel, self._turn, self._now = channel, turn, now
        self._plan: tuple[object, Mapping[int, tuple[Take, ...]]] | None = None

    def receive(
        self,
        sources: Sequence[Source],
        tensors: Mapping[str, torch.Tensor],
        at_least: int,
        deadline: float,
        assign: Callable[[str, torch.Tensor], None] | None = None,
        eta: float = 1.0,
    ) -> int:
        """Copy the latest version that all `sources` have, and which is not before `at_least`, into `tensors`.

        With `assign`, which is called with a name and a tensor, those that are whole in memory of this host are not
        copied but assigned. With `eta` below 1, `tensors` become a moving average. Returns the version.

        Raises `PeerLost`, `WeightsError` when the tensors do not fit, `WeightsTimeout`.
        """
        mine = layout_of(tensors)
        while True:
            fresh = self._describe(sources, deadline)
            try:
                takes = self._planned(sources, mine)
            except WeightsError:
                if fresh:
                    raise
                # Others may have been published since.
                for source in sources:
                    source.describe(None)
                continue
            found = self._fetch(sources, takes, at_least, deadline, keep=assign is not None)
            if found is None:
                continue
            version = max(fetched.version for fetched, _ in found.values())
            if any(fetched.version != version for fetched, _ in found.values()):
                self._release(sources, found, deadline)
                at_least = version
                continue
            into, from_ = [], []
            assigned: list[tuple[str, torch.Tensor]] = []
            for number, (fetched, parcel) in found.items():
                source = sources[number]
                views = source.tensors(fetched, parcel, takes[number], keep=assign is not None)
                for take, view in zip(takes[number], views, strict=True):
                    target = tensors[take.name]
                    whole = target.is_cpu and take.box == mine[take.name].tensor.whole
                    if assign is not None and source.here and whole and not is_dtensor(target):
                        assigned.append((take.name, view))
                    else:
                        into.append(part_of(local(target), mine[take.name], take.box))
                        from_.append(view)
            if eta < 1.0:
                # It cannot be undone, so it begins when it is sure that no tensor is torn.
                copies = [view.clone() for view in from_]
                if self._release(sources, found, deadline):
                    blend(into, copies, eta)
                    return version
                continue
            copy_all(into, from_)
            if assign is not None:
                for name, view in assigned:
                    assign(name, view)
                return version
            if self._release(sources, found, deadline):
                return version

    def latest(self, sources: Sequence[Source], deadline: float) -> int:
        """The number of the latest version that one of `sources` has."""
        patience = self._left(deadline)
        asked = [(source, source.peek(patience)) for source in sources]
        found = []
        for source, future in asked:
            said = self._said(source, future, Fetched, deadline)[0]
            assert isinstance(said, Fetched)
            found.append(said.version)
        return max(found)

    def _describe(self, sources: Sequence[Source], deadline: float) -> bool:
        """Learn the layouts that are not known yet. Returns whether these are all."""
        new = {n: s for n, s in enumerate(sources) if s.packing is None}
        asked = {n: s.ask(Describe(self._channel, self._left(deadline))) for n, s in new.items()}
        for n, future in asked.items():
            said = self._said(sources[n], future, Described, deadline)[0]
            assert isinstance(said, Described)
            sources[n].describe(Packing(shared(said.layout), said.number, said.offsets))
        return len(new) == len(sources)

    def _planned(self, sources: Sequence[Source], mine: Layout) -> Mapping[int, tuple[Take, ...]]:
        known = [(source.who, source.packing) for source in sources if source.packing is not None]
        key = ([(who, packing.number) for who, packing in known], mine)
        if self._plan is None or self._plan[0] != key:
            layouts = [packing.layout for _, packing in known]
            near = [n for n, source in enumerate(sources) if source.here]
            self._plan = key, by_source(plan(layouts, mine, near, self._turn))
        return self._plan[1]

    def _fetch(
        self,
        sources: Sequence[Source],
        takes: Mapping[int, tuple[Take, ...]],
        at_least: int,
        deadline: float,
        *,
        keep: bool,
    ) -> dict[int, tuple[Fetched, Parcel]] | None:
        """Ask all publishers that have something. None when one of them has to be asked in another way."""
        patience = self._left(deadline)
        asked = {n: sources[n].fetch(at_least, some, patience, keep=keep) for n, some in takes.items()}
        found: dict[int, tuple[Fetched, Parcel]] = {}
        for n, future in asked.items():
            said, parcel = self._said(sources[n], future, Fetched, deadline)
            assert isinstance(said, Fetched)
            packing = sources[n].packing
            if packing is None or said.layout != packing.number:
                sources[n].describe(None)
            elif sources[n].here and not said.block:
                sources[n].here = False
            else:
                found[n] = said, parcel
        if len(found) < len(asked):
            self._release(sources, found, deadline)
            return None
        return found

    def _release(
        self, sources: Sequence[Source], found: Mapping[int, tuple[Fetched, Parcel]], deadline: float
    ) -> bool:
        """Give the blocks back. Returns whether all were this reader's until now."""
        held = True
        asked = {n: sources[n].release(fetched) for n, (fetched, _) in found.items()}
        for n, future in asked.items():
            if future is not None:
                said = self._said(sources[n], future, Released, deadline)[0]
                assert isinstance(said, Released)
                held = held and said.held
        return held

    def _said(
        self, source: Source, future: Future[Parcel], wanted: type[Answer], deadline: float
    ) -> tuple[Answer, Parcel]:
        """Wait for an answer. Raises `PeerLost`, `WeightsTimeout`, `FrameError`."""
        try:
            parcel = future.result(self._left(deadline))
        except FutureTimeout:
            raise self._late(source) from None
        said = answer_of(parcel.head)
        if not isinstance(said, wanted):
            raise FrameError(
                f"{source.who} answered {type(said).__name__} where {wanted.__name__} was expected"
            )
        return said, parcel

    def _late(self, source: Source) -> WeightsTimeout:
        return WeightsTimeout(
            f"{source.who} has published nothing new enough in channel {self._channel!r} in time",
            "publish more often, wait longer, or accept an older version",
            channel=self._channel,
        )

    def _left(self, deadline: float) -> float:
        return max(deadline - self._now(), 0.0)
