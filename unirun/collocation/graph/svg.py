"""A graph as SVG, Mermaid, DOT, text and the edges of a job file.

Calls go from left to right. Each begins with a straight piece under its label, so a label is never on another line. One
that closes a cycle goes the other way round: it leaves its role on the left, and its label stands where it arrives.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

from unirun.collocation.graph.values import Role, RoleGraph
from unirun.spec.job import Edge
from unirun.spec.read import printable, show_size
from unirun.values import Value

# Text formats of a graph: Mermaid, DOT, a tree for terminals, and the edges of a job file.

# The colours of role states, for all pictures.


class Style(Value):
    """Colours in ``#rrggbb`` that are legible together on any background, and the code of a terminal's colour."""

    fill: str
    stroke: str
    text: str
    ansi: str


INK, FAINT = "#0f172a", "#64748b"
"""The colours of text, and of what matters less."""

PLAIN = Style("#e2e8f0", FAINT, INK, "")
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
    "pending": _AMBER,
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


def coloured(text: str, state: str) -> str:
    """`text` in a terminal's colour for a state."""
    code = look(state).ansi
    return f"\x1b[{code}m{text}\x1b[0m" if code else text


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
    return "  ".join((coloured(name, states.get(role.name, "")) if colour else name, *state))


def _mermaid(text: str) -> str:
    """Mermaid has entities by number; whatever could mean something to it is written as one."""
    return re.sub(r"[^\w .:·×()⟵⟷-]", lambda match: f"#{ord(match[0])};", printable(text))


def _dot(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


# The writer of all SVG pictures: a page with its background, boxes, and text in a monospaced font. Sizes are in pixels.

_ASPECT = 0.62
"""The width of a letter of a monospaced font in parts of its size, rounded up."""


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element around `content`, which is SVG itself.

    An underscore in the name of an attribute is a hyphen. One that is None is left out.
    """
    told = "".join(
        f' {key.replace("_", "-")}="{escape(f"{value:g}" if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{told}>{content}</{name}>" if content else f"<{name}{told}/>"


def document(
    width: float, height: float, font: float, parts: Iterable[str], *, stretched: bool = False
) -> str:
    """A whole picture, on a white background so that it is legible on a light and on a dark page.

    One that is `stretched` is as large as the window that shows it.
    """
    w, h = math.ceil(width), math.ceil(height)
    back = element("rect", width=w, height=h, rx=10, fill="#ffffff")
    picture = element(
        "svg",
        "\n".join(["", back, *parts, ""]),
        xmlns="http://www.w3.org/2000/svg",
        width=None if stretched else w,
        height=None if stretched else h,
        viewBox=f"0 0 {w} {h}",
        font_family="ui-monospace, DejaVu Sans Mono, monospace",
        font_size=font,
    )
    return f"{picture}\n"


def box(x: float, y: float, width: float, height: float, *, program: bool = False, **look: object) -> str:
    """A rectangle; that of a `program` has sharp corners and bars at its sides."""
    frame = element("rect", x=x, y=y, width=width, height=height, **look | {"rx": 0} if program else look)
    if not program:
        return frame
    d = " ".join(f"M{at:g} {y:g}v{height:g}" for at in (x + 5, x + width - 5))
    return f"{frame}\n{element('path', d=d, fill='none', stroke=look['stroke'], stroke_width=1.5)}"


def text_at(text: str, x: float, y: float, fill: str = INK, **look: object) -> str:
    """One line of text whose middle is at height `y`."""
    place = {"x": x, "y": y, "dominant-baseline": "central", "fill": fill, "xml:space": "preserve"}
    return element("text", escape(printable(text), quote=False), **place, **look)


def text_width(text: str, font: float) -> float:
    """The width of one line of text of the size `font`."""
    return len(printable(text)) * font * _ASPECT


# The layout of a picture: layers from left to right, with calls to the right where that is possible.
#
# The method is that of Sugiyama, Tagawa and Toda (1981): turn the edges that close a cycle, give every vertex a layer,
# cut edges over several layers into pieces, order each layer by the means of its neighbours' places, then move
# everything to heights that keep edges straight.

Pair = tuple[str, str]
"""(caller, called)"""

SWEEPS = 8
"""Passes of the ordering of layers by their neighbours; small graphs converge after three or four."""


class Layout(Value):
    """`layers` are the points in each layer from the top: a role's name, or (pair, layer) where an edge passes by.

    `turned` are the pairs that go from right to left. `chains` are the points of each pair, from the left.
    """

    layers: tuple[tuple[Point, ...], ...]
    turned: frozenset[Pair]
    chains: Mapping[Pair, tuple[Point, ...]]


Point = str | tuple[Pair, int]


def layout(graph: RoleGraph) -> Layout:
    """The layers of `graph`. All edges between two roles are drawn as one; self-loops are not drawn."""
    names = [role.name for role in graph.roles]
    pairs = _pairs(graph, names)
    forward, turned = _without_cycles(names, pairs)
    level = _levels(names, forward)
    layers: list[list[Point]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for name in names:
        layers[level[name]].append(name)
    chains: dict[Pair, tuple[Point, ...]] = {}
    for pair in pairs:
        left, right = reversed(pair) if pair in turned else pair
        between: list[Point] = [(pair, number) for number in range(level[left] + 1, level[right])]
        for number, point in enumerate(between, level[left] + 1):
            layers[number].append(point)
        chains[pair] = (left, *between, right)
    _order(layers, [*chains.values()])
    return Layout(tuple(tuple(layer) for layer in layers), frozenset(turned), chains)


def heights(plan: Layout, size: Mapping[Point, float], space: float) -> dict[Point, float]:
    """The middle of every point, at least `space` between two of a layer, all of them 0 or more below the top."""
    near = _neighbours([*plan.chains.values()])
    place: dict[Point, float] = {}
    for layer in plan.layers:
        place |= _stacked(layer, [0.0] * len(layer), size, space)
    order = [*range(len(plan.layers))]
    for sweep in range(2 * SWEEPS):
        for number in order if sweep % 2 == 0 else reversed(order):
            layer = plan.layers[number]
            wanted = [_mean([place[peer] for peer in near.get(point, ())], place[point]) for point in layer]
            place |= _stacked(layer, wanted, size, space)
    top = min((place[point] - size[point] / 2 for point in place), default=0.0)
    return {point: middle - top for point, middle in place.items()}


def _pairs(graph: RoleGraph, names: Sequence[str]) -> list[Pair]:
    """The pairs with an edge; those with a synchronous edge first."""
    edges = sorted(graph.edges, key=lambda edge: edge.asynchronous)
    known = set(names)
    found = [(edge.source, edge.target) for edge in edges if {edge.source, edge.target} <= known]
    return [*dict.fromkeys(pair for pair in found if pair[0] != pair[1])]


def _without_cycles(names: Sequence[str], pairs: Sequence[Pair]) -> tuple[dict[str, set[str]], set[Pair]]:
    """By role, those to its right; and the pairs that were reversed because they would close a cycle."""
    forward: dict[str, set[str]] = {name: set() for name in names}
    turned: set[Pair] = set()
    for left, right in pairs:
        if _leads(forward, right, left):
            turned.add((left, right))
            forward[right].add(left)
        else:
            forward[left].add(right)
    return forward, turned


def _leads(forward: Mapping[str, set[str]], start: str, end: str) -> bool:
    seen = {start}
    left = [start]
    while left:
        name = left.pop()
        if name == end:
            return True
        fresh = forward[name] - seen
        seen |= fresh
        left += fresh
    return False


def _levels(names: Sequence[str], forward: Mapping[str, set[str]]) -> dict[str, int]:
    """The length of the longest path to each role; a role without callers stands before the first that it calls."""
    waits = dict.fromkeys(names, 0)
    for targets in forward.values():
        for name in targets:
            waits[name] += 1
    level = dict.fromkeys(names, 0)
    starts = [name for name in names if not waits[name]]
    ready = [*starts]
    for name in ready:
        for target in sorted(forward[name]):
            level[target] = max(level[target], level[name] + 1)
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    for name in starts:
        level[name] = min((level[target] for target in forward[name]), default=1) - 1
    return level


def _order(layers: list[list[Point]], chains: Sequence[tuple[Point, ...]]) -> None:
    """Sort every layer by the mean places of its points' neighbours, from the left and from the right in turn."""
    left: dict[Point, list[Point]] = {}
    right: dict[Point, list[Point]] = {}
    for chain in chains:
        for one, other in pairwise(chain):
            right.setdefault(one, []).append(other)
            left.setdefault(other, []).append(one)
    for sweep in range(SWEEPS):
        near, order = (left, layers) if sweep % 2 == 0 else (right, layers[::-1])
        place: dict[Point, float] = {}
        for layer in order:
            now = {point: number / max(len(layer) - 1, 1) for number, point in enumerate(layer)}
            means = {
                point: _mean([place[peer] for peer in near.get(point, ())], now[point]) for point in layer
            }
            layer.sort(key=means.__getitem__)
            place |= {point: number / max(len(layer) - 1, 1) for number, point in enumerate(layer)}


def _neighbours(chains: Sequence[tuple[Point, ...]]) -> dict[Point, list[Point]]:
    found: dict[Point, list[Point]] = {}
    for chain in chains:
        for one, other in pairwise(chain):
            found.setdefault(one, []).append(other)
            found.setdefault(other, []).append(one)
    return found


def _stacked(
    layer: Sequence[Point], wanted: Sequence[float], size: Mapping[Point, float], space: float
) -> dict[Point, float]:
    """The points in their order, as near to where they are `wanted` as their sizes allow.

    Each block of points that touch lies where the mean of its points wants it; blocks that run into each other become
    one (pool adjacent violators, which gives the least sum of squared distances).
    """
    offsets = [0.0]
    for one, other in pairwise(layer):
        offsets.append(offsets[-1] + (size[one] + size[other]) / 2 + space)
    blocks: list[tuple[float, int]] = []
    for aim, offset in zip(wanted, offsets, strict=True):
        mean, count = aim - offset, 1
        while blocks and blocks[-1][0] >= mean:
            other_mean, other_count = blocks.pop()
            mean = (mean * count + other_mean * other_count) / (count + other_count)
            count += other_count
        blocks.append((mean, count))
    starts = [mean for mean, count in blocks for _ in range(count)]
    return {point: start + offset for point, start, offset in zip(layer, starts, offsets, strict=False)}


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


FONT = 13.0
LINE = 17.0
"""Pixels: font size and line height."""
MARGIN, SPACE, TURN = 24.0, 26.0, 64.0
"""Pixels: around everything, between boxes of a layer, and for the curve of an edge after its label."""


_LINE, _LABEL = "#475569", "#1e293b"
"""The colours of edges and of their labels."""


def svg(graph: RoleGraph, states: Mapping[str, str] = NO_STATES) -> str:
    """The picture. `states` has the phases of roles by their names, which give the boxes their colours.

    Dashed lines are asynchronous calls; the thicker a line, the more bytes go along it. Programs have boxes with sharp
    corners and bars at their sides.
    """
    return _GraphPicture(graph, states).text()


class _GraphPicture:
    """All sizes, computed before anything is drawn."""

    def __init__(self, graph: RoleGraph, states: Mapping[str, str]) -> None:
        self.graph, self.states = graph, states
        self.roles: dict[str, Role] = {role.name: role for role in graph.roles}
        self.plan: Layout = layout(graph)
        self.bundles: dict[Pair, list[Edge]] = {pair: [] for pair in self.plan.chains}
        for edge in graph.edges:
            if (edge.source, edge.target) in self.bundles:
                self.bundles[edge.source, edge.target].append(edge)
        self.labels = {pair: [edge_line(edge) for edge in edges] for pair, edges in self.bundles.items()}
        self.heaviest = max((edge.weight for edge in graph.edges), default=0.0)
        self.size = {point: self.height(point) for layer in self.plan.layers for point in layer}
        self.middle = heights(self.plan, self.size, SPACE)
        self.columns()

    def height(self, point: Point) -> float:
        """The size of a box: it has room for its text, and for the labels of all edges on either side."""
        if not isinstance(point, str):
            return LINE
        sides = [0.0, 0.0]
        for pair, chain in self.plan.chains.items():
            for side, end in enumerate((chain[0], chain[-1])):
                if end == point:
                    sides[side] += self.port(pair)
        words = len(vertex_lines(self.roles[point], self.states))
        return max(words * LINE + 20, *(side + 8 for side in sides))

    def port(self, pair: Pair) -> float:
        """The share of a side of a box that an edge takes: its label's lines."""
        return len(self.labels[pair]) * LINE + 7

    def columns(self) -> None:
        """The left of each layer, its width, and the width of the labels that begin in it."""
        self.left: list[float] = []
        self.width: list[float] = []
        self.label: list[float] = []
        x = MARGIN
        for layer in self.plan.layers:
            boxes = [point for point in layer if isinstance(point, str)]
            words = (line for name in boxes for line in vertex_lines(self.roles[name], self.states))
            width = max((text_width(line, FONT) for line in words), default=0.0) + 28
            begin = {pair for pair, chain in self.plan.chains.items() if chain[0] in boxes}
            label = max((text_width(line, FONT) for pair in begin for line in self.labels[pair]), default=0.0)
            self.left.append(x)
            self.width.append(width)
            self.label.append(label + 16 if label else 0.0)
            x += width + self.label[-1] + TURN
        self.right = max(x - TURN, 2 * MARGIN)

    def text(self) -> str:
        """The whole picture; edges are below boxes."""
        bottom = max((self.middle[point] + self.size[point] / 2 for point in self.middle), default=0.0)
        return document(self.right + MARGIN, bottom + 2 * MARGIN, FONT, [*self.lines(), *self.boxes()])

    def boxes(self) -> Iterator[str]:
        """The roles."""
        for number, layer in enumerate(self.plan.layers):
            for name in (point for point in layer if isinstance(point, str)):
                yield from self.box(name, self.left[number], self.width[number])

    def box(self, name: str, x: float, width: float) -> Iterator[str]:
        """One role, with its words in the middle."""
        shown = look(self.states.get(name, ""))
        middle = self.middle[name] + MARGIN
        height = self.size[name]
        role = self.roles[name]
        frame = {"rx": 8, "fill": shown.fill, "stroke": shown.stroke, "stroke_width": 1.5}
        yield box(x, middle - height / 2, width, height, program=bool(role.program), **frame)
        words = vertex_lines(role, self.states)
        for number, line in enumerate(words):
            y = middle + (number - (len(words) - 1) / 2) * LINE
            weight = None if number else "bold"
            yield text_at(line, x + width / 2, y, shown.text, text_anchor="middle", font_weight=weight)

    def lines(self) -> Iterator[str]:
        """The edges with their labels."""
        ports = {side: self.ports(side) for side in (0, -1)}
        level = {point: number for number, layer in enumerate(self.plan.layers) for point in layer}
        for pair, chain in self.plan.chains.items():
            places = []
            for point in chain[1:-1]:
                number, y = level[point], self.middle[point] + MARGIN
                places.append(
                    (self.left[number], self.left[number] + self.width[number] + self.label[number], y)
                )
            first, last = level[chain[0]], level[chain[-1]]
            start = self.left[first] + self.width[first]
            straight = start + self.label[first]
            stops = [(start, straight, ports[0][pair]), *places, (self.left[last],) * 2 + (ports[-1][pair],)]
            yield from self.line(pair, stops)

    def ports(self, side: int) -> dict[Pair, float]:
        """The height at which each edge leaves (`side` 0) or reaches (-1) its box, ordered by where it comes from."""
        found: dict[Pair, float] = {}
        at: dict[Point, list[Pair]] = {}
        for pair, chain in self.plan.chains.items():
            at.setdefault(chain[side], []).append(pair)
        for point, pairs in at.items():
            beside = 1 if side == 0 else -2
            pairs.sort(key=lambda pair: self.middle[self.plan.chains[pair][beside]])
            y = self.middle[point] + MARGIN - sum(self.port(pair) for pair in pairs) / 2
            for pair in pairs:
                y += self.port(pair)
                # The line is below its label where it leaves, and in the middle of its place where it arrives.
                found[pair] = y - 4 if side == 0 else y - self.port(pair) / 2
        return found

    def line(self, pair: Pair, stops: Sequence[tuple[float, float, float]]) -> Iterator[str]:
        """One edge over its `stops`, each a straight piece (from, to, height), with curves between."""
        back = pair in self.plan.turned
        edges = self.bundles[pair]
        start, end, y = stops[0]
        path = [f"M{start + (9 if back else 0):g},{y:g} H{end:g}"]
        for x, straight, below in stops[1:]:
            arrives = straight == x and not back
            reach, bend = x - 9 if arrives else x, (end + x) / 2
            path.append(f"C{bend:g},{y:g} {bend:g},{below:g} {reach:g},{below:g}")
            if straight > x:
                path.append(f"H{straight:g}")
            end, y = straight, below
        width = self.stroke(sum(edge.weight for edge in edges))
        dashes = "6 4" if all(edge.asynchronous for edge in edges) else None
        line = {"fill": "none", "stroke": _LINE, "stroke_width": width, "stroke_dasharray": dashes}
        yield element("path", d=" ".join(path), **line)
        x, y, way = (stops[0][0], stops[0][2], 10) if back else (stops[-1][0], stops[-1][2], -10)
        yield element("path", d=f"M{x:g},{y:g} l{way},-5 v10 z", fill=_LINE)
        lines = self.labels[pair]
        for number, text in enumerate(lines):
            above = stops[0][2] - 10 - (len(lines) - 1 - number) * LINE
            yield text_at(text, start + 12, above, _LABEL)

    def stroke(self, weight: float) -> float:
        """1.5 to 4 pixels, by the logarithm: a thousandth of the heaviest edge has the thinnest line."""
        if weight <= 0 or self.heaviest <= 0:
            return 1.5
        part = 1 + math.log10(weight / self.heaviest) / 3
        return round(1.5 + 2.5 * min(max(part, 0.0), 1.0), 2)
