"""The layout of a picture: layers from left to right, with calls to the right where that is possible.

The method is that of Sugiyama, Tagawa and Toda (1981): turn the edges that close a cycle, give every vertex a layer,
cut edges over several layers into pieces, order each layer by the means of its neighbours' places, then move everything
to heights that keep edges straight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from unirun.collocation.graph.values import Graph
from unirun.values import Value

Pair = tuple[str, str]
"""(caller, called)"""

SWEEPS = 8
"""Passes of the ordering of layers by their neighbours; small graphs converge after three or four."""


class Layout(Value):
    """`layers` are the points in each layer from the top: a role's name, or (pair, layer) where an edge passes by.

    `turned` are the pairs that go from right to left. `chains` are the points of each pair, from the left.
    """

    layers: tuple[tuple[Point, ...], ...]
    turned: frozenset[Pair]
    chains: Mapping[Pair, tuple[Point, ...]]


Point = str | tuple[Pair, int]


def layout(graph: Graph) -> Layout:
    """The layers of `graph`. All edges between two roles are drawn as one; self-loops are not drawn."""
    names = [role.name for role in graph.roles]
    pairs = _pairs(graph, names)
    forward, turned = _without_cycles(names, pairs)
    level = _levels(names, forward)
    layers: list[list[Point]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for name in names:
        layers[level[name]].append(name)
    chains: dict[Pair, tuple[Point, ...]] = {}
    for pair in pairs:
        left, right = reversed(pair) if pair in turned else pair
        between: list[Point] = [(pair, number) for number in range(level[left] + 1, level[right])]
        for number, point in enumerate(between, level[left] + 1):
            layers[number].append(point)
        chains[pair] = (left, *between, right)
    _order(layers, [*chains.values()])
    return Layout(tuple(tuple(layer) for layer in layers), frozenset(turned), chains)


def heights(plan: Layout, size: Mapping[Point, float], space: float) -> dict[Point, float]:
    """The middle of every point, at least `space` between two of a layer, all of them 0 or more below the top."""
    near = _neighbours([*plan.chains.values()])
    place: dict[Point, float] = {}
    for layer in plan.layers:
        place |= _stacked(layer, [0.0] * len(layer), size, space)
    order = [*range(len(plan.layers))]
    for sweep in range(2 * SWEEPS):
        for number in order if sweep % 2 == 0 else reversed(order):
            layer = plan.layers[number]
            wanted = [_mean([place[peer] for peer in near.get(point, ())], place[point]) for point in layer]
            place |= _stacked(layer, wanted, size, space)
    top = min((place[point] - size[point] / 2 for point in place), default=0.0)
    return {point: middle - top for point, middle in place.items()}


def _pairs(graph: Graph, names: Sequence[str]) -> list[Pair]:
    """The pairs with an edge; those with a synchronous edge first."""
    edges = sorted(graph.edges, key=lambda edge: edge.asynchronous)
    known = set(names)
    found = [(edge.source, edge.target) for edge in edges if {edge.source, edge.target} <= known]
    return [*dict.fromkeys(pair for pair in found if pair[0] != pair[1])]


def _without_cycles(names: Sequence[str], pairs: Sequence[Pair]) -> tuple[dict[str, set[str]], set[Pair]]:
    """By role, those to its right; and the pairs that were reversed because they would close a cycle."""
    forward: dict[str, set[str]] = {name: set() for name in names}
    turned: set[Pair] = set()
    for left, right in pairs:
        if _leads(forward, right, left):
            turned.add((left, right))
            forward[right].add(left)
        else:
            forward[left].add(right)
    return forward, turned


def _leads(forward: Mapping[str, set[str]], start: str, end: str) -> bool:
    seen = {start}
    left = [start]
    while left:
        name = left.pop()
        if name == end:
            return True
        fresh = forward[name] - seen
        seen |= fresh
        left += fresh
    return False


def _levels(names: Sequence[str], forward: Mapping[str, set[str]]) -> dict[str, int]:
    """The length of the longest path to each role; a role without callers stands before the first that it calls."""
    waits = dict.fromkeys(names, 0)
    for targets in forward.values():
        for name in targets:
            waits[name] += 1
    level = dict.fromkeys(names, 0)
    starts = [name for name in names if not waits[name]]
    ready = [*starts]
    for name in ready:
        for target in sorted(forward[name]):
            level[target] = max(level[target], level[name] + 1)
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    for name in starts:
        level[name] = min((level[target] for target in forward[name]), default=1) - 1
    return level


def _order(layers: list[list[Point]], chains: Sequence[tuple[Point, ...]]) -> None:
    """Sort every layer by the mean places of its points' neighbours, from the left and from the right in turn."""
    left: dict[Point, list[Point]] = {}
    right: dict[Point, list[Point]] = {}
    for chain in chains:
        for one, other in pairwise(chain):
            right.setdefault(one, []).append(other)
            left.setdefault(other, []).append(one)
    for sweep in range(SWEEPS):
        near, order = (left, layers) if sweep % 2 == 0 else (right, layers[::-1])
        place: dict[Point, float] = {}
        for layer in order:
            now = {point: number / max(len(layer) - 1, 1) for number, point in enumerate(layer)}
            means = {
                point: _mean([place[peer] for peer in near.get(point, ())], now[point]) for point in layer
            }
            layer.sort(key=means.__getitem__)
            place |= {point: number / max(len(layer) - 1, 1) for number, point in enumerate(layer)}


def _neighbours(chains: Sequence[tuple[Point, ...]]) -> dict[Point, list[Point]]:
    found: dict[Point, list[Point]] = {}
    for chain in chains:
        for one, other in pairwise(chain):
            found.setdefault(one, []).append(other)
            found.setdefault(other, []).append(one)
    return found


def _stacked(
    layer: Sequence[Point], wanted: Sequence[float], size: Mapping[Point, float], space: float
) -> dict[Point, float]:
    """The points in their order, as near to where they are `wanted` as their sizes allow.

    Each block of points that touch lies where the mean of its points wants it; blocks that run into each other become
    one (pool adjacent violators, which gives the least sum of squared distances).
    """
    offsets = [0.0]
    for one, other in pairwise(layer):
        offsets.append(offsets[-1] + (size[one] + size[other]) / 2 + space)
    blocks: list[tuple[float, int]] = []
    for aim, offset in zip(wanted, offsets, strict=True):
        mean, count = aim - offset, 1
        while blocks and blocks[-1][0] >= mean:
            other_mean, other_count = blocks.pop()
            mean = (mean * count + other_mean * other_count) / (count + other_count)
            count += other_count
        blocks.append((mean, count))
    starts = [mean for mean, count in blocks for _ in range(count)]
    return {point: start + offset for point, start, offset in zip(layer, starts, offsets, strict=False)}


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
