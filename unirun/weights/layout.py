"""The parts of each tensor that one rank has: boxes of the global tensor, and the arithmetic of boxes.

Nothing here needs torch, so that a plan for thousands of ranks is made and tested as plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
