"""The parts of each tensor that one rank has: boxes of the global tensor, and the arithmetic of boxes.

Nothing here needs torch, so that a plan for thousands of ranks is made and tested as plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unirun.errors import Fault, WeightsError
from unirun.values import Value

Extent = tuple[int, ...]
"""One number for each dimension."""


class Box(Value):
    """The part of a tensor from `start` (inclusive) that has `size` elements in each dimension."""

    start: Extent
    size: Extent

    @property
    def count(self) -> int:
        """The number of elements; 1 for a tensor without dimensions."""
        product = 1
        for size in self.size:
            product *= size
        return product

    def meet(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor; None if they have no element in common."""
        start, size = [], []
        for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True):
            low = max(a, b)
            high = min(a + n, b + m)
            if low >= high:
                return None
            start.append(low)
            size.append(high - low)
        return Box(tuple(start), tuple(size))

    def without(self, other: Box) -> Iterator[Box]:
        """The part of this box that is not in `other`, as boxes that do not overlap; two for each dimension at most."""
        common = self.meet(other)
        if common is None:
            yield self
            return
        start, size = list(self.start), list(self.size)
        for axis, (low, count) in enumerate(zip(common.start, common.size, strict=True)):
            before = low - start[axis]
            after = start[axis] + size[axis] - low - count
            if before:
                yield Box(tuple(start), (*size[:axis], before, *size[axis + 1 :]))
            if after:
                yield Box(
                    (*start[:axis], low + count, *start[axis + 1 :]), (*size[:axis], after, *size[axis + 1 :])
                )
            start[axis], size[axis] = low, count


class Tensor(Value):
    """A whole tensor, as all ranks see it: its global shape, and its dtype by torch's name (``bfloat16``)."""

    shape: Extent
    dtype: str

    @property
    def whole(self) -> Box:
        """All of it."""
        return Box((0,) * len(self.shape), self.shape)


class Piece(Value):
    """The part `box` of a tensor that a rank has, and where that begins in the rank's local tensor: at `at`."""

    box: Box
    at: Extent


class Part(Value):
    """A tensor of which a rank has `pieces`, which do not overlap and are not empty."""

    tensor: Tensor
    pieces: tuple[Piece, ...]


Layout = dict[str, Part]
"""The parts of the tensors that one rank has, by the name of the tensor."""


def shared(layout: Layout) -> Layout:
    """The same layout, in which equal parts are one object: a model of a hundred layers has a dozen."""
    seen: dict[Part, Part] = {}
    return {name: seen.setdefault(part, part) for name, part in layout.items()}


def runs(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive numbers in `indices`, which ascend: where a run is in `indices`, its first number and its length."""
    found: list[tuple[int, int, int]] = []
    for at, index in enumerate(indices):
        if found and index == found[-1][1] + found[-1][2]:
            begin, first, count = found[-1]
            found[-1] = begin, first, count + 1
        else:
            found.append((at, index, 1))
    return found


def pieces_of(axes: Sequence[Sequence[int]]) -> tuple[Piece, ...]:
    """The pieces of a rank whose local tensor has, along each dimension, the global indices `axes`, which ascend."""
    found = [Piece(Box((), ()), ())]
    for indices in axes:
        found = [
            Piece(Box((*p.box.start, first), (*p.box.size, count)), (*p.at, at))
            for p in found
            for at, first, count in runs(indices)
        ]
    return tuple(found)


# The parts of the tensors that each rank takes, and their sources: a pure function of layouts.


class ReadItem(Value):
    """`box` of the tensor `name` comes from the source with this index."""

    source: int
    name: str
    box: Box


def plan(
    sources: Sequence[Layout], wanted: Layout, near: Sequence[int] = (), turn: int = 0
) -> tuple[ReadItem, ...]:
    """The takes that give all of `wanted`, no element twice. The same arguments give the same plan.

    Where several sources have an element, those in `near` (on this host) come first. Those that have the same part of
    a tensor share the work: the next tensor comes from the one that has sent least. The order begins with the source
    number `turn`, so that receivers with different numbers ask different sources first.

    Raises `WeightsError` with every tensor that no source has, that has another shape or dtype, or of which a part is
    nowhere.
    """
    faults = [
        fault for name, part in wanted.items() if (fault := _difference(name, part, sources)) is not None
    ]
    if faults:
        raise WeightsError("the weights do not fit the receiver", faults=faults)
    order = _order(len(sources), near, turn)
    takes: list[ReadItem] = []
    sent = [0] * len(sources)
    # Layers of a model are cut in the same way, and equal parts are one object (`shared`): one search serves all.
    known: dict[tuple[int, ...], tuple[list[tuple[list[int], Box]], list[Box]]] = {}
    for name, part in wanted.items():
        there = [sources[source].get(name) for source in order]
        key = (id(part), *map(id, there))
        if key not in known:
            twins = _twins(order, there, set(near))
            known[key] = _search(part, [(some, sources[some[0]][name]) for some in twins])
        found, missing = known[key]
        for twin, box in found:
            source = min(twin, key=sent.__getitem__) if len(twin) > 1 else twin[0]
            sent[source] += box.count
            takes.append(ReadItem(source, name, box))
        faults += [_nowhere(name, part.tensor, box) for box in missing[:1]]
    if faults:
        raise WeightsError("the publishers do not have all of what the receiver needs", faults=faults)
    return tuple(takes)


def _twins(order: Sequence[int], there: Sequence[Part | None], near: set[int]) -> list[list[int]]:
    """The sources of a tensor: those that have the same part, and are as near as each other, in one list."""
    found: dict[tuple[bool, Part], list[int]] = {}
    for source, held in zip(order, there, strict=True):
        if held is not None:
            found.setdefault((source not in near, held), []).append(source)
    return [*found.values()]


def _search(
    part: Part, there: Sequence[tuple[list[int], Part]]
) -> tuple[list[tuple[list[int], Box]], list[Box]]:
    """The boxes of `part` that come from each source, and those that no source has."""
    found: list[tuple[list[int], Box]] = []
    missing = [piece.box for piece in part.pieces]
    for sources, held in there:
        for piece in held.pieces if missing else ():
            left: list[Box] = []
            for box in missing:
                common = box.meet(piece.box)
                if common is None:
                    left.append(box)
                else:
                    found.append((sources, common))
                    left.extend(box.without(common))
            missing = left
    return found, missing


def _order(count: int, near: Sequence[int], turn: int) -> list[int]:
    close = set(near)
    rotated = [(turn + number) % count for number in range(count)] if count else []
    return sorted(rotated, key=lambda source: source not in close)


def _difference(name: str, wanted: Part, sources: Sequence[Layout]) -> Fault | None:
    found = next((layout[name].tensor for layout in sources if name in layout), None)
    if found is None:
        return Fault(name, "no publisher has it", "rename it, or leave it out of what is received")
    if found != wanted.tensor:
        return Fault(name, f"it is published as {_words(found)} and received as {_words(wanted.tensor)}")
    return None


def _nowhere(name: str, tensor: Tensor, box: Box) -> Fault:
    where = ", ".join(f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True))
    return Fault(name, f"no publisher has [{where}] of {_words(tensor)}")


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def by_source(takes: Sequence[ReadItem]) -> Mapping[int, tuple[ReadItem, ...]]:
    """The takes of each source."""
    found: dict[int, list[ReadItem]] = {}
    for take in takes:
        found.setdefault(take.source, []).append(take)
    return {source: tuple(some) for source, some in found.items()}
