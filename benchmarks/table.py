"""Figures as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.figure import Figure

BUSY = 10.0
"""The percentage of the processors in use by others from which on a reader has to know it."""

HEADERS = ("FIGURE", "VALUE", "BAR", "HOLDS", "UNIRUN", "PEER")


def table(figures: Sequence[Figure]) -> str:
    """One line per figure, lines below for a fault or a note. Medians stand before the range of the single runs."""
    rows = [HEADERS, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    lines: list[str] = []
    for row, figure in zip(rows, (None, *figures), strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if figure is not None:
            below = [*(figure.missing or figure.fault).splitlines(), *figure.note.splitlines()]
            lines += [f"    {line}" for line in below]
    busiest = max((figure.busy for figure in figures), default=0.0)
    if busiest >= BUSY:
        lines += [
            f"Other processes used up to {busiest:.0f} % of the processors meanwhile. That slows both sides,",
            "and unirun more: it imports torch in one process, where its peer does so in one per rank.",
        ]
    return "\n".join(lines)


def _row(figure: Figure) -> tuple[str, ...]:
    bar = figure.bar
    value = "not measured" if figure.value is None else quantity(figure.value, bar.unit)
    peer = f"{figure.peer} {spread(figure.theirs, figure.run_unit)}" if figure.peer else ""
    limit = "" if bar.limit is None else f"{'≥' if bar.at_least else '≤'} {quantity(bar.limit, bar.unit)}"
    return (
        bar.name,
        value,
        limit,
        "-" if figure.missing else "yes" if figure.holds else "NO",
        spread(figure.own, figure.run_unit),
        peer,
    )


def quantity(value: float, unit: str) -> str:
    """``0.41``, ``1.27 s``, ``3``: three digits that count, and the unit unless it is a ratio or a count."""
    text = f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return text if unit in ("ratio", "processes") else f"{text} {unit}"


def spread(values: Sequence[float], unit: str) -> str:
    """The median with the least and the greatest: ``1.27 s (1.21–1.40)``."""
    if not values:
        return "-"
    least, greatest = quantity(min(values), "ratio"), quantity(max(values), "ratio")
    return f"{quantity(median(values), unit)} ({least}–{greatest})"
