"""Text formats of a graph: Mermaid, DOT, a tree for terminals, and the edges of a job file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from unirun.collocation.graph.values import Role, RoleGraph
from unirun.spec.edges import Edge
from unirun.spec.read import show_size
from unirun.values import Value

# The colours of role states, for all pictures.


class Style(Value):
    """Colours in ``#rrggbb`` that are legible together on any background, and the code of a terminal's colour."""

    fill: str
    stroke: str
    text: str
    ansi: str


PLAIN = Style("#e2e8f0", "#64748b", "#0f172a", "")
_GREEN = Style("#bbf7d0", "#15803d", "#052e16", "32")
_RED = Style("#fecaca", "#b91c1c", "#450a0a", "31")
_AMBER = Style("#fde68a", "#b45309", "#451a03", "33")
_BLUE = Style("#bfdbfe", "#1d4ed8", "#172554", "34")

LOOKS = {
    "running": _GREEN,
    "succeeded": _GREEN,
    "restarting": _AMBER,
    "reforming": _AMBER,
    "stopping": _AMBER,
    "stopped": _AMBER,
    "starting": _BLUE,
    "waiting": _BLUE,
    "launching": _BLUE,
    "failed": _RED,
    "lost": _RED,
}
"""By the word for the phase of a role."""


def look(state: str) -> Style:
    """The look of a state; grey for one that is not known, and for none."""
    return LOOKS.get(state, PLAIN)


ADDRESSES = 4
"""Addresses of a role that are shown."""

NO_STATES: Mapping[str, str] = {}


def mermaid(graph: RoleGraph, states: Mapping[str, str] = NO_STATES) -> str:
    """A flowchart for Mermaid, as Markdown of many hosts shows it. `states` has the phases of roles by their names."""
    ids = {role.name: f"r{number}" for number, role in enumerate(graph.roles)}
    lines = ["flowchart LR"]
    for role in graph.roles:
        label = "<br/>".join(_mermaid(line) for line in vertex_lines(role, states))
        left, right = ("[[", "]]") if role.program else ("[", "]")
        lines.append(f'    {ids[role.name]}{left}"{label}"{right}')
    for edge in graph.edges:
        arrow = "-.->" if edge.asynchronous else "-->"
        label = _mermaid(edge_line(edge))
        lines.append(f'    {ids[edge.source]} {arrow}|"{label}"| {ids[edge.target]}')
    for name, state in states.items():
        if name in ids:
            shown = look(state)
            style = f"fill:{shown.fill},stroke:{shown.stroke},color:{shown.text}"
            lines.append(f"    style {ids[name]} {style}")
    return "\n".join(lines) + "\n"


def dot(graph: RoleGraph, states: Mapping[str, str] = NO_STATES) -> str:
    """A digraph for Graphviz."""
    ids = {role.name: f"r{number}" for number, role in enumerate(graph.roles)}
    lines = ["digraph job {", "    rankdir=LR;", '    node [shape=box, style="rounded,filled"];']
    for role in graph.roles:
        shown = look(states.get(role.name, ""))
        label = "\\n".join(_dot(line) for line in vertex_lines(role, states))
        colours = f'fillcolor="{shown.fill}", color="{shown.stroke}", fontcolor="{shown.text}"'
        shape = ', shape=component, style="filled"' if role.program else ""
        lines.append(f'    {ids[role.name]} [label="{label}", {colours}{shape}];')
    for edge in graph.edges:
        style = ", style=dashed" if edge.asynchronous else ""
        lines.append(
            f'    {ids[edge.source]} -> {ids[edge.target]} [label="{_dot(edge_line(edge))}"{style}];'
        )
    return "\n".join([*lines, "}"]) + "\n"


def tree(graph: RoleGraph, states: Mapping[str, str] = NO_STATES, *, colour: bool = False) -> str:
    """A tree for a terminal: roles without callers, and below each the roles that it calls. A role is expanded once.

    With `colour`, names are in the colours of their states.
    """
    called = {edge.target for edge in graph.edges}
    starts = [role for role in graph.roles if role.name not in called]
    shown: set[str] = set()
    lines: list[str] = []
    # Roles that only a cycle leads to: start with the first.
    for role in (*starts, *graph.roles):
        if role.name not in shown:
            lines.append(_tree_vertex(role, states, colour))
            lines += _branches(graph, role.name, states, colour, shown)
    return "".join(f"{line}\n" for line in lines)


def yaml(graph: RoleGraph) -> str:
    """The edges of `graph` for a job file: whole bytes, without values that equal the defaults."""
    lines = ["edges:"] if graph.edges else ["edges: []"]
    for edge in graph.edges:
        said = {
            "from": edge.source,
            "to": edge.target,
            "invocation": edge.invocation or None,
            "kind": edge.kind,
            "direction": None if edge.direction == "forward" else edge.direction,
            "async": edge.asynchronous or None,
            "weight": round(edge.weight) or None,
        }
        # An object of JSON is one of YAML.
        lines.append(f"  - {json.dumps({key: value for key, value in said.items() if value is not None})}")
    return "".join(f"{line}\n" for line in lines)


def vertex_lines(role: Role, states: Mapping[str, str]) -> tuple[str, ...]:
    """The text of a role's box: its name and count, the program that it runs, its state and addresses if known."""
    shown = role.addresses[:ADDRESSES]
    left = f"and {len(role.addresses) - len(shown)} more" if len(role.addresses) > len(shown) else ""
    more = (role.program, states.get(role.name, ""), *shown, left)
    return (f"{role.name} ×{role.count}", *(each for each in more if each))


def edge_line(edge: Edge) -> str:
    """The label of an edge: ``update · scatter · 64.0 MB``."""
    arrow = {"forward": "", "back": "⟵ ", "both": "⟷ "}.get(edge.direction, "")
    size = f"{arrow}{show_size(edge.weight)}" if edge.weight > 0 else arrow.strip()
    return " · ".join(part for part in (edge.invocation, edge.kind, size) if part)


def _branches(
    graph: RoleGraph, start: str, states: Mapping[str, str], colour: bool, shown: set[str]
) -> Iterator[str]:
    """The lines below `start`, without recursion: a chain of roles may be longer than Python's stack."""
    roles = {role.name: role for role in graph.roles}
    shown.add(start)
    stack = [("", edge, last) for edge, last in _with_last(graph, start)]
    while stack:
        indent, edge, last = stack.pop()
        arrow = "⇢" if edge.asynchronous else "→"
        line = f"{indent}{'└─' if last else '├─'} {printable(edge_line(edge))} {arrow} "
        target = roles.get(edge.target, Role(edge.target, 0))
        again = target.name in shown
        yield line + _tree_vertex(target, states, colour) + (" (above)" if again else "")
        if not again:
            shown.add(target.name)
            below = indent + ("   " if last else "│  ")
            stack += ((below, each, end) for each, end in _with_last(graph, target.name))


def _with_last(graph: RoleGraph, role: str) -> list[tuple[Edge, bool]]:
    """The calls of `role`, the last first, for a stack."""
    edges = [*graph.out(role)]
    return [(edge, place == 0) for place, edge in enumerate(reversed(edges))]


def _tree_vertex(role: Role, states: Mapping[str, str], colour: bool) -> str:
    name, *state = (printable(line) for line in vertex_lines(role, states))
    shown = look(states.get(role.name, ""))
    if colour and shown is not PLAIN:
        name = f"\x1b[{shown.ansi}m{name}\x1b[0m"
    return "  ".join((name, *state))


def printable(text: str) -> str:
    """`text` with control and unprintable characters as escapes such as ``\\x1b``."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _mermaid(text: str) -> str:
    """Mermaid has entities by number; whatever could mean something to it is written as one."""
    return re.sub(r"[^\w .:·×()⟵⟷-]", lambda match: f"#{ord(match[0])};", printable(text))


def _dot(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
