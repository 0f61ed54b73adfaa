"""The computation graph of a job: calls between roles, its faults and parts, and calls that were observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from math import isfinite
from statistics import median_low
from typing import Literal

from msgspec.structs import replace

from unirun.errors import Fault, SpecError
from unirun.spec.job import DIRECTIONS, EDGE_KINDS, Direction, Edge, EdgeKind, Entry, JobSpec
from unirun.spec.read import nearest
from unirun.values import Value, natural, show_ranks
from unirun.wire.reports import LATENCY_BOUNDS, CallCount, RankRange, bounded, merged


class Role(Value):
    """A vertex: `count` identical ranks. `program` is the name of the one that they are; empty for other entries.
    `addresses` are those of its ranks in a job that runs."""

    name: str
    count: int = 1
    program: str = ""
    addresses: tuple[str, ...] = ()


class RoleGraph(Value):
    """Roles in the order of the job, and the edges between them. `faults` says what is wrong with one.

    Which ranks an edge joins follows from its kind. ``all_to_all`` joins every rank with every other, ``one_to_one``
    equal ranks. All other kinds pair ranks in proportion to the counts, so that each rank of the smaller role has an
    even, consecutive part of the larger one. They differ in what is sent along a pair: the same to all
    (``broadcast``), to each its part (``scatter``), from each its part (``gather``).
    """

    roles: tuple[Role, ...]
    edges: tuple[Edge, ...] = ()

    def count(self, role: str) -> int:
        """The number of ranks of `role`. Raises KeyError."""
        for each in self.roles:
            if each.name == role:
                return each.count
        raise KeyError(role)

    def out(self, role: str) -> Iterator[Edge]:
        """The calls that `role` makes."""
        return (edge for edge in self.edges if edge.source == role)

    def into(self, role: str) -> Iterator[Edge]:
        """The calls that `role` gets."""
        return (edge for edge in self.edges if edge.target == role)

    def targets_of(self, edge: Edge, rank: int) -> range:
        """The ranks that rank `rank` of the source calls."""
        return _facing(edge, rank, self.count(edge.source), self.count(edge.target))

    def sources_of(self, edge: Edge, rank: int) -> range:
        """The ranks that call rank `rank` of the target."""
        return _facing(edge, rank, self.count(edge.target), self.count(edge.source))


def _facing(edge: Edge, rank: int, here: int, there: int) -> range:
    """The ranks of a role of `there` ranks that `edge` joins with rank `rank` of a role of `here` ranks."""
    if edge.kind == "all_to_all":
        return range(there)
    if edge.kind == "one_to_one":
        return range(rank, min(rank + 1, there))
    # In proportion: with m the larger count, pair k joins k·here/m with k·there/m.
    if there <= here:
        return range(rank * there // here, rank * there // here + 1)
    return range(-(-rank * there // here), -(-(rank + 1) * there // here))


# Faults and warnings of a graph.
#
# Calls that wait for each other in a circle never end, so a cycle of synchronous edges is a fault. Every loop of
# reinforcement learning is a cycle nonetheless: the actor's weights go to the rollouts, whose samples come back to the
# actor. What makes it run is that one edge of it is not waited for, because it takes effect in a later step; so a cycle
# with an asynchronous edge is allowed.


def faults(graph: RoleGraph) -> tuple[Fault, ...]:
    """All faults of `graph`, in the order of its roles and edges; cycles come last."""
    names = [role.name for role in graph.roles]
    found = [
        Fault(f"roles.{name}", f"there are {times} roles of this name", "rename all but one")
        for name, times in Counter(names).items()
        if times > 1
    ]
    found += (
        Fault(f"roles.{role.name}.count", f"expected 1 or more ranks, found {role.count}")
        for role in graph.roles
        if role.count < 1
    )
    first: dict[tuple[str, str, str], int] = {}
    for number, edge in enumerate(graph.edges):
        where = f"edges[{number}]"
        found += _edge_faults(where, edge, {role.name: role.count for role in graph.roles})
        earlier = first.setdefault((edge.source, edge.target, edge.invocation), number)
        if earlier != number:
            found.append(Fault(where, f"{edge} is edges[{earlier}] again", "leave one of them out"))
    return (*found, *_cycle_faults(graph))


def warnings(graph: RoleGraph, joined: Collection[str] = ()) -> tuple[str, ...]:
    """Warnings about roles without edges, and roles that are called only in a cycle.

    A graph without edges has none. Roles that are `joined` with others, by a collocation for example, need no edge.
    """
    if not graph.edges:
        return ()
    names = [role.name for role in graph.roles]
    called = {edge.target for edge in graph.edges}
    callers = {edge.source for edge in graph.edges}
    starts = [name for name in names if name in callers - called] or names[:1]
    reached = _reached(starts, graph.edges)
    found = []
    # Programs are reached at their addresses, without calls of unirun.
    joined = {*joined, *(role.name for role in graph.roles if role.program)}
    for name in names:
        if name in joined and name not in called | callers:
            continue
        if name not in called | callers:
            found.append(
                f"role {name} has no edge: it is placed and restarted as if it had to do with no other"
            )
        elif name not in reached:
            found.append(f"role {name} is called only in a circle that no role outside of it starts")
    return tuple(found)


def cycles(names: Sequence[str], edges: Iterable[Edge]) -> Iterator[tuple[str, ...]]:
    """Cycles, each starting with its first role in the order of `names`; the graph without them has no cycle.

    A depth-first search finds one for each back edge. Self-loops do not count.
    """
    follows: dict[str, list[str]] = {name: [] for name in names}
    for edge in edges:
        if edge.source in follows and edge.target in follows and edge.source != edge.target:
            follows[edge.source].append(edge.target)
    order = {name: number for number, name in enumerate(names)}
    done: set[str] = set()
    for start in names:
        trail: dict[str, Iterator[str]] = {}
        step: str | None = start if start not in done else None
        while step is not None or trail:
            if step is not None:
                trail[step] = iter(dict.fromkeys(follows[step]))
            top = next(reversed(trail))
            step = next(trail[top], None)
            if step is None:
                del trail[top]
                done.add(top)
            elif step in trail:
                circle = [*trail][[*trail].index(step) :]
                turn = min(range(len(circle)), key=lambda place: order[circle[place]])
                yield (*circle[turn:], *circle[:turn])
                step = None
            elif step in done:
                step = None


def without_circles(graph: RoleGraph) -> RoleGraph:
    """`graph` with an asynchronous edge in every cycle: calls that were seen to end cannot wait for themselves.

    In each cycle it is the call back to the first role.
    """
    names = [role.name for role in graph.roles]
    edges = graph.edges
    while circle := next(cycles(names, [edge for edge in edges if not edge.asynchronous]), None):
        back = circle[-1], circle[0]
        edges = tuple(
            replace(edge, asynchronous=True) if (edge.source, edge.target) == back else edge for edge in edges
        )
    return replace(graph, edges=edges)


def _edge_faults(where: str, edge: Edge, counts: Mapping[str, int]) -> Iterator[Fault]:
    for end, name in (("from", edge.source), ("to", edge.target)):
        if name not in counts:
            yield Fault(f"{where}.{end}", f"no role is called {name!r}", nearest(name, [*counts]))
    if edge.kind not in EDGE_KINDS:
        yield Fault(f"{where}.kind", f"{edge.kind!r} is no kind of edge", nearest(edge.kind, EDGE_KINDS))
    if edge.direction not in DIRECTIONS:
        problem = f"{edge.direction!r} is no direction"
        yield Fault(f"{where}.direction", problem, nearest(edge.direction, DIRECTIONS))
    if not (isfinite(edge.weight) and edge.weight >= 0):
        yield Fault(f"{where}.weight", f"expected 0 or more bytes per step, found {edge.weight}")
    if edge.source == edge.target:
        remedy = "leave it out: ranks of one role meet in their process group"
        yield Fault(where, f"{edge.source} calls itself", remedy)
    elif edge.kind == "one_to_one" and edge.source in counts and edge.target in counts:
        source, target = counts[edge.source], counts[edge.target]
        if source > target:
            problem = f"one_to_one from {source} ranks of {edge.source} to {target} of {edge.target}"
            yield Fault(where, problem, "give both the same count, or use gather")


def _cycle_faults(graph: RoleGraph) -> Iterator[Fault]:
    names = [role.name for role in graph.roles]
    waiting = [edge for edge in graph.edges if not edge.asynchronous]
    for circle in cycles([*dict.fromkeys(names)], waiting):
        way = " → ".join((*circle, circle[0]))
        problem = f"{way}: each waits for the next, so none of these calls ever ends"
        yield Fault("edges", problem, "make the edge asynchronous that takes effect in the next step")


def _reached(starts: Iterable[str], edges: Sequence[Edge]) -> set[str]:
    follows: dict[str, list[str]] = {}
    for edge in edges:
        follows.setdefault(edge.source, []).append(edge.target)
    reached: set[str] = set()
    left = [*starts]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += follows.get(name, ())
    return reached


# The graph of a job, from its spec.


def declared(spec: JobSpec) -> RoleGraph:
    """The roles of `spec` and its edges; without any, a trainer calls each role of workloads. Raises `SpecError`."""
    edges = spec.edges
    if not edges:
        trainers = (role.name for role in spec.roles if role.entry.kind == "trainer")
        workloads = [role.name for role in spec.roles if role.entry.kind == "workload"]
        edges = tuple(Edge(trainer, workload, kind="") for trainer in trainers for workload in workloads)
    # A role that was placed with fewer ranks than it may have is checked with these: its job was let in with them.
    graph_of({role.name: max(role.count, role.most or 0) for role in spec.roles}, edges)
    graph = _graph({role.name: role.count for role in spec.roles}, edges)
    programs = {role.name: _program(role.entry) for role in spec.roles}
    return replace(graph, roles=tuple(replace(role, program=programs[role.name]) for role in graph.roles))


def _program(entry: Entry) -> str:
    return entry.target.rpartition("/")[2] if entry.kind == "program" else ""


def graph_of(counts: Mapping[str, int], edges: Iterable[Edge]) -> RoleGraph:
    """The graph of the roles in `counts`, with every fault of it as a `SpecError`.

    An edge without a kind is ``one_to_one`` between equal counts, ``scatter`` from one rank, ``gather`` to one rank,
    and else ``all_to_all``.
    """
    graph = _graph(counts, edges)
    if found := faults(graph):
        raise SpecError(found)
    return graph


def _graph(counts: Mapping[str, int], edges: Iterable[Edge]) -> RoleGraph:
    roles = tuple(Role(name, count) for name, count in counts.items())
    return RoleGraph(roles, tuple(replace(e, kind=e.kind or _usual_kind(counts, e)) for e in edges))


def _usual_kind(counts: Mapping[str, int], edge: Edge) -> EdgeKind:
    sources, targets = counts.get(edge.source, 1), counts.get(edge.target, 1)
    if sources == targets:
        return "one_to_one"
    if sources == 1:
        return "scatter"
    return "gather" if targets == 1 else "all_to_all"


# Sub-DAGs of a graph, and the blast radius of a failure.

Side = Literal["failed", "peer", "upstream", "downstream"]


def weights(graph: RoleGraph) -> dict[tuple[str, str], float]:
    """Bytes per step between two roles, both ways and all edges together; a pair is in the order of the job's roles.

    An edge of unknown weight counts as one byte: enough to keep two roles together when nothing else matters.
    """
    order = {role.name: number for number, role in enumerate(graph.roles)}
    found: dict[tuple[str, str], float] = {}
    for edge in graph.edges:
        first, second = sorted((edge.source, edge.target), key=order.__getitem__)
        found[first, second] = found.get((first, second), 0.0) + (edge.weight or 1.0)
    return found


def tight_parts(graph: RoleGraph, share: float = 0.1) -> tuple[tuple[str, ...], ...]:
    """The sub-DAGs: roles that tight edges connect, the unit of scheduling. Every role is in one of them.

    An edge is tight when its source waits for it, and when it weighs at least `share` (0 to 1) of the heaviest such
    edge. Where no weight is known all synchronous edges are tight. Parts and their roles are in the job's order.
    """
    waiting = [edge for edge in graph.edges if not edge.asynchronous]
    least = share * max((edge.weight for edge in waiting), default=0.0)
    part = {role.name: role.name for role in graph.roles}

    def root(name: str) -> str:
        while part[name] != name:
            part[name] = part[part[name]]
            name = part[name]
        return name

    for edge in waiting:
        if edge.weight >= least:
            part[root(edge.source)] = root(edge.target)
    together: dict[str, list[str]] = {}
    for role in graph.roles:
        together.setdefault(root(role.name), []).append(role.name)
    return tuple(tuple(names) for names in together.values())


class Affected(Value):
    """Ranks of one role that a failure affects, ascending, and the `reason` in words.

    `side` is ``failed``; ``peer`` for the ranks that are in a process group with one that failed; ``upstream`` for
    those that call it, ``downstream`` for those that it calls, directly or over others. `distance` counts the edges
    between. `blocked` ranks wait until the failed ones are back; a rank that only loses an asynchronous call goes on.
    """

    role: str
    ranks: tuple[int, ...]
    side: Side
    distance: int
    blocked: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.role}:{show_ranks(self.ranks)}"


def affected(graph: RoleGraph, failed: Iterable[str]) -> tuple[Affected, ...]:
    """The ranks affected when `failed` fail: roles (``rollout``) or single ranks (``rollout:1``). The unit of failover.

    First those that failed, then their peers, then upstream and downstream, the nearest first; a role on both sides is
    there twice. A failure spreads over synchronous edges, because a blocked rank blocks those that wait for it; it ends
    at asynchronous edges. Raises KeyError for a role or a rank that the graph does not have.
    """
    down: dict[str, set[int]] = {}
    for name in failed:
        role, colon, rank = name.rpartition(":")
        if not colon:
            role = name
        ranks = set(range(graph.count(role)))
        number = natural(rank) if colon else None
        if colon and number not in ranks:
            raise KeyError(name)
        down.setdefault(role, set()).update(ranks if number is None else {number})
    found = [
        Affected(role.name, tuple(sorted(down[role.name])), "failed", 0, True, "failed")
        for role in graph.roles
        if role.name in down
    ]
    peers = []
    for each in found:
        others = tuple(rank for rank in range(graph.count(each.role)) if rank not in down[each.role])
        if others:
            reason = f"forms its process group anew with {each}"
            peers.append(Affected(each.role, others, "peer", 0, True, reason))
    up = _spread(graph, down, "upstream")
    below = _spread(graph, down, "downstream")
    return (*found, *peers, *up, *below)


Ranks = dict[str, set[int]]


def _spread(graph: RoleGraph, down: Ranks, side: Side) -> list[Affected]:
    """Breadth-first from `down` over synchronous edges; then one step over asynchronous edges from all of these.

    Each rank is in it once: as blocked if it is blocked, by the shortest path.
    """
    seen = {role: set(ranks) for role, ranks in down.items()}
    front = {role: set(ranks) for role, ranks in down.items()}
    levels = []
    found = []
    while front:
        levels.append(front)
        front, told = _step(graph, front, seen, side, len(levels), asynchronous=False)
        found += told
    for distance, level in enumerate(levels, 1):
        found += _step(graph, level, seen, side, distance, asynchronous=True)[1]
    return sorted(found, key=lambda each: each.distance)


def _step(
    graph: RoleGraph, front: Ranks, seen: Ranks, side: Side, distance: int, *, asynchronous: bool
) -> tuple[Ranks, list[Affected]]:
    """The ranks that edges of one sort join to `front` and that are not in `seen`; they are added to `seen`."""
    reached: Ranks = {}
    found = []
    peers_of = graph.sources_of if side == "upstream" else graph.targets_of
    for role, ranks in front.items():
        through = f"{role}:{show_ranks(sorted(ranks))}"
        for edge in graph.into(role) if side == "upstream" else graph.out(role):
            if edge.asynchronous != asynchronous:
                continue
            name = edge.source if side == "upstream" else edge.target
            # Ranks of an all_to_all face the same range, which is gone through once.
            facing = {peer for peers in {peers_of(edge, rank) for rank in ranks} for peer in peers}
            fresh = facing - seen.get(name, set())
            if fresh:
                seen.setdefault(name, set()).update(fresh)
                reached.setdefault(name, set()).update(fresh)
                told = (tuple(sorted(fresh)), side, distance, not asynchronous)
                found.append(Affected(name, *told, _reason(side, edge, through, distance)))
    return reached, found


def _reason(side: Side, edge: Edge, through: str, distance: int) -> str:
    if side == "upstream" and edge.asynchronous:
        text = f"what it sends to {through} {'is lost' if distance == 1 else 'is taken up late'}"
    elif side == "upstream":
        text = f"waits for {through}"
    elif edge.asynchronous:
        text = f"goes on without what {through} sends"
    else:
        text = f"is not called by {through}"
    return f"{text} ({edge})"


# The observed graph: from the calls that workers report.
#
# A report has all calls of a process since its start, so it replaces earlier reports. A restarted worker starts at
# zero: `added` adds the counts of its predecessor.

Counts = tuple[CallCount, ...]

MAX_PLAUSIBLE_COUNT = 1 << 62
"""A greater count is not plausible, and is dropped."""

MOST_LETTERS = 200
"""Letters of a method's name; it and `bounded` limit what the store keeps of a rank."""


ProcessCalls = tuple[str, int, Counts]
"""The calls of one rank: its role, its number in it, and the counts."""


class LearnedEdge(Value):
    """An edge that was seen. `calls` counts every rank that was called; `bytes` went there and `returned` came back;
    `seconds` is how long the answers took, all of them together, and `latencies` are as in `CallCount`."""

    edge: Edge
    calls: int
    bytes: int
    returned: int
    seconds: float
    latencies: tuple[int, ...] = ()


def sound(counts: Iterable[CallCount], ranks: Mapping[str, int]) -> Counts:
    """The plausible ones of `counts`: of known roles and existing `ranks`, with figures in range."""
    return bounded([each for each in counts if _sound(each, ranks.get(each.role, 0))])


def _sound(count: CallCount, ranks: int) -> bool:
    figures = (count.calls, count.bytes, count.returned, count.seconds, *count.latencies)
    return (
        len(count.latencies) in (0, len(LATENCY_BOUNDS) + 1)
        and all(0 <= each < MAX_PLAUSIBLE_COUNT for each in figures)
        and count.calls > 0 < len(count.ranks)
        and len(count.method) <= MOST_LETTERS
        and all(0 <= first <= last < ranks for first, last in count.ranks)
    )


def added(one: Counts, other: Counts) -> Counts:
    """The sum of the counts of two processes that had the same rank, one after the other."""
    if not one or not other:
        return one or other
    found = {_what(each): each for each in one}
    for each in other:
        known = found.get(_what(each))
        found[_what(each)] = each if known is None else _sum(known, each)
    return bounded([*found.values()])


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
    latencies: tuple[int, ...] = ()
    for each in every:
        latencies = _totals(latencies, each.latencies)
    return LearnedEdge(edge, calls, there, back, seconds, latencies)


def _kind(by_rank: Mapping[int, Sequence[CallCount]], sources: int, targets: int) -> EdgeKind:
    reached = [_union(counts) for counts in by_rank.values()]
    one_target = all(_size(each) == 1 for each in reached)
    one_source = sum(map(_size, reached)) == _size(merged(chain.from_iterable(reached)))
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


def _what(count: CallCount) -> tuple[str, str, bool]:
    return count.role, count.method, count.asynchronous


def _sum(one: CallCount, other: CallCount) -> CallCount:
    return replace(
        one,
        calls=one.calls + other.calls,
        bytes=one.bytes + other.bytes,
        returned=one.returned + other.returned,
        seconds=one.seconds + other.seconds,
        ranks=merged((*one.ranks, *other.ranks)),
        split=one.split or other.split,
        latencies=_totals(one.latencies, other.latencies),
    )


def _totals(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


def _union(counts: Sequence[CallCount]) -> tuple[RankRange, ...]:
    if len(counts) == 1 and len(counts[0].ranks) == 1:
        return counts[0].ranks
    return merged(chain.from_iterable(each.ranks for each in counts))


def _size(spans: Iterable[RankRange]) -> int:
    return sum(last - first + 1 for first, last in spans)
