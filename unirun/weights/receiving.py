"""The receiving end: asks the publishers, and copies what is the receiver's once all of a version is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial

import torch

from unirun.errors import FrameError, PeerLost, WeightsError, WeightsTimeout
from unirun.roles.transport.protocol import Parcel
from unirun.values import Value
from unirun.weights.copies import Copy, Sent
from unirun.weights.holding import Holder
from unirun.weights.layout import Layout, shared
from unirun.weights.messages import (
    Answer,
    Describe,
    Described,
    Fetched,
    Released,
    answer_of,
)
from unirun.weights.packing import Packing, blend, copy_all
from unirun.weights.plan import Take, by_source, plan
from unirun.weights.sources import Source
from unirun.weights.tensors import is_dtensor, layout_of, local, part_of

GIVEN_WITHIN = 5.0
"""Seconds in which another receiver of this host gives what it has got. It may be gone, or hang."""


class _Target(Value):
    """What is to be filled: `tensors`, of which this rank has `layout`.

    With `assign`, which is called with a name and a tensor, those that are whole in memory of this host are not copied
    but assigned. With `eta` below 1, they become a moving average.
    """

    tensors: Mapping[str, torch.Tensor]
    layout: Layout
    assign: Callable[[str, torch.Tensor], None] | None
    eta: float


class _Got(Value):
    """The answer of `source` to some takes, and views of what it has sent or lent."""

    source: Source
    takes: Sequence[Take]
    fetched: Fetched
    copy: Copy
    views: Sequence[torch.Tensor]


def _leases(found: Sequence[_Got]) -> list[tuple[Source, int]]:
    """The blocks that are lent to this process."""
    return [(got.source, got.fetched.block) for got in found if got.source.here]


class Receiver:
    """One process as a receiver of one channel. Not thread-safe."""

    def __init__(
        self,
        channel: str,
        turn: int,
        holder: Holder,
        other: Callable[[str], Source | None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`turn`: receivers with different numbers prefer different publishers among those with the same data. `holder`
        holds what is received. `other` is the receiver on this host that publishers call so, if it can be reached."""
        self._channel, self._turn, self._now = channel, turn, now
        self._holder, self._other = holder, other
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
        """Copy the latest version that all publishers `sources` have, and which is not before `at_least`, into
        `tensors`, or `assign` it. Returns the version.

        Raises `PeerLost`, `WeightsError` when the tensors do not fit, `WeightsTimeout`.
        """
        target = _Target(tensors, layout_of(tensors), assign, eta)
        while True:
            fresh = self._describe(sources, deadline)
            try:
                takes = self._planned(sources, target.layout)
            except WeightsError:
                if fresh:
                    raise
                # Others may have been published since.
                for source in sources:
                    source.describe(None)
                continue
            at_least, done = self._take(sources, takes, at_least, deadline, target)
            if done:
                return at_least

    def receive_held(
        self,
        holders: Sequence[Source],
        tensors: Mapping[str, torch.Tensor],
        at_least: int,
        deadline: float,
        assign: Callable[[str, torch.Tensor], None] | None = None,
        eta: float = 1.0,
    ) -> int | None:
        """As `receive`, with the latest version of which some of `holders` have all parts. None: there is none."""
        target = _Target(tensors, layout_of(tensors), assign, eta)
        having: dict[int, list[Source]] = {}
        for source, version in self._versions(holders, deadline).items():
            if version >= at_least:
                having.setdefault(version, []).append(source)
        for version in sorted(having, reverse=True):
            some = having[version]
            for source in some:
                source.describe(None)
            try:
                self._describe(some, deadline)
                takes = self._planned(some, target.layout)
                taken, done = self._take(some, takes, version, deadline, target)
            except (PeerLost, WeightsError):
                continue
            if done:
                return taken
        return None

    def _versions(self, sources: Sequence[Source], deadline: float) -> dict[Source, int]:
        """The versions that these processes have now; those that have none, or have ended, are left out."""
        found = {}
        for source in sources:
            try:
                said = self._said(source, source.peek(None), Fetched, deadline)[0]
            except PeerLost:
                continue
            assert isinstance(said, Fetched)
            if said.layout:
                found[source] = said.version
        return found

    def all_have(self, sources: Sequence[Source], deadline: float) -> bool:
        """Whether each of `sources` has some version now."""
        new = [source for source in sources if source.packing is None]
        return len(self._versions(new, deadline)) == len(new)

    def _take(
        self,
        sources: Sequence[Source],
        takes: Mapping[int, tuple[Take, ...]],
        at_least: int,
        deadline: float,
        target: _Target,
    ) -> tuple[int, bool]:
        """Fetch and copy. Returns the version, or the one to ask for next, and whether that was done."""
        keep = target.assign is not None
        found = self._fetch(sources, takes, at_least, deadline, target)
        if not found:
            return at_least, False
        version = max(got.fetched.version for got in found)
        if any(got.fetched.version != version for got in found):
            self._holder.give_back(_leases(found))
            return version, False
        into: list[torch.Tensor] = []
        from_: list[torch.Tensor] = []
        assigned: list[tuple[str, torch.Tensor]] = []
        for got in found:
            for take, view in zip(got.takes, got.views, strict=True):
                tensor = target.tensors[take.name]
                whole = tensor.is_cpu and take.box == target.layout[take.name].tensor.whole
                if keep and got.source.here and whole and not is_dtensor(tensor):
                    assigned.append((take.name, view))
                else:
                    into.append(part_of(local(tensor), target.layout[take.name], take.box))
                    from_.append(view)
        if target.eta < 1.0:
            # It cannot be undone, so it begins when it is sure that no tensor is torn.
            from_ = [view.clone() for view in from_]
        else:
            copy_all(into, from_)
        if not keep and not self._unchanged(found, deadline):
            return at_least, False
        if target.eta < 1.0:
            blend(into, from_, target.eta)
        if target.assign is not None:
            for name, view in assigned:
                target.assign(name, view)
        leases = [(source, None if keep else block) for source, block in _leases(found)]
        for source, released in self._holder.hold(version, [got.copy for got in found], leases):
            with suppress(PeerLost):
                self._said(source, released, Released, deadline)
        return version, True

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
        target: _Target,
    ) -> list[_Got]:
        """Ask all publishers that have something. Empty when one of them has to be asked in another way."""
        patience, keep = self._left(deadline), target.assign is not None
        asked = {n: sources[n].fetch(at_least, some, patience, keep=keep) for n, some in takes.items()}
        found: list[_Got] = []
        later: list[tuple[Source, Fetched, str, Sequence[Take]]] = []
        try:
            for n, future in asked.items():
                source = sources[n]
                said, parcel = self._said(source, future, Fetched, deadline)
                assert isinstance(said, Fetched)
                if source.packing is None or said.layout != source.packing.number:
                    source.describe(None)
                elif source.here and not said.block:
                    source.here = False
                elif source.here:
                    mapped = source.mapped(said, parcel, keep=keep)
                    found.append(_Got(source, takes[n], said, mapped, mapped.views(takes[n])))
                else:
                    away = {place for places in said.elsewhere.values() for place in places}
                    found.append(
                        self._sent(
                            source, [t for i, t in enumerate(takes[n]) if i not in away], said, parcel, target
                        )
                    )
                    later += [
                        (source, said, who, [takes[n][i] for i in places])
                        for who, places in said.elsewhere.items()
                    ]
            self._holder.got([(got.fetched.version, got.copy) for got in found if isinstance(got.copy, Sent)])
            if len(found) == len(asked):
                return found + self._from_others(later, deadline, target)
        except BaseException:
            self._abandon(asked, sources)
            raise
        self._abandon(asked, sources)
        return []

    def _from_others(
        self, later: Sequence[tuple[Source, Fetched, str, Sequence[Take]]], deadline: float, target: _Target
    ) -> list[_Got]:
        """What other receivers of this host have got; from the publisher if they do not give it soon."""
        soon = min(deadline, self._now() + GIVEN_WITHIN)
        asked: list[tuple[Source | None, Future[Parcel] | None]] = []
        for _, fetched, reader, takes in later:
            other = self._other(reader)
            future = None
            if other is not None:
                with suppress(PeerLost):
                    future = other.fetch_parts(fetched.version, takes, self._left(soon))
            asked.append((other, future))
        found = []
        for (source, fetched, _, takes), (other, future) in zip(later, asked, strict=True):
            if other is not None and future is not None:
                with suppress(PeerLost, WeightsTimeout):
                    said, parcel = self._said(other, future, Fetched, soon)
                    assert isinstance(said, Fetched)
                    found.append(self._sent(other, takes, said, parcel, target))
                    continue
            assert source.packing is not None
            future = source.fetch_parts(fetched.version, takes, self._left(deadline), source.packing.number)
            said, parcel = self._said(source, future, Fetched, deadline)
            assert isinstance(said, Fetched)
            if said.layout != source.packing.number:
                source.describe(None)
                return []
            found.append(self._sent(source, takes, said, parcel, target))
        return found

    def _sent(
        self, source: Source, takes: Sequence[Take], fetched: Fetched, parcel: Parcel, target: _Target
    ) -> _Got:
        views = source.sent(parcel, takes, target.layout)
        return _Got(source, takes, fetched, Sent(target.layout, takes, views), views)

    def _abandon(self, asked: Mapping[int, Future[Parcel]], sources: Sequence[Source]) -> None:
        """Give the blocks back that were lent, or will be, and are not read."""
        for n, future in asked.items():
            future.add_done_callback(partial(self._unread, sources[n]))

    def _unread(self, source: Source, future: Future[Parcel]) -> None:
        if future.exception() is None and source.here:
            with suppress(FrameError):
                said = answer_of(future.result().head)
                if isinstance(said, Fetched) and said.block:
                    self._holder.give_back([(source, said.block)])

    def _unchanged(self, found: Sequence[_Got], deadline: float) -> bool:
        """Whether nobody has written to what was read."""
        held = True
        asked = [(got.source, got.source.was_read(got.fetched)) for got in found]
        for source, future in asked:
            if future is not None:
                said = self._said(source, future, Released, deadline)[0]
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
