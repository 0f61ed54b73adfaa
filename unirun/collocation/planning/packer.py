"""The cells that fit on a node of a kind, and the slots for them: near each other where there is a choice.

Nearness never decides what fits. There are three preferences: that the slots of a rank are near each
other, that those of a group of ranks are (`per_group`), and that those of all ranks of a role on the node are. Each has
a limit, the greatest distance of two slots. At first, every item has the limit that it could keep alone; then limits
are raised step by step, those of roles before those of groups, and those of ranks last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product
from operator import gt
from typing import NamedTuple

from unirun.collocation.inventory import CPU
from unirun.collocation.planning.problem import Cells, Distances, NodeKind, Problem, total

RANK, GROUP, ROLE = range(3)
"""The preferences, by the number of their limit."""

STEPS, STEPS_NEAR = 20_000, 100
"""The most steps of a search for any slots, and of one within limits of nearness, where each item has one more."""

WAYS = 512
"""So many ways to place one item are compared: all ways on a node with eight devices."""

BITS = 20
"""A node has fewer than 2^20 pairs of slots."""

Ranks = tuple[tuple[int, ...], ...]
"""The slots of each rank of an item, as positions in `NodeKind.slots`; ranks by their first slot."""

Counts = tuple[int, ...]
"""By pool of slots that can stand for each other, how many of them are taken."""


class Packer:
    """Answers which cells of a `problem` fit on kinds of nodes, and keeps the answers."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._stacks = problem.stacks
        self._home = [number for number, bundle in enumerate(problem.bundles) for _ in bundle.stacks]
        self._countable = problem.countable
        self._known: dict[tuple[NodeKind, Cells], bool] = {}
        self._first: dict[object, NodeKind] = {}
        self._same: dict[NodeKind, NodeKind] = {}

    def fits(self, kind: NodeKind, cells: Cells) -> bool:
        """Return True if a node of `kind` has room for `cells`, and all constraints hold among its cells then."""
        same = self._same.get(kind)
        if same is None:
            same = self._same[kind] = self._first.setdefault(kind.shape, kind)
        known = self._known.get((same, cells))
        if known is None:
            known = self._known[same, cells] = self._fits(kind, cells)
        return known

    def _fits(self, kind: NodeKind, cells: Cells) -> bool:
        there = [number + held for number, held in zip(cells, kind.held, strict=True)]
        present = {bundle for bundle, number in enumerate(there) if number}
        for bundle in present:
            own = self.problem.bundles[bundle]
            elsewhere = own.component not in (None, kind.component)
            if elsewhere or (own.single and there[bundle] > 1) or self.problem.apart[bundle] & present:
                return False
        if any(map(gt, total(cells, kind.needs), kind.offer)):
            return False
        return self._countable or search_any(self.problem, kind, self._ranks(cells)) is not None

    def pack(self, kind: NodeKind, cells: Cells) -> list[list[tuple[int, ...]]]:
        """By stack, the slots of each rank of `cells`, which fit: near each other where there is a choice."""
        ranks = self._ranks(cells)
        found = search_near(self.problem, kind, ranks) if self._may_choose(kind) else None
        found = found or search_any(self.problem, kind, ranks)
        if found is None:
            raise ValueError("these cells do not fit")
        packing: list[list[tuple[int, ...]]] = [
            [] if stack.width else [()] * number for stack, number in zip(self._stacks, ranks, strict=True)
        ]
        for item, slots in sorted(found, key=lambda pair: pair[1]):
            packing[item.stack] += slots
        return packing

    def _may_choose(self, kind: NodeKind) -> bool:
        """Return True if free slots are on several islands, for a stack whose slots should be near each other."""
        islands = Counter(type for type, _ in {(s.type, s.island) for s in kind.slots if s.free})
        return any(
            islands[stack.device or ""] > 1 and (stack.device != CPU or stack.width > 1 or stack.group > 1)
            for stack in self._stacks
        )

    def _ranks(self, cells: Cells) -> list[int]:
        """The ranks of `cells` by stack."""
        return [cells[home] * stack.ranks for stack, home in zip(self._stacks, self._home, strict=True)]


class PackItem(NamedTuple):
    """`ranks` ranks of a stack that are placed in one step, each on `width` slots, of which it takes `units`.

    `preference` says which of its slots should be near each other: those of a rank, of a group, or of all its ranks.
    """

    stack: int
    ranks: int
    width: int
    units: int
    preference: int = 0


Packed = list[tuple[PackItem, Ranks]]
Candidates = Callable[[int, int], Iterable[Ranks]]
"""The slots that an item, by its number, may have, the best first. None is before the slot that is given."""


class Board:
    """The slots of a node while ranks are put on them: the free units of each, and how many ranks of each stack."""

    def __init__(self, problem: Problem, kind: NodeKind) -> None:
        self._problem, self.stacks, self.slots = problem, problem.stacks, kind.slots
        self.free = [slot.free for slot in kind.slots]
        self.users = [dict.fromkeys(slot.users, 1) for slot in kind.slots]
        lists = [(number, stack.only) for number, stack in enumerate(self.stacks) if stack.only is not None]
        self.lists = [tuple(number for number, only in lists if slot.name in only) for slot in kind.slots]
        """By slot: the stacks that ask for it by index. Others leave it to them where they can."""

    def _put(self, item: PackItem, ranks: Ranks, times: int) -> None:
        """Put `item` on slots, or with -1 take it away."""
        for slot in (slot for rank in ranks for slot in rank):
            self.free[slot] -= times * item.units
            users = self.users[slot]
            users[item.stack] = users.get(item.stack, 0) + times
            if not users[item.stack]:
                del users[item.stack]

    def usable(self, item: PackItem, start: int) -> list[int]:
        """The slots that a rank of `item` may have, from the slot `start` on."""
        stack = self.stacks[item.stack]
        isolated, distinct = self._problem.isolated[item.stack], self._problem.distinct[item.stack]
        taken = {p.numa for p, users in zip(self.slots, self.users, strict=True) if isolated & users.keys()}
        return [
            at
            for at, slot in enumerate(self.slots[start:], start)
            if slot.type == stack.device
            and self.free[at] >= item.units
            and (stack.only is None or slot.name in stack.only)
            and slot.numa not in taken
            and distinct.isdisjoint(self.users[at])
        ]

    def search(self, items: Sequence[PackItem], candidates: Candidates, most: int) -> Packed | None:
        """The first combination of candidates for all `items` that is found in `most` steps; the board is not changed.

        None when there is none, or when the steps ran out.
        """
        # One iterator for each item that is placed, in place of recursion: there may be a thousand items.
        trail: list[Iterator[Ranks]] = []
        chosen: list[Ranks] = []
        for _ in range(most):
            if len(chosen) == len(items):
                break
            number = len(chosen)
            if len(trail) == number:
                # Of equal items the later has no earlier slot, so their permutations are not tried.
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
        for item, ranks in zip(items, chosen, strict=False):
            self._put(item, ranks, -1)
        return list(zip(items, chosen, strict=True)) if len(chosen) == len(items) else None


def search_any(problem: Problem, kind: NodeKind, ranks: Sequence[int]) -> Packed | None:
    """Slots for `ranks`, by stack, near each other or not; None when they do not fit."""
    board = Board(problem, kind)
    items: list[PackItem] = []
    for number, (stack, count) in enumerate(zip(problem.stacks, ranks, strict=True)):
        # Ranks that share no slot are one item: they may have any.
        whole = stack.units == problem.unit
        if stack.width and count:
            item = PackItem(number, count if whole else 1, stack.width, stack.units)
            items += [item] if whole else [item] * count
    # The fewest choices first, then the largest shares.
    items.sort(key=lambda i: (problem.stacks[i.stack].only is None, -i.units, i.stack))

    def candidates(number: int, start: int) -> Iterator[Ranks]:
        """Of slots that can stand for each other only the first are tried."""
        item = items[number]
        shares = item.units < problem.unit
        alike: dict[object, list[int]] = {}
        for at in board.usable(item, start):
            numa = board.slots[at].numa if any(problem.isolated) else 0
            users = (board.free[at], *sorted(board.users[at])) if shares else ()
            alike.setdefault((numa, board.lists[at], users), []).append(at)
        pools = list(alike.values())
        if shares:
            # The fullest first.
            firsts = sorted((pool[0] for pool in pools), key=lambda at: (board.free[at], at))
            yield from (((at,),) for at in firsts)
            return
        for split in splits(item.ranks * item.width, [len(pool) for pool in pools]):
            yield first_slots([split], pools, item.width)

    return board.search(items, candidates, STEPS)


class Choice(NamedTuple):
    """Places for an item; the least is the best.

    `free` units are left on the slot of a share. Then come the costs of all pairs of slots: within ranks, within the
    item, and to other ranks of the stack. `around` is less where the other ranks of the stack can be near too.
    """

    free: int
    within_ranks: int
    within_item: int
    to_mates: int
    around: tuple[int, ...]
    slots: Ranks


def _items(problem: Problem, ranks: Sequence[int]) -> list[PackItem]:
    """The items of `ranks`, by stack: whole groups; of roles without groups all ranks that have one slot each."""
    items: list[PackItem] = []
    for number, stack in enumerate(problem.stacks):
        if not ranks[number] or not stack.width:
            continue
        whole = stack.units == problem.unit
        size, preference = 1, RANK
        if whole and stack.group > 1:
            size, preference = stack.group, GROUP
        elif whole and stack.width == 1 and stack.device != CPU:
            # Processes on CPUs may be anywhere: neighbours share caches and memory.
            size, preference = ranks[number], ROLE
        items += [PackItem(number, size, stack.width, stack.units, preference)] * (ranks[number] // size)

    def order(item: PackItem) -> tuple[bool, int, int]:
        """The fewest choices first, then what needs most slots at once."""
        at_once = item.width if item.preference == ROLE else item.width * item.ranks
        return problem.stacks[item.stack].only is None, -item.units * at_once, item.stack

    return sorted(items, key=order)


def search_near(problem: Problem, kind: NodeKind, ranks: Sequence[int]) -> Packed | None:
    """Slots for `ranks`, by stack, as near each other as can be found; None when none were found."""
    board, items = Board(problem, kind), _items(problem, ranks)
    # Of the stack of each item: the slots that are still needed when its turn comes.
    needs = [
        sum(i.ranks * i.width for i in items[number:] if i.stack == item.stack)
        for number, item in enumerate(items)
    ]

    def choices(number: int, start: int) -> list[Choice]:
        item = items[number]
        distances = kind.distances[board.stacks[item.stack].device or ""]
        return sorted(_choices(board, distances, item, needs[number], start))

    def within(limits: Mapping[PackItem, tuple[int, int]], number: int, start: int) -> Iterator[Ranks]:
        rank, whole = limits[items[number]]
        for choice in choices(number, start):
            if _farthest(choice.within_ranks) <= rank and _farthest(choice.within_item) <= whole:
                yield choice.slots

    least: dict[PackItem, tuple[int, int]] = {}
    for number, item in enumerate(items):
        if item not in least:
            found = choices(number, 0)
            if not found:
                return None
            rank, whole = min(c.within_ranks for c in found), min(c.within_item for c in found)
            least[item] = _farthest(rank), _farthest(whole)
    levels = {far for rows in kind.distances.values() for row in rows for far in row}
    for limits in _limits(least, sorted({0, *levels})):
        slots = board.search(items, partial(within, limits), STEPS_NEAR + len(items))
        if slots is not None:
            return slots
    return None


def _limits(
    least: Mapping[PackItem, tuple[int, int]], levels: Sequence[int]
) -> Iterable[dict[PackItem, tuple[int, int]]]:
    """By item, the greatest distances within a rank and within the item: from `least` on, ever greater."""
    raised = [0, 0, 0]
    found: dict[tuple[tuple[int, int], ...], dict[PackItem, tuple[int, int]]] = {}
    for preference, level in product((ROLE, GROUP, RANK), levels):
        raised[preference] = level
        limits = {
            item: (max(rank, raised[RANK]), max(whole, raised[item.preference]))
            for item, (rank, whole) in least.items()
        }
        found.setdefault(tuple(limits.values()), limits)
    return found.values()


def _choices(board: Board, distances: Distances, item: PackItem, need: int, start: int) -> Iterator[Choice]:
    """The slots that `item` may have, from the slot `start` on."""
    type = board.stacks[item.stack].device
    alike: dict[tuple[object, ...], list[int]] = {}
    for at in board.usable(item, start):
        key = (board.slots[at].island, board.lists[at], board.free[at], *sorted(board.users[at]))
        alike.setdefault(key, []).append(at)
    pools = list(alike.values())
    islands = [board.slots[pool[0]].island for pool in pools]
    sizes = tuple(map(len, pools))
    used = zip(board.slots, board.users, strict=True)
    mates = [slot.island for slot, users in used if type != CPU and item.stack in users]
    to_mates = [sum(1 << BITS * distances[island][mate] for mate in mates) for island in islands]
    # Ranks with one slot each are one set of slots, in which any rank may have any.
    parts, width = (item.ranks, item.width) if item.width > 1 else (1, item.ranks)
    # Ranks of a role that may be anywhere come in the order of the slots, where all else is equal.
    one = parts * width == 1
    anywhere = one or item.preference == ROLE
    for way in islice(divisions(sizes, parts, width), WAYS):
        whole = tuple(map(sum, zip(*way, strict=True)))
        there = [island for island, number in zip(islands, whole, strict=True) if number]
        ranks = [_cost(distances, islands, part) for part in way] if item.width > 1 else []
        yield Choice(
            free=board.free[pools[whole.index(1)][0]] if one else 0,
            within_ranks=sum(ranks),
            within_item=_cost(distances, islands, whole),
            to_mates=sum(number * cost for number, cost in zip(whole, to_mates, strict=True)),
            around=() if anywhere else _around(distances, islands, sizes, there, need),
            slots=first_slots(way, pools, item.width),
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


def first_slots(way: Sequence[Counts], pools: Sequence[Sequence[int]], width: int) -> Ranks:
    """The first slots of `pools`, as many of each as each part of `way` has, in ranks of `width`."""
    first = [iter(pool) for pool in pools]
    found = []
    for part in way:
        slots = sorted(next(turn) for turn, number in zip(first, part, strict=True) for _ in range(number))
        found += [tuple(slots[at : at + width]) for at in range(0, len(slots), width)]
    return tuple(sorted(found))


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
