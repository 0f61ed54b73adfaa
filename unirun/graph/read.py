"""Edges as people write them, in a job file or to the builder.

::

    edges:
      - {from: trainer, to: actor, invocation: update, kind: scatter, weight: 64MB}
      - {from: actor, to: rollout, invocation: load, kind: broadcast, async: true, weight: 2GB}
      - "trainer -> reward: score"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from unirun.errors import Fault, SpecError
from unirun.graph.checks import faults
from unirun.graph.values import DIRECTIONS, KINDS, Direction, Edge, Graph, Kind, Role
from unirun.sizes import parse_size
from unirun.spec.read import Reader

KEYS = ("from", "to", "invocation", "kind", "direction", "async", "weight")
_ARROW = re.compile("->|→")
_SHORT = re.compile(r"\s*(?P<source>[^\s:]+)\s*(?:->|→)\s*(?P<target>[^\s:]+?)\s*(?::\s*(?P<call>\S+)\s*)?")


def from_edges(counts: Mapping[str, int], raw: Any) -> Graph:
    """The graph of the roles in `counts` with the edges that `raw` lists. Raises `SpecError` with every fault."""
    graph, found = read_edges(counts, raw)
    if found:
        raise SpecError(found)
    return graph


def read_edges(counts: Mapping[str, int], raw: Any) -> tuple[Graph, tuple[Fault, ...]]:
    """As `from_edges`, with the faults beside the graph, for a caller that has others to tell of at once.

    An edge that cannot be read is left out. An edge without a ``kind`` is ``one_to_one`` between equal counts,
    ``scatter`` from one rank, ``gather`` to one rank, and else ``all_to_all``.
    """
    roles = tuple(Role(name, count) for name, count in counts.items())
    read = Reader()
    if raw is not None and not isinstance(raw, list | tuple):
        read.fault("edges", f"expected a list of edges, found {raw!r}", 'write ["a -> b: method"]')
        raw = ()
    edges: list[Edge] = []
    numbers: list[int] = []
    for number, item in enumerate(raw or ()):
        before = len(read.faults)
        edge = _edge(read, f"edges[{number}]", item, counts)
        if len(read.faults) == before:
            edges.append(edge)
            numbers.append(number)
    graph = Graph(roles, tuple(edges))
    return graph, (*read.faults, *(_renumbered(fault, numbers) for fault in faults(graph)))


def _edge(read: Reader, where: str, item: Any, counts: Mapping[str, int]) -> Edge:
    if isinstance(item, Mapping) and len(item) == 1 and _ARROW.search(str(next(iter(item)))):
        # YAML reads the short form without quotes as a mapping from "a -> b" to the method.
        ((ends_of_it, call),) = item.items()
        item = f"{ends_of_it}: {call}"
    if isinstance(item, str):
        match = _SHORT.fullmatch(item)
        if match is None:
            read.fault(where, f"{item!r} is no edge", 'write "source -> target: method"')
            return Edge("", "")
        item = {"from": match["source"], "to": match["target"], "invocation": match["call"]}
    elif not isinstance(item, Mapping):
        read.fault(where, f"expected an edge, found {item!r}", 'write {from: a, to: b} or "a -> b: method"')
        return Edge("", "")
    fields = read.mapping(item, where)
    read.known(fields, KEYS, where)
    source, target = (read.text(fields.get(key), f"{where}.{key}") for key in ("from", "to"))
    for key in ("from", "to"):
        if fields.get(key) is None or fields[key] == "":
            read.fault(f"{where}.{key}", "it names no role", f"write {key}: ROLE")
    kind = read.choice(fields.get("kind"), f"{where}.kind", KINDS, _usual_kind(counts, source, target))
    direction = read.choice(fields.get("direction"), f"{where}.direction", DIRECTIONS, "forward")
    return Edge(
        source,
        target,
        read.text(fields.get("invocation"), f"{where}.invocation"),
        cast(Kind, kind),
        cast(Direction, direction),
        read.flag(fields.get("async"), f"{where}.async"),
        _weight(read, fields.get("weight"), f"{where}.weight"),
    )


def _usual_kind(counts: Mapping[str, int], source: str, target: str) -> Kind:
    sources, targets = counts.get(source, 1), counts.get(target, 1)
    if sources == targets:
        return "one_to_one"
    if sources == 1:
        return "scatter"
    return "gather" if targets == 1 else "all_to_all"


def _weight(read: Reader, value: Any, where: str) -> float:
    """Bytes per step: a number, or a size with its unit."""
    if value is None:
        return 0.0
    if isinstance(value, str):
        try:
            return float(parse_size(value))
        except ValueError as error:
            read.fault(where, str(error))
            return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        read.fault(where, f"expected a number of bytes, found {value!r}", "write 64MB, or 64000000")
        return 0.0
    try:
        return float(value)
    except OverflowError:
        read.fault(where, "expected a number of bytes, found one of hundreds of digits")
        return 0.0


def _renumbered(fault: Fault, numbers: list[int]) -> Fault:
    """`fault`, which counts the edges that could be read, with the edge's place in what was written."""

    def place(match: re.Match[str]) -> str:
        return f"edges[{numbers[int(match[1])]}]"

    where, problem = (re.sub(r"\bedges\[(\d+)\]", place, text) for text in (fault.where, fault.problem))
    return Fault(where, problem, fault.remedy)
