"""Nodes × slots as SVG. It brings its own background, so it is legible on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unirun.cli.grid import Cell, Grid, Tenant
from unirun.collocation.graph.svg import bars, document, text_at, text_width

FONT, LINE, GAP, MARGIN = 12.0, 20.0, 6.0, 20.0
"""Pixels: the size of letters, from one line to the next, between cells, and around everything."""

_INK, _FAINT, _FREE = "#0f172a", "#475569", "#94a3b8"
_FILLS = (
    ("#a5f3fc", "#0e7490"),
    ("#fde68a", "#b45309"),
    ("#f5d0fe", "#a21caf"),
    ("#bbf7d0", "#15803d"),
    ("#bfdbfe", "#1d4ed8"),
    ("#fecaca", "#b91c1c"),
    ("#ddd6fe", "#6d28d9"),
    ("#fed7aa", "#c2410c"),
    ("#d9f99d", "#4d7c0f"),
    ("#e2e8f0", "#334155"),
)
"""Fill and outline of the ranks of a role; for roles in their order."""


def svg(picture: Grid) -> str:
    """The picture: ranks in the colours of their roles, those that share a slot below each other, free slots dashed.

    Programs have boxes with sharp corners and bars at their sides, as in `unirun.collocation.graph.svg`.
    """
    return _Picture(picture).text()


class _Picture:
    """The sizes of a picture, computed before anything is drawn, and its parts."""

    def __init__(self, picture: Grid) -> None:
        self.picture = picture
        self.fills = {role: _FILLS[number % len(_FILLS)] for number, role in enumerate(picture.roles)}
        self.first = self._width(picture.names) + GAP
        self.wide = [
            max(self._width(picture.column(number)), 30.0) + (20 if picture.programs else 12)
            for number in range(len(picture.columns))
        ]

    @staticmethod
    def _width(texts: Iterable[str]) -> float:
        return max((text_width(text, FONT) for text in texts), default=0.0)

    def text(self) -> str:
        """All of it, from the top."""
        y = MARGIN + LINE
        parts = [*self.head()]
        for row in self.picture.rows:
            tall = row.lines * LINE
            parts.append(text_at(row.node, MARGIN, y + tall / 2, _INK))
            parts += self.cells(row.cells, y, tall)
            parts.append(text_at(row.note, self.end(), y + tall / 2, _FAINT))
            y += tall + GAP
            if row.folded:
                parts.append(text_at(row.folded, MARGIN, y + LINE / 2, _FAINT))
                y += LINE + GAP
        if self.picture.rest:
            parts.append(text_at(self.picture.rest, MARGIN, y + LINE / 2, _FAINT))
            y += LINE
        lines = (*(row.folded for row in self.picture.rows), self.picture.rest)
        right = max(self.end() + self._width(self.picture.notes), MARGIN + self._width(lines))
        return document(right + MARGIN, y + MARGIN, FONT, parts)

    def left(self, column: int) -> float:
        """The x coordinate at which a column begins."""
        return MARGIN + self.first + sum(self.wide[:column]) + GAP * column

    def end(self) -> float:
        """The x coordinate at which the notes of rows begin."""
        return self.left(len(self.wide)) + GAP

    def head(self) -> Iterator[str]:
        """The names of the columns."""
        y = MARGIN + LINE / 2 - 2
        yield text_at("NODE", MARGIN, y, _FAINT)
        for number, name in enumerate(self.picture.columns):
            yield text_at(name, self.left(number) + 6, y, _FAINT)
        yield text_at("FREE", self.end(), y, _FAINT)

    def cells(self, cells: tuple[Cell, ...], y: float, tall: float) -> Iterator[str]:
        """The slots of one node, each as tall as the row."""
        for number, cell in enumerate(cells):
            if cell is None:
                continue
            x, width = self.left(number), self.wide[number]
            if not cell:
                yield (
                    f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{tall:g}" rx="4" fill="none" '
                    f'stroke="{_FREE}" stroke-dasharray="3 3"/>'
                )
            for place, tenant in enumerate(cell):
                part = tall / len(cell)
                yield from self.tenant(tenant, x, y + place * part, width, part)

    def tenant(self, tenant: Tenant, x: float, y: float, width: float, height: float) -> Iterator[str]:
        """One role's ranks on a slot."""
        fill, stroke = self.fills[tenant.role]
        program = tenant.role in self.picture.programs
        yield (
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{0 if program else 4}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )
        if program:
            yield bars(x, y, width, height, stroke)
        yield text_at(tenant.text, x + (10 if program else 6), y + height / 2, _INK)
