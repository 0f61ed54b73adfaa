"""The computation graph of a job: roles, and the calls between them. Values only."""

from __future__ import annotations

from collections.abc import Iterator

from unirun.spec.edges import Edge
from unirun.values import Value


class Role(Value):
    """A vertex: `count` identical ranks."""

    name: str
    count: int = 1


class Graph(Value):
    """Roles in the order of the job, and the edges between them. `unirun.graph.faults` says what is wrong with one."""

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
