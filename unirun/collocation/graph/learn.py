"""The observed graph: from the calls that workers report.

A report has all calls of a process since its start, so it replaces earlier reports. A restarted worker starts at zero:
`added` adds the counts of its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median_low
from typing import NamedTuple

from msgspec.structs import replace

from unirun.spec.edges import Direction, Edge, Kind
from unirun.values import Value
from unirun.wire.reports import CallCount, RankRange

Counts = tuple[CallCount, ...]

MOST = 1 << 62
"""A greater count is not plausible, and is dropped."""

MOST_COUNTS, MOST_SPANS, MOST_LETTERS = 100, 16, 200
"""Limits per rank: methods, spans of each, and letters of a method's name. They bound what the store keeps of a rank:
the methods with the most bytes; of more spans, one from the first to the last."""


class ProcessCalls(NamedTuple):
    """The calls of one rank."""

    role: str
    rank: int
    counts: Counts


class LearnedEdge(Value):
    """An edge that was seen. `calls` counts every rank that was called; `bytes` went there and `returned` came back;
    `seconds` is how long the answers took, all of them together."""

    edge: Edge
    calls: int
    bytes: int
    returned: int
    seconds: float


def sound(counts: Iterable[CallCount], ranks: Mapping[str, int]) -> Counts:
    """The plausible ones of `counts`: of known roles and existing `ranks`, with figures in range."""
    return _bounded([each for each in counts if _sound(each, ranks.get(each.role, 0))])


def _sound(count: CallCount, ranks: int) -> bool:
    figures = (count.calls, count.bytes, count.returned, count.seconds)
    return (
        all(0 <= each < MOST for each in figures)
        and count.calls > 0 < len(count.ranks)
        and len(count.method) <= MOST_LETTERS
        and all(0 <= span.first <= span.last < ranks for span in count.ranks)
    )


def added(one: Counts, other: Counts) -> Counts:
    """The sum of the counts of two processes that had the same rank, one after the other."""
    if not one or not other:
        return one or other
    found = {_what(each): each for each in one}
    for each in other:
        known = found.get(_what(each))
        found[_what(each)] = each if known is None else _sum(known, each)
    return _bounded([*found.values()])


def learn(callers: Iterable[ProcessCalls], ranks: Mapping[str, int]) -> tuple[LearnedEdge, ...]:
    """The observed edges: one for each method of one role that another role calls, in the order of `ranks`.

    `ranks` has the number of ranks of every role; all counts are `sound`. Weights are bytes per step. The number of
    steps is the median of the calls per method and rank, because most methods are called once in a step.

    The kind follows from which ranks call which. ``one_to_one``: each source has one target, and each target one
    source. ``scatter`` and ``broadcast``: each target has one source; scattered if the ranks of one call got different
    arguments. These need no more sources than targets. ``gather``: each source has one target. Else ``all_to_all``.
    An edge is asynchronous when all of its calls were.
    """
    seen: dict[tuple[str, str, str], dict[int, list[CallCount]]] = {}
    for role, rank, counts in callers:
        for each in counts:
            if each.role != role:
                by_rank = seen.setdefault((role, each.role, each.method), {})
                by_rank.setdefault(rank, []).append(each)
    turns = [
        sum(each.calls for each in counts) // _size(_union(counts))
        for by_rank in seen.values()
        for counts in by_rank.values()
    ]
    steps = max(median_low(turns or [1]), 1)
    order = {name: number for number, name in enumerate(ranks)}
    names = sorted(seen, key=lambda edge: (order[edge[0]], order[edge[1]], edge[2]))
    return tuple(_learned(edge, seen[edge], ranks, steps) for edge in names)


def _learned(
    names: tuple[str, str, str], by_rank: Mapping[int, list[CallCount]], ranks: Mapping[str, int], steps: int
) -> LearnedEdge:
    source, target, method = names
    every = list(chain.from_iterable(by_rank[rank] for rank in sorted(by_rank)))
    there, back = sum(each.bytes for each in every), sum(each.returned for each in every)
    edge = Edge(
        source,
        target,
        method,
        _kind(by_rank, ranks[source], ranks[target]),
        _direction(there, back),
        all(each.asynchronous for each in every),
        (there + back) / steps,
    )
    calls, seconds = sum(each.calls for each in every), sum(each.seconds for each in every)
    return LearnedEdge(edge, calls, there, back, seconds)


def _kind(by_rank: Mapping[int, Sequence[CallCount]], sources: int, targets: int) -> Kind:
    reached = [_union(counts) for counts in by_rank.values()]
    one_target = all(_size(each) == 1 for each in reached)
    one_source = sum(map(_size, reached)) == _size(_merged(chain.from_iterable(reached)))
    if one_target and one_source and sources <= targets:
        return "one_to_one"
    if one_source and sources <= targets:
        split = any(each.split for counts in by_rank.values() for each in counts)
        return "scatter" if split else "broadcast"
    return "gather" if one_target else "all_to_all"


def _direction(there: int, back: int) -> Direction:
    """``both`` unless nine tenths go one way."""
    if back <= 0.1 * (there + back):
        return "forward"
    return "back" if there <= 0.1 * (there + back) else "both"


def _bounded(counts: Sequence[CallCount]) -> Counts:
    if len(counts) > MOST_COUNTS:
        counts = sorted(counts, key=lambda each: each.bytes + each.returned, reverse=True)[:MOST_COUNTS]
    return tuple(
        each
        if len(each.ranks) <= MOST_SPANS
        else replace(
            each, ranks=(RankRange(min(s.first for s in each.ranks), max(s.last for s in each.ranks)),)
        )
        for each in counts
    )


def _what(count: CallCount) -> tuple[str, str, bool]:
    return count.role, count.method, count.asynchronous


def _sum(one: CallCount, other: CallCount) -> CallCount:
    return replace(
        one,
        calls=one.calls + other.calls,
        bytes=one.bytes + other.bytes,
        returned=one.returned + other.returned,
        seconds=one.seconds + other.seconds,
        ranks=_merged((*one.ranks, *other.ranks)),
        split=one.split or other.split,
    )


def _union(counts: Sequence[CallCount]) -> tuple[RankRange, ...]:
    if len(counts) == 1 and len(counts[0].ranks) == 1:
        return counts[0].ranks
    return _merged(chain.from_iterable(each.ranks for each in counts))


def _merged(spans: Iterable[RankRange]) -> tuple[RankRange, ...]:
    """The same ranks as ascending spans that do not overlap."""
    found: list[RankRange] = []
    for span in sorted(spans, key=lambda each: (each.first, each.last)):
        if found and span.first <= found[-1].last + 1:
            found[-1] = RankRange(found[-1].first, max(found[-1].last, span.last))
        else:
            found.append(span)
    return tuple(found)


def _size(spans: Iterable[RankRange]) -> int:
    return sum(span.last - span.first + 1 for span in spans)
