"""Faults and warnings of a graph.

Calls that wait for each other in a circle never end, so a cycle of synchronous edges is a fault. Every loop of
reinforcement learning is a cycle nonetheless: the actor's weights go to the rollouts, whose samples come back to the
actor. What makes it run is that one edge of it is not waited for, because it takes effect in a later step; so a cycle
with an asynchronous edge is allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite

from msgspec.structs import replace

from unirun.collocation.graph.values import Graph
from unirun.errors import Fault
from unirun.spec.edges import DIRECTIONS, KINDS, Edge
from unirun.spec.read import nearest


def faults(graph: Graph) -> tuple[Fault, ...]:
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


def warnings(graph: Graph, joined: Collection[str] = ()) -> tuple[str, ...]:
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


def without_circles(graph: Graph) -> Graph:
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
    if edge.kind not in KINDS:
        yield Fault(f"{where}.kind", f"{edge.kind!r} is no kind of edge", nearest(edge.kind, KINDS))
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


def _cycle_faults(graph: Graph) -> Iterator[Fault]:
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
