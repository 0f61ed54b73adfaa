"""`Fetcher`: one version, asked of several processes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial

import torch

from unirun.errors import FrameError, PeerLost, WeightsTimeout
from unirun.roles.transport.protocol import Parcel
from unirun.values import Value
from unirun.weights.holding import Holder
from unirun.weights.layout import Layout, ReadItem
from unirun.weights.messages import Answer, Fetched, Released, answer_of
from unirun.weights.packing import DeviceError
from unirun.weights.sources import Copy, Mapped, RemoteSource, Sent
from unirun.wire.reporting import report

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
        if isinstance(self.copy, Sent) and self.copy.own:
            return "unchanged"
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


def _unchanged(
    source: RemoteSource, takes: Sequence[ReadItem], fetched: Fetched, wanted: Layout
) -> FetchResult:
    """The tensors that this process has already."""
    if source.had is None:
        raise FrameError(f"{source.who} says that parts have not changed, and this process has none")
    views = [source.had[1].kept(take) for take in takes]
    return FetchResult(source, source, takes, fetched, Sent(wanted, takes, views, takes), views)


def remember(version: int, found: Sequence[FetchResult], wanted: Layout) -> None:
    """All of `version` is here: publishers on other hosts need to send only what has changed since."""
    for origin in {got.origin for got in found if not got.source.here and lasts(got)}:
        mine = [got for got in found if got.origin is origin]
        takes = [take for got in mine for take in got.takes]
        own = [take for got in mine if isinstance(got.copy, Sent) for take in got.copy.own]
        origin.had = version, Sent(wanted, takes, [view for got in mine for view in got.views], own)


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
                    away = {place for places in said.elsewhere.values() for place in places} | {*said.same}
                    sent = [take for place, take in enumerate(takes[n]) if place not in away]
                    if source.link:
                        views = source.linked(sent, wanted, deadline, place)
                        copy = Sent(wanted, sent, views)
                        found.append(FetchResult(source, source, sent, said, copy, views, source.link))
                    else:
                        found.append(self._sent(source, source, sent, said, parcel, wanted))
                    if said.same:
                        found.append(
                            _unchanged(source, [takes[n][place] for place in said.same], said, wanted)
                        )
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
