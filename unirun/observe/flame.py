"""Flame graphs of sampled stacks: pure, from counts to SVG.

Stacks are folded: ``MainThread;step (my/train.py);forward (my/model.py)``, the outermost frame first, with the number
of samples in which they were seen. speedscope and flamegraph.pl read the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from zlib import crc32

from unirun.values import Value

WIDTH, ROW = 1200, 17
"""Pixels of a graph, and of a row."""

LEAST_WIDTH = 0.5
"""Pixels below which a frame is left out, with all that it calls."""

LETTER = 6.6
"""Pixels of a letter of a label."""


class Bar(Value):
    """A frame in a graph: its place in units of samples, and the depth from 0 on."""

    name: str
    first: int
    samples: int
    depth: int


def folded(frames: Sequence[tuple[str, str]], root: str) -> str:
    """One line for a stack below `root`: files and functions, the outermost first."""
    names = (f"{name} ({'/'.join(file.split('/')[-2:])})" for file, name in frames)
    return ";".join(each.replace(";", ":") for each in (root, *names))


def bars(counts: Mapping[str, int]) -> list[Bar]:
    """The frames of folded stacks, each where it was called from, in the order of their names."""
    rows = sorted((stack.split(";"), count) for stack, count in counts.items())
    return [*_bars(rows, 0, 0)]


def _bars(rows: Sequence[tuple[list[str], int]], depth: int, first: int) -> Iterator[Bar]:
    at = 0
    while at < len(rows):
        names, count = rows[at]
        if len(names) <= depth:
            # It was the innermost frame here.
            first, at = first + count, at + 1
            continue
        same = at
        while same < len(rows) and rows[same][0][depth : depth + 1] == [names[depth]]:
            same += 1
        samples = sum(count for _, count in rows[at:same])
        yield Bar(names[depth], first, samples, depth)
        yield from _bars(rows[at:same], depth + 1, first)
        first, at = first + samples, same


def svg(counts: Mapping[str, int], title: str) -> str:
    """A flame graph of folded stacks, the outermost frames at the top. Titles of its frames have names and shares."""
    total = max(sum(counts.values()), 1)
    scale = WIDTH / total
    drawn = [bar for bar in bars(counts) if bar.samples * scale >= LEAST_WIDTH]
    height = ROW * (max((bar.depth for bar in drawn), default=0) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="4" y="13">{escape(title)}: {total} samples</text>',
    ]
    for bar in drawn:
        x, y, width = bar.first * scale, ROW * (bar.depth + 1.5), bar.samples * scale
        label = bar.name if len(bar.name) * LETTER < width else bar.name[: max(int(width / LETTER) - 1, 0)]
        share = f"{bar.name}: {bar.samples} samples, {100 * bar.samples / total:.1f} %"
        parts.append(
            f'<g><title>{escape(share)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{ROW - 1}" fill="{_colour(bar.name)}"/>'
            f'<text x="{x + 2:.1f}" y="{y + 12:.1f}">{escape(label)}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _colour(name: str) -> str:
    """A warm colour, the same for all functions of a file."""
    number = crc32(name.rpartition("(")[2].encode())
    return f"hsl({number % 50},{70 + number // 50 % 25}%,{66 + number // 5000 % 14}%)"
