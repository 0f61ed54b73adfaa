"""The receiving end: a version is asked of all publishers at once, and copied once all of it is there."""

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
from unirun.weights.hub import Holder
from unirun.weights.layout import Layout, ReadItem, by_source, plan, shared
from unirun.weights.memory import untied, writing
from unirun.weights.messages import Answer, Describe, Described, Fetched, Released, answer_of
from unirun.weights.packing import DeviceError, DeviceInterface, Packing, blend, copy_all
from unirun.weights.publishing import Finder, device_of
from unirun.weights.sources import Copy, Mapped, RemoteSource, Sent
from unirun.weights.tensors import Piecewise, dtype_of, is_dtensor, layout_of, local, part_of
from unirun.wire.reporting import report

# `Fetcher`: one version, asked of several processes at once.

NEIGHBOR_ANSWER_TIMEOUT = 5.0
"""Seconds in which another receiver of this host gives what it has got. It may be gone, or hang."""


class FetchResult(Value):
    """The answer of `source` to some takes, and views of what it has sent or lent. `origin` is the publisher, `link`
    the backend through which it came, if any."""

    origin: RemoteSource
    source: RemoteSource
    takes: Sequence[ReadItem]
    fetched: Fetched
    copy: Copy
    views: Sequence[torch.Tensor]
    link: str = ""

    @property
    def path(self) -> str:
        """The path by which it came."""
        if self.source.here:
            return "device memory" if self.fetched.handle else "shared memory"
        if self.link:
            return self.link
        if self.source is not self.origin:
            return "neighbour"
        return "another receiver" if self.source.holder else "socket"


def leases(found: Sequence[FetchResult]) -> list[tuple[RemoteSource, int]]:
    """The blocks that are lent to this process."""
    return [(got.source, got.fetched.block) for got in found if got.source.here]


def give_up(found: Sequence[FetchResult]) -> None:
    """Give memory of devices back that was borrowed."""
    for got in found:
        if isinstance(got.copy, Mapped):
            got.copy.end()


def lasts(got: FetchResult) -> bool:
    """Return True if it can be held for others: it is in memory of the host.

    That of a device is needed for other things.
    """
    return not got.fetched.handle and all(view.is_cpu for view in got.views)


class Fetcher:
    """The requests of one receiver of one channel. Not thread-safe."""

    def __init__(
        self,
        channel: str,
        holder: Holder,
        other: Callable[[str], RemoteSource | None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`holder` is told what publishers have sent. `other` is the receiver on this host that publishers call so, if
        it can be reached."""
        self._channel, self._now = channel, now
        self._holder, self._other = holder, other

    def fetch(
        self,
        sources: Sequence[RemoteSource],
        takes: Mapping[int, tuple[ReadItem, ...]],
        at_least: int,
        deadline: float,
        wanted: Layout,
        place: torch.device,
        *,
        keep: bool,
    ) -> list[FetchResult]:
        """Ask all publishers that have something. Empty when one of them has to be asked in another way.

        What comes through a process group for devices comes to `place`.
        """
        patience = self.left(deadline)
        asked: dict[int, Future[Parcel]] = {}
        found: list[FetchResult] = []
        later: list[tuple[RemoteSource, Fetched, str, Sequence[ReadItem]]] = []
        try:
            for n, some in takes.items():
                asked[n] = sources[n].fetch(at_least, some, patience, keep=keep)
            for n, future in asked.items():
                source = sources[n]
                said, parcel = self.said(source, future, Fetched, deadline)
                assert isinstance(said, Fetched)
                if source.packing is None or said.layout != source.packing.number:
                    source.describe(None)
                elif source.here and not said.block:
                    source.here = False
                elif source.here:
                    try:
                        mapped = source.mapped(said, parcel, keep=keep)
                    except DeviceError as error:
                        report(f"unirun: {error}: weights of {source.who} go through the memory of the host")
                        continue
                    found.append(FetchResult(source, source, takes[n], said, mapped, mapped.views(takes[n])))
                else:
                    away = {place for places in said.elsewhere.values() for place in places}
                    sent = [take for place, take in enumerate(takes[n]) if place not in away]
                    if source.link:
                        views = source.linked(sent, wanted, deadline, place)
                        copy = Sent(wanted, sent, views)
                        found.append(FetchResult(source, source, sent, said, copy, views, source.link))
                    else:
                        found.append(self._sent(source, source, sent, said, parcel, wanted))
                    later += [
                        (source, said, who, [takes[n][i] for i in places])
                        for who, places in said.elsewhere.items()
                    ]
            self._holder.got(
                [
                    (got.fetched.version, got.copy)
                    for got in found
                    if isinstance(got.copy, Sent) and lasts(got)
                ]
            )
            rest = self._from_others(later, deadline, wanted)
            if rest is not None and {got.origin for got in found} == {sources[n] for n in asked}:
                return found + rest
        except BaseException:
            give_up(found)
            self._abandon(asked, sources)
            for n in asked:
                # More may be on the way.
                sources[n].unlink()
            raise
        give_up(found)
        self._abandon(asked, sources)
        return []

    def _from_others(
        self,
        later: Sequence[tuple[RemoteSource, Fetched, str, Sequence[ReadItem]]],
        deadline: float,
        wanted: Layout,
    ) -> list[FetchResult] | None:
        """Take over the tensors that other receivers of this host have got; from the publisher if they do not
        give it soon. None: it has other tensors now."""
        soon = min(deadline, self._now() + NEIGHBOR_ANSWER_TIMEOUT)
        asked: list[tuple[RemoteSource | None, Future[Parcel] | None]] = []
        for _, fetched, reader, takes in later:
            other = self._other(reader)
            future = None
            if other is not None:
                with suppress(PeerLost):
                    future = other.fetch_parts(fetched.version, takes, self.left(soon))
            asked.append((other, future))
        found = []
        for (source, fetched, _, takes), (other, future) in zip(later, asked, strict=True):
            if other is not None and future is not None:
                with suppress(PeerLost, WeightsTimeout):
                    said, parcel = self.said(other, future, Fetched, soon)
                    assert isinstance(said, Fetched)
                    found.append(self._sent(source, other, takes, said, parcel, wanted))
                    continue
            assert source.packing is not None
            future = source.fetch_parts(fetched.version, takes, self.left(deadline), source.packing.number)
            said, parcel = self.said(source, future, Fetched, deadline)
            assert isinstance(said, Fetched)
            if said.layout != source.packing.number:
                source.describe(None)
                return None
            found.append(self._sent(source, source, takes, said, parcel, wanted))
        return found

    def _sent(
        self,
        origin: RemoteSource,
        source: RemoteSource,
        takes: Sequence[ReadItem],
        fetched: Fetched,
        parcel: Parcel,
        wanted: Layout,
    ) -> FetchResult:
        views = source.sent(parcel, takes, wanted)
        return FetchResult(origin, source, takes, fetched, Sent(wanted, takes, views), views)

    def _abandon(self, asked: Mapping[int, Future[Parcel]], sources: Sequence[RemoteSource]) -> None:
        """Give the blocks back that were lent, or will be, and are not read."""
        for n, future in asked.items():
            future.add_done_callback(partial(self._unread, sources[n]))

    def _unread(self, source: RemoteSource, future: Future[Parcel]) -> None:
        if future.exception() is None and source.here:
            with suppress(FrameError):
                said = answer_of(future.result().head)
                if isinstance(said, Fetched) and said.block:
                    self._holder.give_back([(source, said.block)])

    def unchanged(self, found: Sequence[FetchResult], deadline: float) -> bool:
        """Return True if no process has written to the memory that was read."""
        held = True
        asked = [(got.source, got.source.was_read(got.fetched)) for got in found]
        for source, future in asked:
            if future is not None:
                said = self.said(source, future, Released, deadline)[0]
                assert isinstance(said, Released)
                held = held and said.held
        return held

    def said(
        self, source: RemoteSource, future: Future[Parcel], wanted: type[Answer], deadline: float
    ) -> tuple[Answer, Parcel]:
        """Wait for an answer. Raises `PeerLost`, `WeightsTimeout`, `FrameError`."""
        try:
            parcel = future.result(self.left(deadline))
        except FutureTimeout:
            raise self._late(source) from None
        said = answer_of(parcel.head)
        if not isinstance(said, wanted):
            raise FrameError(
                f"{source.who} answered {type(said).__name__} where {wanted.__name__} was expected"
            )
        return said, parcel

    def _late(self, source: RemoteSource) -> WeightsTimeout:
        return WeightsTimeout(
            f"{source.who} has published nothing new enough in channel {self._channel!r} in time",
            "publish more often, wait longer, or accept an older version",
            channel=self._channel,
        )

    def left(self, deadline: float) -> float:
        """Seconds until then."""
        return max(deadline - self._now(), 0.0)


class _Target(Value):
    """The target of a transfer: `tensors`, of which this rank has `layout`.

    With `assign`, which is called with a name and a tensor, those that are whole in memory of this host are not copied
    but assigned. With `eta` below 1, they become a moving average.
    """

    tensors: Mapping[str, Piecewise]
    layout: Layout
    assign: Callable[[str, torch.Tensor], None] | None
    eta: float


class Receiver:
    """One process as a receiver of one channel. Not thread-safe."""

    def __init__(
        self, channel: str, turn: int, holder: Holder, fetching: Fetcher, device: Finder = device_of
    ) -> None:
        """`turn`: receivers with different numbers prefer different publishers among those with the same data.
        `holder` holds what is received."""
        self._device = device
        self._channel, self._turn = channel, turn
        self._holder, self._fetching = holder, fetching
        self.last: Sequence[FetchResult] = ()
        """The path by which the last version came."""
        self._plan: tuple[object, Mapping[int, tuple[ReadItem, ...]]] | None = None

    def receive(
        self,
        sources: Sequence[RemoteSource],
        tensors: Mapping[str, Piecewise],
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
        holders: Sequence[RemoteSource],
        tensors: Mapping[str, Piecewise],
        at_least: int,
        deadline: float,
        assign: Callable[[str, torch.Tensor], None] | None = None,
        eta: float = 1.0,
    ) -> int | None:
        """As `receive`, with the latest version of which some of `holders` have all parts. None: there is none."""
        target = _Target(tensors, layout_of(tensors), assign, eta)
        having: dict[int, list[RemoteSource]] = {}
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

    def _versions(self, sources: Sequence[RemoteSource], deadline: float) -> dict[RemoteSource, int]:
        """The versions that these processes have now; those that have none, or have ended, are left out."""
        found = {}
        for source in sources:
            try:
                said = self._fetching.said(source, source.peek(None), Fetched, deadline)[0]
            except PeerLost:
                continue
            assert isinstance(said, Fetched)
            if said.layout:
                found[source] = said.version
        return found

    def all_have(self, sources: Sequence[RemoteSource], deadline: float) -> bool:
        """Return True if each of `sources` has some version now."""
        new = [source for source in sources if source.packing is None]
        return len(self._versions(new, deadline)) == len(new)

    def _take(
        self,
        sources: Sequence[RemoteSource],
        takes: Mapping[int, tuple[ReadItem, ...]],
        at_least: int,
        deadline: float,
        target: _Target,
    ) -> tuple[int, bool]:
        """Fetch and copy. Returns the version, or the one to ask for next, and whether that was done."""
        keep = target.assign is not None
        device = self._device(target.tensors)
        for source in sources:
            source.use(device)
        first = next(iter(target.tensors.values()), None)
        place = local(first).device if first is not None else torch.device("cpu")
        found = self._fetching.fetch(sources, takes, at_least, deadline, target.layout, place, keep=keep)
        if not found:
            return at_least, False
        try:
            return self._copied(found, at_least, deadline, target, device)
        finally:
            give_up(found)

    def _copied(
        self,
        found: Sequence[FetchResult],
        at_least: int,
        deadline: float,
        target: _Target,
        device: DeviceInterface | None,
    ) -> tuple[int, bool]:
        """As `_take`, of what was fetched."""
        keep = target.assign is not None
        version = max(got.fetched.version for got in found)
        if any(got.fetched.version != version for got in found):
            self._holder.give_back(leases(found))
            return version, False
        into: list[torch.Tensor] = []
        from_: list[torch.Tensor] = []
        names: list[str] = []
        assigned: list[tuple[str, torch.Tensor]] = []
        for got in found:
            for take, view in zip(got.takes, got.views, strict=True):
                tensor = target.tensors[take.name]
                whole = isinstance(tensor, torch.Tensor) and not is_dtensor(tensor) and tensor.is_cpu
                if keep and got.source.here and whole and take.box == target.layout[take.name].tensor.whole:
                    assigned.append((take.name, view))
                else:
                    names.append(take.name)
                    into.append(part_of(local(tensor), target.layout[take.name], take.box))
                    from_.append(view)
        whole_ones = [(name, local(target.tensors[name]), view) for name, view in assigned]
        tied = untied([*zip(names, into, from_, strict=True), *whole_ones])
        if tied:
            # Tensors that the receiver keeps are lent until they are freed: the publisher does not write to them.
            unchanged = keep or self._fetching.unchanged(found, deadline)
            self._holder.give_back(leases(found))
            if not unchanged:
                return at_least, False
            raise WeightsError("the weights do not fit the receiver", faults=tied)
        if target.eta < 1.0:
            # It cannot be undone, so it begins when it is sure that no tensor is torn.
            from_ = [view.clone() for view in from_]
        elif device is not None:
            with writing(into):
                device.copy(into, from_)
        else:
            copy_all(into, from_)
        if device is not None:
            device.finish()
            give_up(found)
        if not keep and not self._fetching.unchanged(found, deadline):
            # Of several publishers, some may have lent theirs.
            self._holder.give_back(leases(found))
            return at_least, False
        if target.eta < 1.0:
            blend(into, from_, target.eta)
        if target.assign is not None:
            for name, view in assigned:
                target.assign(name, view)
        self.last = found
        lasting = [got for got in found if lasts(got)]
        lent = [(source, None if keep else block) for source, block in leases(lasting)]
        answers = self._holder.hold(version, [got.copy for got in lasting], lent)
        answers += self._holder.give_back(leases([got for got in found if not lasts(got)]))
        for source, released in answers:
            with suppress(PeerLost):
                self._fetching.said(source, released, Released, deadline)
        return version, True

    def latest(self, sources: Sequence[RemoteSource], deadline: float) -> int:
        """The number of the latest version that one of `sources` has."""
        patience = self._fetching.left(deadline)
        asked = [(source, source.peek(patience)) for source in sources]
        found = []
        for source, future in asked:
            said = self._fetching.said(source, future, Fetched, deadline)[0]
            assert isinstance(said, Fetched)
            found.append(said.version)
        return max(found)

    def described(self, sources: Sequence[RemoteSource], deadline: float) -> dict[str, torch.Tensor]:
        """The tensors of which all `sources` together have the parts, on the meta device. Raises `PeerLost`,
        `WeightsTimeout`."""
        self._describe(sources, deadline)
        found: dict[str, torch.Tensor] = {}
        for source in sources:
            assert source.packing is not None
            for name, part in source.packing.layout.items():
                if name not in found:
                    about = part.tensor
                    found[name] = torch.empty(about.shape, dtype=dtype_of(about.dtype), device="meta")
        return found

    def _describe(self, sources: Sequence[RemoteSource], deadline: float) -> bool:
        """Learn the layouts that are not known yet. Returns whether these are all."""
        new = {n: s for n, s in enumerate(sources) if s.packing is None}
        asked = {n: s.ask(Describe(self._channel, self._fetching.left(deadline))) for n, s in new.items()}
        for n, future in asked.items():
            said = self._fetching.said(sources[n], future, Described, deadline)[0]
            assert isinstance(said, Described)
            packing = Packing(shared(said.layout), said.number, said.offsets)
            sources[n].describe(packing, on_device=said.device)
        return len(new) == len(sources)

    def _planned(self, sources: Sequence[RemoteSource], mine: Layout) -> Mapping[int, tuple[ReadItem, ...]]:
        known = [(source.who, source.packing) for source in sources if source.packing is not None]
        key = ([(who, packing.number) for who, packing in known], mine)
        if self._plan is None or self._plan[0] != key:
            layouts = [packing.layout for _, packing in known]
            near = [n for n, source in enumerate(sources) if source.here]
            # A rank whose parts are empty takes nothing, and waits for the version of the first publisher.
            self._plan = key, by_source(plan(layouts, mine, near, self._turn)) or {0: ()}
        return self._plan[1]
