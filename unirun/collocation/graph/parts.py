"""Sub-DAGs of a graph, and the blast radius of a failure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Literal

from unirun.collocation.graph.values import Graph
from unirun.spec.edges import Edge
from unirun.values import Value

Side = Literal["failed", "peer", "upstream", "downstream"]


def weights(graph: Graph) -> dict[tuple[str, str], float]:
    """Bytes per step between two roles, both ways and all edges together; a pair is in the order of the job's roles.

    An edge of unknown weight counts as one byte: enough to keep two roles together when nothing else matters.
    """
    order = {role.name: number for number, role in enumerate(graph.roles)}
    found: dict[tuple[str, str], float] = {}
    for edge in graph.edges:
        first, second = sorted((edge.source, edge.target), key=order.__getitem__)
        found[first, second] = found.get((first, second), 0.0) + (edge.weight or 1.0)
    return found


def tight_parts(graph: Graph, share: float = 0.1) -> tuple[tuple[str, ...], ...]:
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


def affected(graph: Graph, failed: Iterable[str]) -> tuple[Affected, ...]:
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
        if colon and not (rank.isdecimal() and int(rank) in ranks):
            raise KeyError(name)
        down.setdefault(role, set()).update({int(rank)} if colon else ranks)
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


def _spread(graph: Graph, down: Ranks, side: Side) -> list[Affected]:
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
    graph: Graph, front: Ranks, seen: Ranks, side: Side, distance: int, *, asynchronous: bool
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


def show_ranks(ranks: Iterable[int]) -> str:
    """Ascending `ranks` as people write them: ``0-3,7``."""
    runs = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        runs.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}")
    return ",".join(runs)
