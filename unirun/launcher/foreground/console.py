"""Terminal output while a job runs: workers' lines with a prefix, a live line, notes."""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from string import Template
from typing import BinaryIO, TextIO

from unirun.launcher.foreground.terminal import (
    IN_ASCII,
    columns,
    in_colour,
    in_foreground,
    is_pipe,
    is_screen,
    one_file,
    printable_lines,
)
from unirun.spec.job import JobSpec, LogSpec
from unirun.spec.read import printable
from unirun.values import WorkerId

# A line that stays below all other output on a terminal. Returns the text to write, does no I/O.

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


COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
"""ANSI colour codes, for roles in their order."""


def shown(log: LogSpec, local_rank: int, stream: int) -> bool:
    """Return True if the console shows `stream` (1 stdout, 2 stderr) of a local rank, by ``-r``, ``-t`` and filter."""
    if log.local_ranks_filter is not None and local_rank not in log.local_ranks_filter:
        return False
    return bool(_bits(log.tee, local_rank) & stream) or not _bits(log.redirects, local_rank) & stream


def _bits(text: str, local_rank: int) -> int:
    if ":" not in text:
        return int(text)
    return {int(a): int(b) for a, b in (item.split(":") for item in text.split(","))}.get(local_rank, 0)


def prefix_of(
    spec: JobSpec, template: str | None, colour: bool, worker: WorkerId, local_rank: int, node: str
) -> bytes:
    """The prefix of the lines of a worker on `node`: ``[actor:2]`` or after a `template` of
    the user's, with `colour` in that of its role; empty when the job has only one worker and no template."""
    if template is None and sum(role.count for role in spec.roles) == 1:
        return b""
    text = f"[{worker}] "
    if template is not None:
        values = {"role_name": worker.role, "rank": worker.rank, "local_rank": local_rank, "hostname": node}
        text = Template(template).safe_substitute(values)
    if colour:
        number = [role.name for role in spec.roles].index(worker.role)
        text = f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"
    return text.encode()


class Console:
    """Writes to stdout and stderr, from any thread, and keeps the live line below the output.

    When a stream cannot be written any more, output to it is dropped; `when_lost` sets a callback for stdout. A reader
    that does not read (a pager, a stopped terminal) blocks only `lines` and `close`: `note`, `error` and `live` write
    in a thread.
    """

    def __init__(self, *, quiet: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """Write to `out` and `err`, by default stdout and stderr."""
        self._quiet = quiet
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._screen = is_screen(self._err)
        # A program behind a pipe (tee, grep) may write to the same terminal at any time.
        self._live_possible = self._screen and not quiet and not is_pipe(self._out)
        self._live = LiveLine()
        self._together = one_file(self._out, self._err)
        self._cut = False
        self._lock = threading.Lock()
        self._closed: dict[int, OSError] = {}
        self._tell_lost: Callable[[OSError], None] | None = None
        self._said: queue.SimpleQueue[tuple[str, str | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_said, name="unirun-console", daemon=True)
        self._thread.start()
        self.colour = in_colour(self._out)

    def lines(self, stream: int, prefix: bytes, data: bytes) -> None:
        """Write whole lines of one worker to `stream` (1 stdout, 2 stderr); without a prefix any bytes."""
        if prefix:
            if not data.endswith((b"\n", b"\r")):
                data += b"\n"
            data = data.replace(b"\r\n", b"\n")
            body = data[:-1]
            for end in (b"\n", b"\r"):
                body = body.replace(end, end + prefix)
            data = prefix + body + data[-1:]
        error = self._write(self._out.buffer if stream == 1 else self._err.buffer, data)
        if error is not None and self._tell_lost is not None and (stream == 1 or self._together):
            tell, self._tell_lost = self._tell_lost, None
            tell(error)

    def when_lost(self, tell: Callable[[OSError], None]) -> None:
        """Set a callback that is called once with the error when a worker's output cannot be written to stdout, in the
        thread that calls `lines`."""
        self._tell_lost = tell

    def beside_notes(self, stream: int) -> bool:
        """Return True if `lines` of `stream` go to where notes and errors go."""
        return stream == 2 or self._together

    def note(self, text: str) -> None:
        """Write a message of unirun, unless quiet."""
        if not self._quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Write messages of unirun, also when quiet. Unprintable characters are escaped."""
        self._said.put(("".join(f"unirun: {line}\n" for line in printable_lines(text)), None))

    def live(self, text: str) -> None:
        """Replace the live line, which is shown on a terminal only."""
        if self._live_possible:
            self._said.put(("", printable(text)))

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything is written, for at most `timeout` seconds."""
        self._said.put(None)
        self._thread.join(timeout)

    def _write_said(self) -> None:
        while (said := self._said.get()) is not None:
            lines, live = said
            if live is None:
                data = lines.encode(self._err.encoding, IN_ASCII)
                self._write(self._err.buffer, data, own_row=True)
                continue
            with self._lock:
                self._draw(self._live.replace(live, self._width()))

    def _write(self, file: BinaryIO, data: bytes, *, own_row: bool = False) -> OSError | None:
        """Write `data`, with `own_row` on a new row. Returns the error when `file` cannot be written (any more)."""
        seen = self._screen and file.isatty()
        with self._lock:
            if not seen:
                error = self._raw(file, b"\n" + data if own_row and self._cut else data)
                if self._together or file is self._err.buffer:
                    self._cut = not data.endswith((b"\n", b"\r"))
                return error
            self._draw(self._live.before() + (self._live.new_row if own_row else ""))
            error = self._raw(file, data)
            self._draw(self._live.after(data, self._width()))
            return error

    def _draw(self, what: str) -> None:
        if what:
            self._raw(self._err.buffer, what.encode(self._err.encoding, "backslashreplace"))

    def _width(self) -> int:
        """Present width for the live line; 0 when it may not be drawn."""
        number = self._err.fileno()
        return columns(number) if self._live_possible and in_foreground(number) else 0

    def _raw(self, file: BinaryIO, data: bytes) -> OSError | None:
        number = file.fileno()
        if number in self._closed:
            return self._closed[number]
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(number, view) :]
            except BlockingIOError:
                # Another process that shares the terminal or the pipe has made it non-blocking.
                _await_writable(number)
            except OSError as error:
                self._closed[number] = error
                return error
        return None


def _await_writable(number: int) -> None:
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    poll.poll()
