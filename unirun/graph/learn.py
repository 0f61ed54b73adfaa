"""The graph as it is: from what workers report of the calls that they make.

Each worker counts its calls since it was started, so a report holds everything that the earlier ones did, and a restart
begins again at zero. What was observed is therefore kept by worker and incarnation, and of two reports of one
incarnation the greater counts. So reports may be lost, repeated, and merged in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from unirun.graph.values import Direction, Edge, Graph, Kind, Role


@dataclass(frozen=True, slots=True)
class CallReport:
    """What one worker has called of one rank since it was started.

    `bytes` went there as arguments, `returned` came back as results; `seconds` is how long the worker waited for all
    of the calls together. `incarnation` is the worker's own. A call that is not waited for is `asynchronous`.
    """

    source_role: str
    target_role: str
    method: str
    calls: int
    bytes: int
    seconds: float = 0.0
    returned: int = 0
    source_rank: int = 0
    target_rank: int = 0
    incarnation: int = 0
    asynchronous: bool = False


class Pair(NamedTuple):
    """One rank that calls a method of another."""

    source_role: str
    source_rank: int
    target_role: str
    target_rank: int
    method: str
    asynchronous: bool


class Counts(NamedTuple):
    """Calls, bytes there, bytes back, seconds of waiting."""

    calls: int = 0
    bytes: int = 0
    returned: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that was reported; `Observed()` is nothing. By pair of ranks and by incarnation of the caller."""

    counts: Mapping[tuple[Pair, int], Counts] = field(default_factory=dict)

    @classmethod
    def of(cls, reports: Iterable[CallReport]) -> Observed:
        """What `reports` tell, whatever their order."""
        found: dict[tuple[Pair, int], Counts] = {}
        for each in reports:
            ends = (each.source_role, each.source_rank, each.target_role, each.target_rank)
            key = Pair(*ends, each.method, each.asynchronous), each.incarnation
            new = Counts(each.calls, each.bytes, each.returned, each.seconds)
            found[key] = _greater(found.get(key, Counts()), new)
        return cls(found)

    def __or__(self, other: Observed) -> Observed:
        """What either tells: commutative, associative, and a report that both have counts once."""
        found = dict(self.counts)
        for key, counts in other.counts.items():
            found[key] = _greater(found.get(key, Counts()), counts)
        return Observed(found)

    def totals(self) -> dict[Pair, Counts]:
        """The sums over all incarnations."""
        found: dict[Pair, Counts] = {}
        for (pair, _), counts in sorted(self.counts.items()):
            found[pair] = _added(found.get(pair, Counts()), counts)
        return found


def learn(observed: Observed, counts: Mapping[str, int] | None = None, *, steps: int | None = None) -> Graph:
    """The graph that was `observed`: an edge for each method that one role calls of another.

    `counts` has the ranks of the roles, as far as they are known; others have as many as were seen. Weights are bytes
    per step, of which there were `steps`; without it, as many as the median pair of ranks had calls, because most
    methods are called once in a step. Kinds are guessed from who called whom: each rank one other → ``one_to_one``;
    each target one source → ``broadcast`` if all got as many bytes a call (to 1 %), else ``scatter``; each source
    one target → ``gather``; else ``all_to_all``.
    """
    totals = {pair: each for pair, each in observed.totals().items() if each.calls > 0}
    ranks = dict(counts or {})
    for pair in totals:
        for role, rank in ((pair.source_role, pair.source_rank), (pair.target_role, pair.target_rank)):
            ranks[role] = max(ranks.get(role, 0), rank + 1)
    made = steps or median_low([each.calls for each in totals.values()] or [1])
    edges: dict[tuple[str, str, str], dict[Pair, Counts]] = {}
    for pair, each in totals.items():
        edges.setdefault((pair.source_role, pair.target_role, pair.method), {})[pair] = each
    return Graph(
        tuple(Role(name, count) for name, count in ranks.items()),
        tuple(_edge(*names, pairs, made) for names, pairs in edges.items() if names[0] != names[1]),
    )


def _edge(source: str, target: str, method: str, pairs: Mapping[Pair, Counts], steps: int) -> Edge:
    there = sum(each.bytes for each in pairs.values())
    back = sum(each.returned for each in pairs.values())
    # Some callers may wait for what others send off: then it is waited for.
    asynchronous = all(pair.asynchronous for pair in pairs)
    return Edge(
        source, target, method, _kind(pairs), _direction(there, back), asynchronous, (there + back) / steps
    )


def _kind(pairs: Mapping[Pair, Counts]) -> Kind:
    targets: dict[int, set[int]] = {}
    sources: dict[int, set[int]] = {}
    for pair in pairs:
        targets.setdefault(pair.source_rank, set()).add(pair.target_rank)
        sources.setdefault(pair.target_rank, set()).add(pair.source_rank)
    one_target = all(len(each) == 1 for each in targets.values())
    one_source = all(len(each) == 1 for each in sources.values())
    if one_target and one_source:
        return "one_to_one"
    if one_source:
        sizes = [each.bytes / each.calls for each in pairs.values()]
        return "broadcast" if max(sizes) <= 1.01 * min(sizes) else "scatter"
    return "gather" if one_target else "all_to_all"


def _direction(there: int, back: int) -> Direction:
    """``both`` unless nine tenths go one way."""
    if back <= 0.1 * (there + back):
        return "forward"
    return "back" if there <= 0.1 * (there + back) else "both"


def _greater(one: Counts, other: Counts) -> Counts:
    return Counts(
        max(one.calls, other.calls),
        max(one.bytes, other.bytes),
        max(one.returned, other.returned),
        max(one.seconds, other.seconds),
    )


def _added(one: Counts, other: Counts) -> Counts:
    return Counts(
        one.calls + other.calls,
        one.bytes + other.bytes,
        one.returned + other.returned,
        one.seconds + other.seconds,
    )
