"""The receiving end: a version is asked of all publishers at once, and copied once all of it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from unirun.errors import FrameError, PeerLost, WeightsError, WeightsTimeout
from unirun.roles.transport.protocol import Parcel
from unirun.values import Value
from unirun.weights.devices import DeviceError, DeviceInterface
from unirun.weights.hub import Holder
from unirun.weights.messages import Describe, Described, Fetched, Origin, Released
from unirun.weights.publishing import Packing, blend, copy_all, device_of
from unirun.weights.sources import Copy, Mapped, RemoteSource, Sent, VersionFile, answer_of, opened
from unirun.weights.tensors import (
    Layout,
    NamedBox,
    Piecewise,
    dtype_of,
    is_dtensor,
    layout_of,
    local,
    part_of,
    plan,
    shared,
    untied,
    writing,
)
from unirun.wire.reporting import report

NEIGHBOR_ANSWER_TIMEOUT = 5.0
"""Seconds in which another receiver of this host gives what it has got. It may be gone, or hang."""

AnswerT = TypeVar("AnswerT", Described, Fetched, Released)


class FetchResult(Value, gc=True):
    """The answer of `source` to some takes, and views of what it has sent or lent. `origin` is the publisher, `link`
    the backend through which it came, if any."""

    origin: RemoteSource
    source: RemoteSource
    takes: Sequence[NamedBox]
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

    @property
    def lasts(self) -> bool:
        """True if it can be held for others: it is in memory of the host. That of a device is needed for other
        things."""
        return not self.fetched.handle and all(view.is_cpu for view in self.views)


def leases(found: Sequence[FetchResult]) -> list[tuple[RemoteSource, int]]:
    """The blocks that are lent to this process."""
    return [(got.source, got.fetched.block) for got in found if got.source.here]


def give_up(found: Sequence[FetchResult]) -> None:
    """Give memory of devices back that was borrowed."""
    for got in found:
        if isinstance(got.copy, Mapped):
            got.copy.end()


class Target(Value, gc=True):
    """The target of a transfer: `tensors`, of which this rank has `layout`, on `device` if all are on one.

    With `assign`, which is called with a name and a tensor, those that are whole in memory of this host are not copied
    but assigned. With `eta` below 1, they become a moving average.
    """

    tensors: Mapping[str, Piecewise]
    layout: Layout
    device: DeviceInterface | None
    deadline: float
    assign: Callable[[str, torch.Tensor], None] | None
    eta: float

    @property
    def keeps(self) -> bool:
        """True if memory that is lent is kept until the tensors over it are freed."""
        return self.assign is not None

    @property
    def place(self) -> torch.device:
        """The place to which tensors come through a process group for devices."""
        first = next(iter(self.tensors.values()), None)
        return local(first).device if first is not None else torch.device("cpu")

    def is_assigned(self, source: RemoteSource, take: NamedBox) -> bool:
        """Return True if the tensor is whole in memory of this host, and is not copied."""
        tensor = self.tensors[take.name]
        whole = isinstance(tensor, torch.Tensor) and not is_dtensor(tensor) and tensor.is_cpu
        return self.keeps and source.here and whole and take.box == self.layout[take.name].tensor.whole


class Receiver:
    """One process as a receiver of one channel. Not thread-safe."""

    def __init__(
        self,
        channel: str,
        turn: int,
        holder: Holder,
        other: Callable[[str], RemoteSource | None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`turn`: receivers with different numbers prefer different publishers among those with the same data.
        `holder` holds what is received. `other` is the receiver on this host that publishers call so, if it can be
        reached."""
        self._channel, self._turn, self._device, self._now = channel, turn, device_of, now
        self._holder, self._other = holder, other
        self.last: Sequence[FetchResult] = ()
        """The path by which the last version came."""
        self._plan: tuple[object, Mapping[int, tuple[NamedBox, ...]]] | None = None

    def target(
        self,
        tensors: Mapping[str, Piecewise],
        deadline: float,
        assign: Callable[[str, torch.Tensor], None] | None = None,
        eta: float = 1.0,
    ) -> Target:
        """A target for `receive`. Raises `WeightsError`."""
        return Target(tensors, layout_of(tensors), self._device(tensors), deadline, assign, eta)

    def receive(self, sources: Sequence[RemoteSource], target: Target, at_least: int) -> int:
        """Copy the latest version that all publishers `sources` have, and which is not before `at_least`. Returns the
        version.

        Raises `PeerLost`, `WeightsError` when the tensors do not fit, `WeightsTimeout`.
        """
        wanted = at_least
        while True:
            fresh = self._describe(sources, target.deadline)
            if fresh:
                # Those that had later versions may have withdrawn them.
                wanted = at_least
            try:
                takes = self._planned(sources, target.layout)
            except WeightsError:
                if fresh:
                    raise
                # Others may have been published since.
                for source in sources:
                    source.describe(None)
                continue
            origins = [source.origin for source in sources]
            wanted, done = self._take(sources, takes, wanted, target, origins)
            if done:
                return wanted

    def borrow(
        self, sources: Sequence[RemoteSource], at_least: int, deadline: float
    ) -> tuple[int, VersionFile] | None:
        """The latest version that all publishers `sources` have, and which is not before `at_least`, in the memory of
        one of them. That does not write to it as long as the file is there.

        None when it has to be received: none on this host has all tensors whole. Raises `PeerLost`, `WeightsTimeout`.
        """
        self._describe(sources, deadline)
        lender = self._lender(sources)
        if lender is None or lender.packing is None:
            return None
        lender.use(None)
        takes = self._planned([lender], lender.packing.layout)[0]
        asked = lender.fetch(at_least, takes, self._left(deadline), keep=True)
        said, parcel = self._said(lender, asked, Fetched, deadline)
        if said.layout != lender.packing.number:
            lender.describe(None)
            return None
        for other in (source for source in sources if source is not lender):
            number = other.packing.number if other.packing is not None else 0
            asked = other.fetch_parts(said.version, (), self._left(deadline), number)
            if self._said(other, asked, Fetched, deadline)[0].layout != number:
                other.describe(None)
                return None
        if not said.path:
            return None
        mapped = lender.mapped(said, parcel, keep=True)
        file = opened(said.path, said.token, mapped, partial(self._holder.is_intact, lender))
        if file is None:
            return None
        self.last = [FetchResult(lender, lender, takes, said, mapped, mapped.views(takes))]
        self._hold(said.version, self.last, deadline, [source.origin for source in sources], keeps=True)
        return said.version, file

    def _lender(self, sources: Sequence[RemoteSource]) -> RemoteSource | None:
        """The first publisher on this host that has all tensors whole, in a file."""
        names = {name for source in sources if source.packing is not None for name in source.packing.layout}
        for source in sources:
            packing = source.packing
            if source.here and packing is not None and packing.is_file and packing.layout.keys() == names:
                return source
        return None

    def receive_held(self, holders: Sequence[RemoteSource], target: Target, at_least: int) -> int | None:
        """As `receive`, with the latest version of which some of `holders` have all parts. None: there is none.

        Versions with one number but different origins are of different states of the publishers.
        """
        versions = self._versions(holders, target.deadline)
        found = {(said.version, said.origins) for said in versions.values() if said.version >= at_least}
        for version, origins in sorted(found, reverse=True):
            some = {
                source: said.layout
                for source, said in versions.items()
                if (said.version, said.origins) == (version, origins)
            }
            taken = self._take_held(some, version, target, origins)
            if taken is not None:
                return taken
        return None

    def _take_held(
        self, some: Mapping[RemoteSource, int], version: int, target: Target, origins: Sequence[Origin]
    ) -> int | None:
        """As `_take`, from holders whose versions have these numbers. None: they have others now, or not all parts."""
        sources = [*some]
        for source in sources:
            source.describe(None)
        try:
            self._describe(sources, target.deadline)
            if any(source.packing is None or source.packing.number != some[source] for source in sources):
                return None
            takes = self._planned(sources, target.layout)
            taken, done = self._take(sources, takes, version, target, origins)
        except (PeerLost, WeightsError):
            return None
        return taken if done else None

    def _versions(self, sources: Sequence[RemoteSource], deadline: float) -> dict[RemoteSource, Fetched]:
        """The versions that these processes have now; those that have none, or have ended, are left out."""
        found = {}
        for source in sources:
            with suppress(PeerLost):
                said, _ = self._said(source, source.peek(None), Fetched, deadline)
                if said.layout:
                    found[source] = said
        return found

    def all_have(self, sources: Sequence[RemoteSource], deadline: float) -> bool:
        """Return True if each of `sources` has some version now."""
        new = [source for source in sources if source.packing is None]
        return len(self._versions(new, deadline)) == len(new)

    def latest(self, sources: Sequence[RemoteSource], deadline: float) -> int:
        """The number of the latest version that one of `sources` has."""
        asked = [(source, source.peek(self._left(deadline))) for source in sources]
        return max(self._said(source, future, Fetched, deadline)[0].version for source, future in asked)

    def described(self, sources: Sequence[RemoteSource], deadline: float) -> dict[str, torch.Tensor]:
        """The tensors of which all `sources` together have the parts, on the meta device. Raises `PeerLost`,
        `WeightsTimeout`."""
        self._describe(sources, deadline)
        found: dict[str, torch.Tensor] = {}
        for packing in (source.packing for source in sources if source.packing is not None):
            for name, part in packing.layout.items():
                if name not in found:
                    about = part.tensor
                    found[name] = torch.empty(about.shape, dtype=dtype_of(about.dtype), device="meta")
        return found

    def _describe(self, sources: Sequence[RemoteSource], deadline: float) -> bool:
        """Learn the layouts of all when one is not known: the others may have withdrawn theirs, also one from which
        this process takes nothing. Returns whether they were asked."""
        fresh = False
        while any(source.packing is None for source in sources):
            fresh = True
            asked = [source.ask(Describe(self._channel, self._left(deadline))) for source in sources]
            answers = [self._said(*each, Described, deadline)[0] for each in zip(sources, asked, strict=True)]
            # Those that answered first may have withdrawn before the others answered.
            asked = [source.peek(None) for source in sources]
            now = [self._said(*each, Fetched, deadline)[0] for each in zip(sources, asked, strict=True)]
            for source, said, peeked in zip(sources, answers, now, strict=True):
                if peeked.layout != said.number:
                    source.describe(None)
                elif source.packing is None or source.packing.number != said.number:
                    packing = Packing(shared(said.layout), said.number, said.offsets)
                    source.describe(packing, on_device=said.device, withdrawals=said.withdrawals)
        return fresh

    def _planned(self, sources: Sequence[RemoteSource], mine: Layout) -> Mapping[int, tuple[NamedBox, ...]]:
        known = [(source.who, source.packing) for source in sources if source.packing is not None]
        key = ([(who, packing.number) for who, packing in known], mine)
        if self._plan is None or self._plan[0] != key:
            layouts = [packing.layout for _, packing in known]
            near = [n for n, source in enumerate(sources) if source.here]
            # A rank whose parts are empty takes nothing, and waits for the version of the first publisher.
            self._plan = key, plan(layouts, mine, near, self._turn) or {0: ()}
        return self._plan[1]

    def _take(
        self,
        sources: Sequence[RemoteSource],
        takes: Mapping[int, tuple[NamedBox, ...]],
        at_least: int,
        target: Target,
        origins: Sequence[Origin],
    ) -> tuple[int, bool]:
        """Fetch and copy. Returns the version, or the one to ask for next, and whether that was done."""
        for source in sources:
            source.use(target.device)
        found = self._fetch(sources, takes, at_least, target)
        if not found:
            return at_least, False
        try:
            return self._copied(found, at_least, target, origins)
        except BaseException:
            self._holder.give_back(leases(found))
            raise
        finally:
            give_up(found)

    def _fetch(
        self,
        sources: Sequence[RemoteSource],
        takes: Mapping[int, tuple[NamedBox, ...]],
        at_least: int,
        target: Target,
    ) -> list[FetchResult]:
        """Ask all publishers that have something. Empty when one of them has to be asked in another way."""
        patience = self._left(target.deadline)
        asked: dict[int, Future[Parcel]] = {}
        found: list[FetchResult] = []
        later: list[tuple[RemoteSource, Fetched, str, Sequence[NamedBox]]] = []
        try:
            for n, some in takes.items():
                asked[n] = sources[n].fetch(at_least, some, patience, keep=target.keeps)
            for n, future in asked.items():
                said, parcel = self._said(sources[n], future, Fetched, target.deadline)
                got = self._got(sources[n], takes[n], said, parcel, target)
                if got is not None:
                    found.append(got)
                    later += [
                        (sources[n], said, who, [takes[n][i] for i in places])
                        for who, places in said.elsewhere.items()
                    ]
            self._holder.got(
                [
                    (got.origin.origin, got.fetched.version, got.copy)
                    for got in found
                    if isinstance(got.copy, Sent) and got.lasts
                ]
            )
            if len(found) == len(asked) and (rest := self._from_others(later, target)) is not None:
                return found + rest
        except BaseException:
            self._abandon(asked, sources, found)
            for n in asked:
                # More may be on the way.
                sources[n].unlink()
            raise
        self._abandon(asked, sources, found)
        return []

    def _got(
        self,
        source: RemoteSource,
        takes: Sequence[NamedBox],
        said: Fetched,
        parcel: Parcel,
        target: Target,
    ) -> FetchResult | None:
        """The parts that come from `source` itself. None: it has to be asked in another way."""
        if source.packing is None or said.layout != source.packing.number:
            source.describe(None)
            return None
        if source.here:
            if not said.block:
                source.here = False
                return None
            try:
                mapped = source.mapped(said, parcel, keep=target.keeps)
            except DeviceError as error:
                report(f"unirun: {error}: weights of {source.who} go through the memory of the host")
                return None
            return FetchResult(source, source, takes, said, mapped, mapped.views(takes))
        away = {place for places in said.elsewhere.values() for place in places}
        sent = [take for place, take in enumerate(takes) if place not in away]
        if source.link:
            views = source.linked(sent, target.layout, target.deadline, target.place)
        else:
            views = source.sent(parcel, sent, target.layout)
        copy = Sent(target.layout, sent, views)
        return FetchResult(source, source, sent, said, copy, views, source.link)

    def _from_others(
        self,
        later: Sequence[tuple[RemoteSource, Fetched, str, Sequence[NamedBox]]],
        target: Target,
    ) -> list[FetchResult] | None:
        """Take over the tensors that other receivers of this host have got; from the publisher if they do not
        give it soon. None: it has other tensors now."""
        soon = min(target.deadline, self._now() + NEIGHBOR_ANSWER_TIMEOUT)
        asked: list[tuple[RemoteSource, Future[Parcel]] | None] = []
        for origin, fetched, reader, takes in later:
            other = self._other(reader)
            asked.append(None)
            with suppress(PeerLost):
                if other is not None:
                    asked[-1] = (
                        other,
                        other.fetch_parts(fetched.version, takes, self._left(soon), origin=origin.origin),
                    )
        found = []
        for (origin, fetched, _, takes), waiting in zip(later, asked, strict=True):
            given = None
            if waiting is not None:
                with suppress(PeerLost, WeightsTimeout):
                    given = (waiting[0], *self._said(*waiting, Fetched, soon))
            if given is None:
                number = origin.packing.number if origin.packing is not None else 0
                future = origin.fetch_parts(fetched.version, takes, self._left(target.deadline), number)
                given = (origin, *self._said(origin, future, Fetched, target.deadline))
                if given[1].layout != number:
                    origin.describe(None)
                    return None
            source, said, parcel = given
            views = source.sent(parcel, takes, target.layout)
            copy = Sent(target.layout, takes, views)
            found.append(FetchResult(origin, source, takes, said, copy, views))
        return found

    def _abandon(
        self,
        asked: Mapping[int, Future[Parcel]],
        sources: Sequence[RemoteSource],
        found: Sequence[FetchResult],
    ) -> None:
        """Give the blocks back that were lent, or will be, and are not read."""
        give_up(found)
        for n, future in asked.items():
            future.add_done_callback(partial(self._unread, sources[n]))

    def _unread(self, source: RemoteSource, future: Future[Parcel]) -> None:
        if future.exception() is None and source.here:
            with suppress(FrameError):
                said = answer_of(future.result().head)
                if isinstance(said, Fetched) and said.block:
                    self._holder.give_back([(source, said.block)])

    def _copied(
        self, found: Sequence[FetchResult], at_least: int, target: Target, origins: Sequence[Origin]
    ) -> tuple[int, bool]:
        """As `_take`, of what was fetched."""
        version = max(got.fetched.version for got in found)
        if any(got.fetched.version != version for got in found):
            self._holder.give_back(leases(found))
            return version, False
        assigned: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        copied: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for got in found:
            for take, view in zip(got.takes, got.views, strict=True):
                mine = local(target.tensors[take.name])
                if target.is_assigned(got.source, take):
                    assigned.append((take.name, mine, view))
                else:
                    copied.append((take.name, part_of(mine, target.layout[take.name], take.box), view))
        into, from_ = [pair[1] for pair in copied], [pair[2] for pair in copied]
        tied = untied([*copied, *assigned])
        if not tied:
            if target.eta < 1.0:
                # It cannot be undone, so it begins when it is sure that no tensor is torn.
                from_ = [view.clone() for view in from_]
            elif target.device is not None:
                with writing(into):
                    target.device.copy(into, from_)
            else:
                copy_all(into, from_)
            if target.device is not None:
                target.device.finish()
                give_up(found)
        # Tensors that the receiver keeps are lent until they are freed: the publisher does not write to them.
        unchanged = target.keeps or self._unchanged(found, target.deadline)
        if not unchanged:
            # Of several publishers, some may have lent theirs.
            self._holder.give_back(leases(found))
            return at_least, False
        if tied:
            raise WeightsError("the weights do not fit the receiver", faults=tied)
        if target.eta < 1.0:
            blend(into, from_, target.eta)
        if target.assign is not None:
            for name, _, view in assigned:
                target.assign(name, view)
        self.last = found
        self._hold(version, found, target.deadline, origins, keeps=target.keeps)
        return version, True

    def _unchanged(self, found: Sequence[FetchResult], deadline: float) -> bool:
        """Return True if no process has written to the memory that was read."""
        asked = [(got.source, got.source.was_read(got.fetched)) for got in found]
        answers = [
            self._said(source, future, Released, deadline)[0]
            for source, future in asked
            if future is not None
        ]
        return all(said.held for said in answers)

    def _hold(
        self,
        version: int,
        found: Sequence[FetchResult],
        deadline: float,
        origins: Sequence[Origin],
        *,
        keeps: bool,
    ) -> None:
        """Hold what can be held for others, in place of the version before; give back all else. `keeps`: memory that is
        lent is kept until it is freed."""
        lasting = [got for got in found if got.lasts]
        lent = [(source, None if keeps else block) for source, block in leases(lasting)]
        answers = self._holder.hold(version, [got.copy for got in lasting], lent, origins)
        answers += self._holder.give_back(leases([got for got in found if not got.lasts]))
        for source, released in answers:
            # The version is there, whatever becomes of the one before.
            with suppress(PeerLost, WeightsTimeout):
                self._said(source, released, Released, deadline)

    def _said(
        self, source: RemoteSource, future: Future[Parcel], wanted: type[AnswerT], deadline: float
    ) -> tuple[AnswerT, Parcel]:
        """Wait for an answer. Raises `PeerLost`, `WeightsTimeout`, `FrameError`."""
        try:
            parcel = future.result(self._left(deadline))
        except FutureTimeout:
            raise WeightsTimeout(
                f"{source.who} has published nothing new enough in channel {self._channel!r} in time",
                "publish more often, wait longer, or accept an older version",
                channel=self._channel,
            ) from None
        said = answer_of(parcel.head)
        if not isinstance(said, wanted):
            raise FrameError(
                f"{source.who} answered {type(said).__name__} where {wanted.__name__} was expected"
            )
        return said, parcel

    def _left(self, deadline: float) -> float:
        """Seconds until then."""
        return max(deadline - self._now(), 0.0)
