"""The parts that all SVG pictures share: the document with its background, and text in a monospaced font."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from unirun.collocation.graph.text import printable

_ASPECT = 0.62
"""The width of a letter of a monospaced font in parts of its size, rounded up."""


def document(width: float, height: float, font: float, parts: Iterable[str]) -> str:
    """A whole picture, on a white background so that it is legible on any page. All sizes are in pixels."""
    w, h = math.ceil(width), math.ceil(height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
        f'font-family="ui-monospace, DejaVu Sans Mono, monospace" font-size="{font:g}">'
    )
    back = f'<rect width="{w}" height="{h}" rx="10" fill="#ffffff"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def bars(x: float, y: float, width: float, height: float, stroke: str) -> str:
    """The bars at the sides of the box of a program."""
    d = " ".join(f"M{at:g} {y:g}v{height:g}" for at in (x + 5, x + width - 5))
    return f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="1.5"/>'


def text_at(text: str, x: float, y: float, fill: str, more: str = "") -> str:
    """One line of text whose middle is at height `y`. `more` are further attributes."""
    place = f'x="{x:g}" y="{y:g}" dominant-baseline="central"'
    return f'<text {place} fill="{fill}" xml:space="preserve"{more}>{escape(printable(text), quote=False)}</text>'


def text_width(text: str, font: float) -> float:
    """The width of one line of text of the size `font`."""
    return len(printable(text)) * font * _ASPECT
