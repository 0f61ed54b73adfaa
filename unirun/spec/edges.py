"""Edges of the computation graph and channels of weights, as values and as people write them.

::

    edges:
      - {from: trainer, to: actor, invocation: update, kind: scatter, weight: 64MB}
      - {from: actor, to: rollout, invocation: load, kind: broadcast, async: true, weight: 2GB}
      - "trainer -> reward: score"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

from unirun.spec.read import Section, nearest, parse_size, shown
from unirun.values import Value

Kind = Literal["one_to_one", "broadcast", "scatter", "gather", "all_to_all"]
Direction = Literal["forward", "back", "both"]

KINDS: tuple[Kind, ...] = get_args(Kind)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

EDGE_KEYS = ("from", "to", "invocation", "kind", "direction", "async", "weight")
_ARROW = re.compile("->|→")
_SHORT = re.compile(r"\s*(?P<source>[^\s:]+)\s*(?:->|→)\s*(?P<target>[^\s:]+?)\s*(?::\s*(?P<call>\S+)\s*)?")


class Edge(Value):
    """Ranks of `source` call `invocation` of ranks of `target`.

    `kind` says which rank calls which, see `unirun.collocation.graph.RoleGraph`; empty in a spec that leaves it to the
    numbers of ranks. `direction` is the way that most of the bytes go: ``forward`` with the call (its arguments),
    ``back`` with the answer, or ``both``. An `asynchronous` call is one for whose end the source does not wait: its
    results count from some later step on. `weight` is in bytes per step, of all ranks and both ways together; 0 when
    not known.
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


def read_edges(job: Section) -> tuple[Edge, ...]:
    """The ``edges`` of a job file. The faults are added to those of `job`."""
    items = job.items("edges", "edges", 'write ["a -> b: method"]')
    return tuple(_edge(items, where) for where in items.fields)


def _edge(items: Section, where: str) -> Edge:
    item = items.fields[where]
    if isinstance(item, Mapping) and len(item) == 1 and _ARROW.search(str(next(iter(item)))):
        # YAML reads the short form without quotes as a mapping from "a -> b" to the method.
        ((ends_of_it, call),) = item.items()
        item = f"{ends_of_it}: {call}"
    if isinstance(item, str):
        match = _SHORT.fullmatch(item)
        if match is None:
            items.fault(where, f"{shown(item)} is no edge", 'write "source -> target: method"')
            return Edge("", "")
        edge = items.below(
            where, {"from": match["source"], "to": match["target"], "invocation": match["call"]}
        )
    elif isinstance(item, Mapping):
        edge = items.section(where)
    else:
        problem = f"expected an edge, found {shown(item)}"
        items.fault(where, problem, 'write {from: a, to: b} or "a -> b: method"')
        return Edge("", "")
    edge.known(EDGE_KEYS)
    for key in ("from", "to"):
        if edge.fields.get(key) in (None, ""):
            edge.fault(key, "it names no role", f"write {key}: ROLE")
    return Edge(
        edge.text("from"),
        edge.text("to"),
        edge.text("invocation"),
        cast(Kind, edge.choice("kind", KINDS, "")),
        cast(Direction, edge.choice("direction", DIRECTIONS, "forward")),
        edge.flag("async"),
        _weight(edge),
    )


def _weight(edge: Section) -> float:
    """Bytes per step: a number, or a size with its unit."""
    value = edge.fields.get("weight")
    if value is None:
        return 0.0
    try:
        if isinstance(value, str):
            return float(parse_size(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except ValueError as error:
        edge.fault("weight", str(error))
        return 0.0
    except OverflowError:
        edge.fault("weight", "expected a number of bytes, found one of hundreds of digits")
        return 0.0
    edge.fault("weight", f"expected a number of bytes, found {shown(value)}", "write 64MB, or 64000000")
    return 0.0


# Channels of weights: from which role they go to which, as values and as people write them.
#
# ::
#
#     channels:
#       policy: {publisher: actor, receivers: [rollout, reference]}

CHANNEL_KEYS = ("publisher", "receivers")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ChannelSpec(Value):
    """Weights go from the ranks of the role `publisher` to those of `receivers`."""

    name: str
    publisher: str
    receivers: tuple[str, ...]


def read_channels(job: Section, roles: Sequence[str]) -> tuple[ChannelSpec, ...]:
    """The ``channels`` of a job file with these roles. The faults are added to those of `job`."""
    channels = job.section("channels")
    found = []
    for name in channels.fields:
        if not _NAME.fullmatch(name):
            channels.fault(name, f"{name!r} is no name of a channel", "begin with a letter: policy")
        about = channels.section(name)
        about.known(CHANNEL_KEYS)
        channel = ChannelSpec(name, about.text("publisher"), about.texts("receivers"))
        for key, named in (("publisher", (channel.publisher,)), ("receivers", channel.receivers)):
            if not named or named == ("",):
                about.fault(
                    key, "it names no role", f"write {key}: {'ROLE' if key == 'publisher' else '[ROLE]'}"
                )
                continue
            for role in named:
                if role not in roles:
                    about.fault(key, f"no role is called {role!r}", nearest(role, [*roles]))
        if len({channel.publisher, *channel.receivers}) <= len(channel.receivers):
            about.fault("receivers", "a role is named twice", "name each role once")
        found.append(channel)
    return tuple(found)
