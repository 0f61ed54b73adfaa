"""A line that stays below everything else that a terminal shows. What to write for that, as values."""

from __future__ import annotations

_NO_WRAP, _WRAP, _ERASE_BELOW = "\x1b[?7l", "\x1b[?7h", "\x1b[J"


class LiveLine:
    """One row at the bottom; the cursor waits at its beginning.

    When a window is resized, most terminals wrap what is on the screen anew and move the cursor with it: from the
    cursor on there is still nothing but this line, so it can be erased without knowing how many rows it has become. A
    live display that moves the cursor up by the rows that it has drawn (rich's) leaves a copy at each resize.
    """

    def __init__(self) -> None:
        self._text = ""
        self._drawn = False
        self._begun = False

    def replace(self, text: str, width: int) -> str:
        """What to write to show `text` on a terminal of `width` columns instead of the line before; "" erases it.

        With a `width` of 0 nothing may be drawn now.
        """
        self._text = text
        return self._draw(width) if text else self.before()

    def before(self) -> str:
        """What to write before anything else is written."""
        erase = f" {_ERASE_BELOW}\r" if self._drawn else ""
        self._drawn = False
        return erase

    def after(self, data: bytes, width: int) -> str:
        """What to write after `data`, which need not end with a newline: a progress bar or a prompt does not."""
        self._begun = not data.endswith(b"\n")
        return self._draw(width) if self._text else ""

    @property
    def new_row(self) -> str:
        """What to write before a line that shall not begin on a worker's row."""
        return "\n" if self._begun else ""

    def _draw(self, width: int) -> str:
        if self._begun or not width:
            return ""
        self._drawn = True
        shown = self._text if len(self._text) < width else f"{self._text[: max(width - 2, 0)]}…"
        # The terminal may be narrower already than it has told. The rows below are erased when the text is written:
        # tmux takes an erasure that begins in the first row for a new screen, and keeps a copy of the old one.
        return f"{_NO_WRAP}{shown}{_WRAP}{_ERASE_BELOW}\r"
