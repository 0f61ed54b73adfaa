"""A terminal emulator for the sequences that unirun uses. Any other fails the test."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

_SEQUENCE = re.compile(r"\x1b\[(\??)(\d*)([A-Za-z])")


@dataclass
class _Row:
    cells: list[str] = field(default_factory=list)
    wrapped: bool = False
    """A line that is continued in the next row."""


class Screen:
    """A screen of `width` × `height`, with its scroll-back.

    `reflow`: a new width wraps all lines anew and the cursor stays at its character, as in most terminals. Otherwise
    rows are cut off, as in xterm.
    """

    def __init__(self, width: int, height: int, *, reflow: bool = True) -> None:
        self.width, self.height, self.reflow = width, height, reflow
        self._rows = [_Row()]
        self._row = self._column = 0
        self._wraps = True
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, data: bytes) -> None:
        """Show the output of a program."""
        text = self._decode(data)
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                match = _SEQUENCE.match(text, at)
                assert match, f"unknown sequence {text[at : at + 10]!r}"
                self._obey(*match.groups())
                at = match.end()
                continue
            self._put(text[at])
            at += 1

    def lines(self) -> list[str]:
        """Everything that was ever shown, in lines as written, without empty ones at the end."""
        lines, line = [], ""
        for row in self._rows:
            line += "".join(row.cells)
            if not row.wrapped:
                lines.append(line.rstrip())
                line = ""
        lines.append(line.rstrip())
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def resize(self, width: int, height: int) -> None:
        """Resize the window."""
        if self.reflow:
            self._reflow(width)
        else:
            for row in self._rows:
                del row.cells[width:]
                row.wrapped = False
            self._column = min(self._column, width - 1)
        self.width, self.height = width, height

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._next_row()
        elif character == "\t":
            for _ in range(8 - self._column % 8):
                self._put(" ")
        else:
            assert character.isprintable(), character
            if self._column >= self.width:
                if self._wraps:
                    self._rows[self._row].wrapped = True
                    self._next_row()
                    self._column = 0
                else:
                    self._column = self.width - 1
            cells = self._rows[self._row].cells
            cells += " " * (self._column + 1 - len(cells))
            cells[self._column] = character
            self._column += 1

    def _next_row(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append(_Row())

    def _obey(self, private: str, number: str, final: str) -> None:
        match private, number, final:
            case "?", "7", "l" | "h":
                self._wraps = final == "h"
            case "", "", "J":
                del self._rows[self._row].cells[self._column :]
                self._rows[self._row].wrapped = False
                del self._rows[self._row + 1 :]
            case "", _, "m":
                pass
            case _:
                raise AssertionError(f"unknown sequence {private}{number}{final}")

    def _reflow(self, width: int) -> None:
        rows: list[_Row] = []
        line: list[str] = []
        cursor: int | None = None
        for number, row in enumerate(self._rows):
            if number == self._row:
                cursor = len(line) + self._column
            line += row.cells
            if row.wrapped and number + 1 < len(self._rows):
                continue
            parts = [line[at : at + width] for at in range(0, len(line), width)] or [[]]
            if cursor is not None:
                offset = min(cursor, len(line))
                self._row = len(rows) + min(offset // width, len(parts) - 1)
                self._column = cursor - (self._row - len(rows)) * width
                cursor = None
            rows += [_Row(part, wrapped=index + 1 < len(parts)) for index, part in enumerate(parts)]
            line = []
        self._rows = rows
