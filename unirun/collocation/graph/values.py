"""The computation graph of a job: roles, and the calls between them, of whole roles and rank by rank."""

from __future__ import annotations

from collections.abc import Iterator

from unirun.spec.edges import Edge
from unirun.values import Value


class Role(Value):
    """A vertex: `count` identical ranks. `program` is the name of the one that they are; empty for other entries.
    `addresses` are those of its ranks in a job that runs."""

    name: str
    count: int = 1
    program: str = ""
    addresses: tuple[str, ...] = ()


class Graph(Value):
    """Roles in the order of the job, and the edges between them. `unirun.collocation.graph.faults` says what is wrong with one.

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
