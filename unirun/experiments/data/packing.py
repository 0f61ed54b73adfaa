"""The division of sequences over data-parallel ranks and micro-batches: pure functions of their numbers of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The indices of `sizes` in `parts` lists with nearly equal sums: the largest first, each to the list that has the
    least (longest-processing-time rule; Graham 1969: at most 4/3 of the best). Each list ascends.

    There are no empty lists if there are as many sizes as parts. Equal arguments give equal lists.
    """
    heap = [(0, 0, number) for number in range(parts)]
    found: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        total, count, number = heap[0]
        found[number].append(index)
        heapq.heapreplace(heap, (total + sizes[index], count + 1, number))
    return [sorted(part) for part in found]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Split the indices of `sizes` by that rule (Johnson 1973: at most 11/9 of the fewest lists, plus 1), each list
    with a sum of at most `capacity`; a larger size is in a list of its own. Each list ascends.

    A tree over the room that is left finds the first list with room, so it takes n·log n.
    """
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    leaves = 1
    while leaves < max(len(sizes), 1):
        leaves *= 2
    room = [capacity] * (2 * leaves)
    found: list[list[int]] = []
    for index in order:
        size = sizes[index]
        if size > capacity:
            # No list has room for it: it opens the next one, which is full then.
            number = len(found)
        else:
            node = 1
            while node < leaves:
                node = 2 * node if room[2 * node] >= size else 2 * node + 1
            number = node - leaves
        if number == len(found):
            found.append([])
        found[number].append(index)
        node = leaves + number
        room[node] = max(room[node] - size, 0) if size <= capacity else -1
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(part) for part in found]


def micro_batches(sizes: Sequence[int], least: int, capacity: int) -> list[list[int]]:
    """Split the indices of `sizes` into at least `least` non-empty lists, each with a sum up to `capacity` if possible.

    There are as many lists as `first_fit_decreasing` needs, balanced if possible; fewer than `least` only if there
    are fewer sizes.
    """
    if not sizes:
        return []
    count = len(first_fit_decreasing(sizes, capacity))
    found = balanced(sizes, min(max(count, least), len(sizes)))
    if any(len(part) > 1 and sum(sizes[index] for index in part) > capacity for part in found):
        # Balance needs more room than the rule for the fewest lists.
        found = first_fit_decreasing(sizes, capacity)
    return found


def imbalance(sizes: Sequence[int], parts: Sequence[Sequence[int]]) -> float:
    """The largest part divided by the mean one; 1 is perfect, also of nothing."""
    sums = [sum(sizes[index] for index in part) for part in parts]
    total = sum(sums)
    return max(sums) * len(sums) / total if total else 1.0
