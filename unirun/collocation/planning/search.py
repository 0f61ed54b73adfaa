"""A search for the places of ranks on one node, and which of them to prefer: those that are near each other.

Nearness is a preference, which never decides what fits. There are three wishes: that the slots of a rank are near each
other, that those of a group of ranks are (`per_group`), and that those of all ranks of a role on the node are. Each has
a limit, the greatest distance of two slots. At first, every item has the limit that it could keep alone; then limits
are raised step by step, those of roles before those of groups, and those of ranks last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product
from typing import NamedTuple

from unirun.collocation.planning.cells import Problem
from unirun.collocation.planning.nodes import Distances, NodeKind
from unirun.collocation.slots import CPU

RANK, GROUP, ROLE = range(3)
"""The wishes, by the number of their limit."""

STEPS = 100
"""The steps of a search within given limits, beside one for each item."""

WAYS = 512
"""So many ways to place one item are compared: all ways on a node with eight devices."""

BITS = 20
"""A node has fewer than 2^20 pairs of slots."""

Ranks = tuple[tuple[int, ...], ...]
"""The places of each rank of an item, as positions in `NodeKind.places`; ranks by their first place."""

Counts = tuple[int, ...]
"""By pool of places that can stand for each other, how many of them are taken."""


class Item(NamedTuple):
    """`ranks` ranks of a stack that are placed in one step, each on `width` places, of which it takes `units`.

    `wish` says what of it is kept near each other.
    """

    stack: int
    ranks: int
    width: int
    units: int
    wish: int = 0


Candidates = Callable[[int, int], Iterable[Ranks]]
"""The places that an item, by its number, may have, the best first. None is before the place that is given."""


class Board:
    """The places of a node while ranks are put on them: the free units of each, and how many ranks of each stack."""

    def __init__(self, problem: Problem, kind: NodeKind) -> None:
        self._problem, self.stacks, self.places = problem, problem.stacks, kind.places
        self.free = [place.free for place in kind.places]
        self.users = [dict.fromkeys(place.users, 1) for place in kind.places]
        lists = [(number, stack.only) for number, stack in enumerate(self.stacks) if stack.only is not None]
        self.lists = [tuple(number for number, only in lists if place.name in only) for place in kind.places]
        """By place: the stacks that ask for it by index. Others leave it to them where they can."""

    def _put(self, item: Item, ranks: Ranks, times: int) -> None:
        """Put `item` on places, or with -1 take it away."""
        for place in (place for rank in ranks for place in rank):
            self.free[place] -= times * item.units
            users = self.users[place]
            users[item.stack] = users.get(item.stack, 0) + times
            if not users[item.stack]:
                del users[item.stack]

    def usable(self, item: Item, start: int) -> list[int]:
        """The places that a rank of `item` may have, from the place `start` on."""
        stack = self.stacks[item.stack]
        isolated, distinct = self._problem.isolated[item.stack], self._problem.distinct[item.stack]
        taken = {p.numa for p, users in zip(self.places, self.users, strict=True) if isolated & users.keys()}
        return [
            at
            for at, place in enumerate(self.places[start:], start)
            if place.type == stack.device
            and self.free[at] >= item.units
            and (stack.only is None or place.name in stack.only)
            and place.numa not in taken
            and distinct.isdisjoint(self.users[at])
        ]

    def search(
        self, items: Sequence[Item], candidates: Candidates, most: int
    ) -> list[tuple[Item, Ranks]] | None:
        """Places for all `items`: the first combination of candidates that is found in `most` steps, else None.

        The board is as before afterwards.
        """
        # One iterator for each item that is placed, in place of recursion: there may be a thousand items.
        trail: list[Iterator[Ranks]] = []
        chosen: list[Ranks] = []
        for _ in range(most):
            if len(chosen) == len(items):
                break
            number = len(chosen)
            if len(trail) == number:
                # Of equal items the later has no earlier place, so their permutations are not tried.
                same = number > 0 and items[number - 1] == items[number]
                trail.append(iter(candidates(number, chosen[-1][0][0] if same else 0)))
            ranks = next(trail[-1], None)
            if ranks is not None:
                self._put(items[number], ranks, 1)
                chosen.append(ranks)
                continue
            trail.pop()
            if not trail:
                return None
            self._put(items[number - 1], chosen.pop(), -1)
        for item, ranks in zip(items, chosen, strict=False):  # fewer than items when the steps ran out
            self._put(item, ranks, -1)
        return list(zip(items, chosen, strict=True)) if len(chosen) == len(items) else None


def splits(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to take `total` from pools of `sizes`, those with most of the first pools first."""
    if not sizes:
        if total == 0:
            yield ()
        return
    rest = sum(sizes[1:])
    for number in range(min(sizes[0], total), max(total - rest, 0) - 1, -1):
        for others in splits(total - number, sizes[1:]):
            yield (number, *others)


def divisions(sizes: Counts, parts: int, width: int) -> Iterator[tuple[Counts, ...]]:
    """All ways to take `parts` sets of `width` from pools of `sizes`, each combination of sets once."""
    if not parts:
        yield ()
        return
    for first in splits(width, sizes):
        left = tuple(size - taken for size, taken in zip(sizes, first, strict=True))
        for others in divisions(left, parts - 1, width):
            if not others or others[0] <= first:
                yield (first, *others)


class Choice(NamedTuple):
    """Places for an item; the least is the best.

    `free` units are left on the place of a share. Then come the costs of all pairs of slots: within ranks, within the
    item, and to other ranks of the stack. `around` is less where the other ranks of the stack can be near too.
    """

    free: int
    within_ranks: int
    within_item: int
    to_mates: int
    around: tuple[int, ...]
    places: Ranks


def _items(problem: Problem, ranks: Sequence[int]) -> list[Item]:
    """The items of `ranks`, by stack: whole groups; of roles without groups all ranks that have one slot each."""
    items: list[Item] = []
    for number, stack in enumerate(problem.stacks):
        if not ranks[number] or not stack.width:
            continue
        whole = stack.units == problem.unit
        size, wish = 1, RANK
        if whole and stack.group > 1:
            size, wish = stack.group, GROUP
        elif whole and stack.width == 1 and stack.device != CPU:
            # Processes on CPUs may be anywhere: neighbours share caches and memory.
            size, wish = ranks[number], ROLE
        items += [Item(number, size, stack.width, stack.units, wish)] * (ranks[number] // size)

    def together(item: Item) -> int:
        return item.units * item.width * (1 if item.wish == ROLE else item.ranks)

    # The fewest choices first, then what needs most slots at once.
    return sorted(items, key=lambda i: (problem.stacks[i.stack].only is None, -together(i), i.stack))


def search_near(problem: Problem, kind: NodeKind, ranks: Sequence[int]) -> list[tuple[Item, Ranks]] | None:
    """Places for `ranks`, by stack, as near each other as can be found; None when none were found."""
    board, items = Board(problem, kind), _items(problem, ranks)
    # Of the stack of each item: the places that are still needed when its turn comes.
    needs = [
        sum(i.ranks * i.width for i in items[number:] if i.stack == item.stack)
        for number, item in enumerate(items)
    ]

    def choices(number: int, start: int) -> list[Choice]:
        item = items[number]
        distances = kind.distances[board.stacks[item.stack].device or ""]
        return sorted(_choices(board, distances, item, needs[number], start))

    def within(limits: Mapping[Item, tuple[int, int]], number: int, start: int) -> Iterator[Ranks]:
        rank, whole = limits[items[number]]
        for choice in choices(number, start):
            if _farthest(choice.within_ranks) <= rank and _farthest(choice.within_item) <= whole:
                yield choice.places

    least: dict[Item, tuple[int, int]] = {}
    for number, item in enumerate(items):
        if item not in least:
            found = choices(number, 0)
            if not found:
                return None
            rank, whole = min(c.within_ranks for c in found), min(c.within_item for c in found)
            least[item] = _farthest(rank), _farthest(whole)
    levels = {far for rows in kind.distances.values() for row in rows for far in row}
    for limits in _limits(least, sorted({0, *levels})):
        places = board.search(items, partial(within, limits), STEPS + len(items))
        if places is not None:
            return places
    return None


def _limits(
    least: Mapping[Item, tuple[int, int]], levels: Sequence[int]
) -> Iterable[dict[Item, tuple[int, int]]]:
    """By item, the greatest distances within a rank and within the item: from `least` on, ever greater."""
    raised = [0, 0, 0]
    found: dict[tuple[tuple[int, int], ...], dict[Item, tuple[int, int]]] = {}
    for wish, level in product((ROLE, GROUP, RANK), levels):
        raised[wish] = level
        limits = {
            item: (max(rank, raised[RANK]), max(whole, raised[item.wish]))
            for item, (rank, whole) in least.items()
        }
        found.setdefault(tuple(limits.values()), limits)
    return found.values()


def _choices(board: Board, distances: Distances, item: Item, need: int, start: int) -> Iterator[Choice]:
    """The places that `item` may have, from the place `start` on."""
    type = board.stacks[item.stack].device
    alike: dict[tuple[object, ...], list[int]] = {}
    for at in board.usable(item, start):
        key = (board.places[at].island, board.lists[at], board.free[at], *sorted(board.users[at]))
        alike.setdefault(key, []).append(at)
    pools = list(alike.values())
    islands = [board.places[pool[0]].island for pool in pools]
    sizes = tuple(map(len, pools))
    used = zip(board.places, board.users, strict=True)
    mates = [place.island for place, users in used if type != CPU and item.stack in users]
    to_mates = [sum(1 << BITS * distances[island][mate] for mate in mates) for island in islands]
    # Ranks with one slot each are one set of slots, in which any rank may have any.
    parts, width = (item.ranks, item.width) if item.width > 1 else (1, item.ranks)
    for way in islice(divisions(sizes, parts, width), WAYS):
        whole = tuple(map(sum, zip(*way, strict=True)))
        there = [island for island, number in zip(islands, whole, strict=True) if number]
        ranks = [_cost(distances, islands, part) for part in way] if item.width > 1 else []
        yield Choice(
            free=board.free[pools[whole.index(1)][0]] if parts * width == 1 else 0,
            within_ranks=sum(ranks),
            within_item=_cost(distances, islands, whole),
            to_mates=sum(number * cost for number, cost in zip(whole, to_mates, strict=True)),
            # Ranks of a role that may be anywhere come in the order of the slots, where all else is equal.
            around=()
            if item.wish == ROLE or parts * width == 1
            else _around(distances, islands, sizes, there, need),
            places=first_places(way, pools, item.width),
        )


def _cost(distances: Distances, islands: Sequence[int], counts: Counts) -> int:
    """The cost of all pairs in a set of slots: one that is farther outweighs all that are nearer."""
    used = [(island, number) for island, number in zip(islands, counts, strict=True) if number]
    cost = 0
    for at, (one, number) in enumerate(used):
        cost += number * (number - 1) // 2 << BITS * distances[one][one]
        cost += sum(number * there << BITS * distances[one][other] for other, there in used[:at])
    return cost


def _farthest(cost: int) -> int:
    """The greatest distance of the pairs that have `cost`."""
    return max(cost.bit_length() - 1, 0) // BITS


def _around(
    distances: Distances, islands: Sequence[int], sizes: Counts, used: Sequence[int], need: int
) -> tuple[int, ...]:
    """The distances of the nearest `need` slots from all those of `used`, the farthest first."""
    farthest = [max(distances[one][island] for one in used) for island in islands]
    found = sorted(far for far, size in zip(farthest, sizes, strict=True) for _ in range(size))
    return tuple(reversed(found[:need]))


def first_places(way: Sequence[Counts], pools: Sequence[Sequence[int]], width: int) -> Ranks:
    """The first places of `pools`, as many of each as each part of `way` has, in ranks of `width`."""
    first = [iter(pool) for pool in pools]
    found = []
    for part in way:
        places = sorted(next(turn) for turn, number in zip(first, part, strict=True) for _ in range(number))
        found += [tuple(places[at : at + width]) for at in range(0, len(places), width)]
    return tuple(sorted(found))
