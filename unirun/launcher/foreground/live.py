"""A line that stays below all other output on a terminal. Returns the text to write, does no I/O."""

from __future__ import annotations

_NO_WRAP, _WRAP, _ERASE_BELOW = "\x1b[?7l", "\x1b[?7h", "\x1b[J"


class LiveLine:
    """One row at the bottom; the cursor stays at its beginning.

    When a window is resized, most terminals rewrap the screen and move the cursor along. Below the cursor there is
    still only this line, so it can be erased whatever number of rows it has now. A live display that moves the cursor
    up by the number of rows drawn (rich's) leaves a copy at each resize.
    """

    def __init__(self) -> None:
        self._text = ""
        self._drawn = False
        self._begun = False

    def replace(self, text: str, width: int) -> str:
        """Return what to write to replace the line by `text` on a terminal of `width` columns; "" erases it.

        With a `width` of 0 nothing is drawn.
        """
        self._text = text
        return self._draw(width) if text else self.before()

    def before(self) -> str:
        """Return what to write before other output."""
        erase = f" {_ERASE_BELOW}\r" if self._drawn else ""
        self._drawn = False
        return erase

    def after(self, data: bytes, width: int) -> str:
        """Return what to write after `data`, which need not end with a newline (a progress bar or a prompt)."""
        self._begun = not data.endswith(b"\n")
        return self._draw(width) if self._text else ""

    @property
    def new_row(self) -> str:
        """The text to write before a line that must start on a new row."""
        return "\n" if self._begun else ""

    def _draw(self, width: int) -> str:
        if self._begun or not width:
            return ""
        self._drawn = True
        shown = self._text if len(self._text) < width else f"{self._text[: max(width - 2, 0)]}…"
        # No wrapping, as the terminal may be narrower by now. The rows below are erased after the text is written: tmux
        # treats an erasure that begins in the first row as a new screen, and keeps a copy of the old one.
        return f"{_NO_WRAP}{shown}{_WRAP}{_ERASE_BELOW}\r"
