"""A picture of a graph as self-contained SVG. It has a background of its own, so it is legible on any page.

Calls go from left to right. Each begins with a straight piece under its label, so a label is never on another line. One
that closes a cycle goes the other way round: it leaves its role on the left, and its label stands where it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from unirun.collocation.graph.layout import Layout, Pair, Point, heights, layout
from unirun.collocation.graph.svgparts import bars, document, text_at, text_width
from unirun.collocation.graph.text import NO_STATES, edge_line, look, vertex_lines
from unirun.collocation.graph.values import Graph, Role
from unirun.spec.edges import Edge

FONT = 13.0
LINE = 17.0
"""Pixels: font size and line height."""
MARGIN, SPACE, TURN = 24.0, 26.0, 64.0
"""Pixels: around everything, between boxes of a layer, and for the curve of an edge after its label."""


_LINE, _LABEL = "#475569", "#1e293b"
"""The colours of edges and of their labels."""


def svg(graph: Graph, states: Mapping[str, str] = NO_STATES) -> str:
    """The picture. `states` has the phases of roles by their names, which give the boxes their colours.

    Dashed lines are asynchronous calls; the thicker a line, the more bytes go along it. Programs have boxes with sharp
    corners and bars at their sides.
    """
    return _Picture(graph, states).text()


class _Picture:
    """All sizes, computed before anything is drawn."""

    def __init__(self, graph: Graph, states: Mapping[str, str]) -> None:
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
        yield (
            f'<rect x="{x:g}" y="{middle - height / 2:g}" width="{width:g}" height="{height:g}" '
            f'rx="{0 if role.program else 8}" fill="{shown.fill}" stroke="{shown.stroke}" stroke-width="1.5"/>'
        )
        if role.program:
            yield bars(x, middle - height / 2, width, height, shown.stroke)
        words = vertex_lines(role, self.states)
        for number, line in enumerate(words):
            y = middle + (number - (len(words) - 1) / 2) * LINE
            bold = ' font-weight="bold"' if number == 0 else ""
            yield text_at(line, x + width / 2, y, shown.text, f' text-anchor="middle"{bold}')

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
        dashes = ' stroke-dasharray="6 4"' if all(edge.asynchronous for edge in edges) else ""
        yield f'<path d="{" ".join(path)}" fill="none" stroke="{_LINE}" stroke-width="{width:g}"{dashes}/>'
        x, y, way = (stops[0][0], stops[0][2], 10) if back else (stops[-1][0], stops[-1][2], -10)
        yield f'<path d="M{x:g},{y:g} l{way},-5 v10 z" fill="{_LINE}"/>'
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
