"""A grid of nodes × slots as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unirun.cli.grid import Cell, Grid


def text(picture: Grid, *, colours: Sequence[int] = (), width: int = 110) -> str:
    """Lines for a terminal of `width` columns; slots that do not fit beside each other are below each other.

    `colours` are codes of a terminal's colours, for roles in their order; without any, the lines are plain.
    """
    codes = {
        role: colours[number % len(colours)] if colours else 0 for number, role in enumerate(picture.roles)
    }
    first, notes = (max(map(len, column)) for column in (picture.names, picture.notes))
    wide = [max(map(len, picture.column(number))) for number in range(len(picture.columns))]
    lines: list[str] = []
    for bank in _banks(wide, width - first - 2 - notes):
        last = bank.stop == len(wide)
        lines += [""] if lines else []
        heads = (picture.columns[n].ljust(wide[n]) for n in bank)
        lines.append("  ".join(("NODE".ljust(first), *heads, *(("FREE",) if last else ()))).rstrip())
        for row in picture.rows:
            for line in range(max([1, *(len(row.cells[n] or ()) for n in bank)])):
                words = [_word(row.cells[n], line, wide[n], codes) for n in bank]
                name, note = (row.node, row.note) if line == 0 else ("", "")
                lines.append("  ".join((name.ljust(first), *words, *((note,) if last else ()))).rstrip())
            lines += [row.folded] if last and row.folded else []
    return "".join(f"{line}\n" for line in (*lines, *((picture.rest,) if picture.rest else ())))


def _word(cell: Cell, line: int, width: int, codes: Mapping[str, int]) -> str:
    """One line of a cell: a tenant, a dot for a free slot, or blanks."""
    if cell is None or line >= max(len(cell), 1):
        return " " * width
    if not cell:
        return "·".ljust(width)
    word, code = cell[line].text.ljust(width), codes[cell[line].role]
    return f"\x1b[{code}m{word}\x1b[0m" if code else word


def _banks(wide: Sequence[int], room: int) -> Iterator[range]:
    """Columns that fit beside each other, one at the least."""
    start = taken = 0
    for number, width in enumerate(wide):
        if number > start and taken + 2 + width > room:
            yield range(start, number)
            start, taken = number, 0
        taken += 2 + width
    yield range(start, len(wide))
