"""Edges of the computation graph: which role calls which, as values and as people write them.

::

    edges:
      - {from: trainer, to: actor, invocation: update, kind: scatter, weight: 64MB}
      - {from: actor, to: rollout, invocation: load, kind: broadcast, async: true, weight: 2GB}
      - "trainer -> reward: score"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from unirun.sizes import parse_size
from unirun.spec.read import Reader, shown
from unirun.values import Value

Kind = Literal["one_to_one", "broadcast", "scatter", "gather", "all_to_all"]
Direction = Literal["forward", "back", "both"]

KINDS: tuple[Kind, ...] = get_args(Kind)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

KEYS = ("from", "to", "invocation", "kind", "direction", "async", "weight")
_ARROW = re.compile("->|→")
_SHORT = re.compile(r"\s*(?P<source>[^\s:]+)\s*(?:->|→)\s*(?P<target>[^\s:]+?)\s*(?::\s*(?P<call>\S+)\s*)?")


class Edge(Value):
    """Ranks of `source` call `invocation` of ranks of `target`.

    `kind` says which rank calls which, see `unirun.graph.Graph`; empty in a spec that leaves it to the numbers of
    ranks. `direction` is the way that most of the bytes go: ``forward`` with the call (its arguments), ``back`` with
    the answer, or ``both``. An `asynchronous` call is one for whose end the source does not wait: its results count
    from some later step on. `weight` is in bytes per step, of all ranks and both ways together; 0 when not known.
    """

    source: str
    target: str
    invocation: str = ""
    kind: Kind | Literal[""] = "all_to_all"
    direction: Direction = "forward"
    asynchronous: bool = False
    weight: float = 0.0

    def __str__(self) -> str:
        arrow = "⇢" if self.asynchronous else "→"
        call = f": {self.invocation}" if self.invocation else ""
        return f"{self.source} {arrow} {self.target}{call}"


def read_edges(read: Reader, value: Any) -> tuple[Edge, ...]:
    """The ``edges`` of a job file. What is wrong with one is a fault in `read`."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        read.fault("edges", f"expected a list of edges, found {shown(value)}", 'write ["a -> b: method"]')
        return ()
    return tuple(_edge(read, f"edges[{number}]", item) for number, item in enumerate(value))


def _edge(read: Reader, where: str, item: Any) -> Edge:
    if isinstance(item, Mapping) and len(item) == 1 and _ARROW.search(str(next(iter(item)))):
        # YAML reads the short form without quotes as a mapping from "a -> b" to the method.
        ((ends_of_it, call),) = item.items()
        item = f"{ends_of_it}: {call}"
    if isinstance(item, str):
        match = _SHORT.fullmatch(item)
        if match is None:
            read.fault(where, f"{shown(item)} is no edge", 'write "source -> target: method"')
            return Edge("", "")
        item = {"from": match["source"], "to": match["target"], "invocation": match["call"]}
    elif not isinstance(item, Mapping):
        problem = f"expected an edge, found {shown(item)}"
        read.fault(where, problem, 'write {from: a, to: b} or "a -> b: method"')
        return Edge("", "")
    fields = read.mapping(item, where)
    read.known(fields, KEYS, where)
    source, target = (read.text(fields.get(key), f"{where}.{key}") for key in ("from", "to"))
    for key in ("from", "to"):
        if fields.get(key) is None or fields[key] == "":
            read.fault(f"{where}.{key}", "it names no role", f"write {key}: ROLE")
    direction = read.choice(fields.get("direction"), f"{where}.direction", DIRECTIONS, "forward")
    return Edge(
        source,
        target,
        read.text(fields.get("invocation"), f"{where}.invocation"),
        cast(Kind, read.choice(fields.get("kind"), f"{where}.kind", KINDS, "")),
        cast(Direction, direction),
        read.flag(fields.get("async"), f"{where}.async"),
        _weight(read, fields.get("weight"), f"{where}.weight"),
    )


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
        read.fault(where, f"expected a number of bytes, found {shown(value)}", "write 64MB, or 64000000")
        return 0.0
    try:
        return float(value)
    except OverflowError:
        read.fault(where, "expected a number of bytes, found one of hundreds of digits")
        return 0.0
