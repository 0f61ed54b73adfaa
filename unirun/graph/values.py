"""The computation graph of a job: roles, and the calls between them. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from unirun.values import Value

Kind = Literal["one_to_one", "broadcast", "scatter", "gather", "all_to_all"]
Direction = Literal["forward", "back", "both"]

KINDS: tuple[Kind, ...] = get_args(Kind)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


class Role(Value):
    """A vertex: `count` identical ranks."""

    name: str
    count: int = 1


class Edge(Value):
    """Ranks of `source` call `invocation` of ranks of `target`.

    `kind` says which rank calls which, see `unirun.graph.instances`. `direction` is the way that most of the bytes go:
    ``forward`` with the call (its arguments), ``back`` with the answer, or ``both``. An `asynchronous` call is one for
    whose end the source does not wait: what it brings counts from some later step on. `weight` is in bytes per step, of
    all ranks and both ways together; 0 when not known.
    """

    source: str
    target: str
    invocation: str = ""
    kind: Kind = "all_to_all"
    direction: Direction = "forward"
    asynchronous: bool = False
    weight: float = 0.0

    def __str__(self) -> str:
        arrow = "⇢" if self.asynchronous else "→"
        call = f": {self.invocation}" if self.invocation else ""
        return f"{self.source} {arrow} {self.target}{call}"


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
