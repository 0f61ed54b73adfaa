"""What a person sees while a job runs: workers' lines with their prefix, a live line, short notes."""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from string import Template
from typing import BinaryIO, TextIO

from unirun.launcher.foreground.live import LiveLine
from unirun.launcher.foreground.terminal import (
    columns,
    in_colour,
    in_foreground,
    is_pipe,
    is_screen,
    one_file,
    printable,
    printable_lines,
)
from unirun.spec import JobSpec, LogSpec

COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
"""The codes of a terminal's colours, for roles in their order."""


def shown(log: LogSpec, local_rank: int, stream: int) -> bool:
    """Whether the console shows `stream` (1 stdout, 2 stderr) of a local rank, by ``-r``, ``-t`` and filter."""
    if log.local_ranks_filter is not None and local_rank not in log.local_ranks_filter:
        return False
    return bool(_bits(log.tee, local_rank) & stream) or not _bits(log.redirects, local_rank) & stream


def _bits(text: str, local_rank: int) -> int:
    if ":" not in text:
        return int(text)
    return {int(a): int(b) for a, b in (item.split(":") for item in text.split(","))}.get(local_rank, 0)


class Prefixer:
    """Gives each worker the prefix of its lines: ``[actor:2]`` in the colour of its role."""

    def __init__(self, spec: JobSpec, colour: bool, template: str | None) -> None:
        self._roles = {role.name: n for n, role in enumerate(spec.roles)}
        self._alone = sum(role.count for role in spec.roles) == 1 and template is None
        self._colour = colour
        self._template = template

    def __call__(self, role: str, rank: int, local_rank: int) -> bytes:
        """The prefix; empty when the job has one worker only."""
        if self._alone:
            return b""
        text = f"[{role}:{rank}] "
        if self._template is not None:
            values = {"role_name": role, "rank": rank, "local_rank": local_rank}
            text = Template(self._template).safe_substitute(values)
        if self._colour:
            text = f"\x1b[{COLOURS[self._roles[role] % len(COLOURS)]}m{text}\x1b[0m"
        return text.encode()


class Console:
    """Writes to stdout and stderr from several threads; keeps the live line below what is written.

    Where a stream cannot be written any more, what would go there is dropped; `when_lost` tells of stdout. A reader
    that does not read (a pager, a stopped terminal) holds up `lines` and `close` alone: what `note`, `error` and `live`
    say is written by a thread.
    """

    def __init__(self, *, quiet: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """Of `out` and `err`, by default stdout and stderr."""
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
        """Whole lines of one worker; without a prefix, whatever it has written."""
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
        """Call `tell` once with the reason when stdout cannot take what a worker has written, in the thread that calls
        `lines`."""
        self._tell_lost = tell

    def note(self, text: str) -> None:
        """A line of unirun's own, left out when quiet."""
        if not self._quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Lines of unirun's own that are always shown; what they quote may come from anywhere."""
        self._said.put(("".join(f"unirun: {line}\n" for line in printable_lines(text)), None))

    def live(self, text: str) -> None:
        """Replace the live line; shown on a terminal only."""
        if self._live_possible:
            self._said.put(("", printable(text)))

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything that was said is written, or for `timeout` seconds."""
        self._said.put(None)
        self._thread.join(timeout)

    def _write_said(self) -> None:
        while (said := self._said.get()) is not None:
            lines, live = said
            if live is None:
                data = lines.encode(self._err.encoding, "backslashreplace")
                self._write(self._err.buffer, data, own_row=True)
                continue
            with self._lock:
                self._draw(self._live.replace(live, self._width()))

    def _write(self, file: BinaryIO, data: bytes, *, own_row: bool = False) -> OSError | None:
        """Write `data`, with `own_row` on a row of its own. Returns why `file` cannot be written (any more)."""
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
        """How wide the live line may be now."""
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
                # Whoever shares the terminal or the pipe has made it non-blocking.
                _await_writable(number)
            except OSError as error:
                self._closed[number] = error
                return error
        return None


def _await_writable(number: int) -> None:
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    poll.poll()
