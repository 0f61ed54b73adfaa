"""The receiving end: asks the publishers, and copies what is the receiver's once all of a version is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from unirun.errors import PeerLost, WeightsError
from unirun.values import Value
from unirun.weights.devices.cuda import Finder, device_of
from unirun.weights.fetching import Fetcher, FetchResult, give_up, lasts, leases, remember
from unirun.weights.holding import Holder
from unirun.weights.layout import Layout, ReadItem, by_source, plan, shared
from unirun.weights.memory import untied, writing
from unirun.weights.messages import (
    Describe,
    Described,
    Fetched,
    Released,
)
from unirun.weights.packing import DeviceInterface, Packing, blend, copy_all
from unirun.weights.sources import RemoteSource
from unirun.weights.tensors import Piecewise, dtype_of, is_dtensor, layout_of, local, part_of


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
        remember(version, found, target.layout)
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
            self._plan = key, by_source(plan(layouts, mine, near, self._turn))
        return self._plan[1]
