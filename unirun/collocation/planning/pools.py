"""Free slots of a node in pools, of which it does not matter which slots are taken, and how near sets of them are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

from unirun.collocation.planning.islands import Steps

SETS = 128
"""So many sets are looked at: all that there are, on a node with eight devices. Beyond, one is grown from each pool."""

SEEDS = 16
"""From so many pools at most: more are on no node that is known."""

STATES = 256
"""A set that has no more subsets is divided in the best way: all that there are, on a node with eight devices."""

Counts = tuple[int, ...]
"""How many slots of each pool."""


class Ground(NamedTuple):
    """The islands of a node's slots of one type: how far they are from each other, and what a pair of slots weighs."""

    steps: Steps
    weights: tuple[tuple[int, ...], ...]
    levels: tuple[int, ...]


def ground(steps: Steps, slots: int) -> Ground:
    """Of a node with so many slots. A pair that is farther outweighs all that are nearer."""
    bits = (slots**2).bit_length()
    levels = sorted({step for row in steps for step in row})
    weight = {step: 1 << (bits * number) for number, step in enumerate(levels)}
    return Ground(steps, tuple(tuple(weight[step] for step in row) for row in steps), tuple(levels))


class Pools:
    """`sizes` are the pools', `islands` are where they are on the `ground`."""

    def __init__(self, ground: Ground, islands: Sequence[int], sizes: Sequence[int]) -> None:
        self._ground, self._islands, self.sizes = ground, islands, sizes
        self._known: dict[tuple[Counts, int], tuple[int, tuple[Counts, ...]]] = {}

    def sets(self, total: int, sizes: Sequence[int] | None = None) -> list[Counts]:
        """Sets of `total` slots, of no more than `sizes` (else all) of each pool: all, or those that are grown."""
        sizes = self.sizes if sizes is None else sizes
        seeds = [pool for pool, size in enumerate(sizes) if size]
        if len(seeds) <= SEEDS:
            found = list(islice(splits(total, sizes), SETS + 1))
            if len(found) <= SETS:
                return found
        return list(dict.fromkeys(self._grown(total, sizes, seed) for seed in seeds[:SEEDS]))

    def _grown(self, total: int, sizes: Sequence[int], seed: int) -> Counts:
        """A set with as much of `seed` as can be, then of the pools nearest to what it has."""
        counts = [0] * len(sizes)
        away = [0] * len(sizes)
        left, at = total, seed
        while True:
            counts[at] = min(sizes[at], left)
            left -= counts[at]
            if not left:
                return tuple(counts)
            row = self._ground.weights[self._islands[at]]
            away = [far + counts[at] * row[island] for far, island in zip(away, self._islands, strict=True)]
            # Of equally near ones the smallest that has enough, else the largest.
            at = min(
                (pool for pool, size in enumerate(sizes) if size and not counts[pool]),
                key=lambda p: (away[p], sizes[p] < left, sizes[p] if sizes[p] >= left else -sizes[p], p),
            )

    def cost(self, counts: Counts) -> int:
        """The weight of all pairs in a set."""
        used = self._used(counts)
        found = 0
        for place, (island, number) in enumerate(used):
            row = self._ground.weights[island]
            found += number * (number - 1) // 2 * row[island]
            for other, there in used[:place]:
                found += number * there * row[other]
        return found

    def far(self, counts: Counts) -> int:
        """How far the farthest two of a set are from each other."""
        used = self._used(counts)
        steps = self._ground.steps
        return max(
            (
                steps[one][other]
                for at, (one, number) in enumerate(used)
                for other, _ in used[at if number > 1 else at + 1 :]
            ),
            default=0,
        )

    def around(self, counts: Counts, need: int) -> tuple[int, ...]:
        """By how near they are: what is missing to `need` slots near all of a set; then how many there are.

        So the least is the tightest part of the node in which there is enough.
        """
        rows = [self._ground.steps[island] for island, _ in self._used(counts)]
        farthest = [max(row[island] for row in rows) for island in self._islands]
        there = [
            sum(size for size, far in zip(self.sizes, farthest, strict=True) if far <= level)
            for level in self._ground.levels
        ]
        return (*(max(need - number, 0) for number in there), *there)

    def _used(self, counts: Counts) -> list[tuple[int, int]]:
        """The islands of which a set has slots, and how many; an island may have several pools."""
        return [(island, number) for island, number in zip(self._islands, counts, strict=True) if number]

    def divided(self, counts: Counts, width: int) -> tuple[int, tuple[Counts, ...]]:
        """What the parts of a set cost, and the parts, each of `width` slots and as near as can be.

        Of a large set the nearest part is cut off, then that of the rest.
        """
        first: list[Counts] = []
        while prod(count + 1 for count in counts) > STATES:
            # Of equally near ones that which leaves the fewest pools cut.
            part = min(
                self.sets(width, counts),
                key=lambda each: (self.cost(each), sum(0 < a < b for a, b in zip(each, counts, strict=True))),
            )
            first.append(part)
            counts = _less(counts, part)
        cost, parts = self._divided(counts, width)
        return sum(map(self.cost, first)) + cost, (*first, *parts)

    def _divided(self, counts: Counts, width: int) -> tuple[int, tuple[Counts, ...]]:
        if not any(counts):
            return 0, ()
        known = self._known.get((counts, width))
        if known is None:
            # Some part has slots of the first pool.
            first = next(pool for pool, count in enumerate(counts) if count)
            known = self._known[counts, width] = min(
                (self.cost(part) + cost, (part, *parts))
                for part in self.sets(width, counts)
                if part[first]
                for cost, parts in (self._divided(_less(counts, part), width),)
            )
        return known


def _less(counts: Counts, part: Counts) -> Counts:
    return tuple(count - taken for count, taken in zip(counts, part, strict=True))


def splits(total: int, sizes: Sequence[int]) -> Iterator[Counts]:
    """All ways to take `total` from pools that have `sizes`, those with the most from the first pools first."""
    if total > sum(sizes):
        return
    counts = _filled(total, sizes)
    while True:
        yield tuple(counts)
        later = room = 0
        for at in range(len(sizes) - 1, -1, -1):
            if counts[at] and later < room:
                counts[at] -= 1
                counts[at + 1 :] = _filled(later + 1, sizes[at + 1 :])
                break
            later += counts[at]
            room += sizes[at]
        else:
            return


def _filled(total: int, sizes: Sequence[int]) -> list[int]:
    counts = []
    for size in sizes:
        counts.append(min(size, total))
        total -= counts[-1]
    return counts
