"""`RankOutput`: what workers write, shown where the program writes; a progress bar is one live line for each rank."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

DRAW_INTERVAL = 0.1
"""Seconds between two drawings of the bars, or of the table of a callback."""

FILE_INTERVAL = 10.0
"""Seconds between two states of a bar where it cannot be redrawn, as in the log file of a batch job."""

MOST = 16
"""Bars that are drawn at a time."""

_PIECE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)")
_PREFIX = re.compile(r"\[\w+:([0-9]+)\] ")


class RankOutput:
    """The output of all workers. Its methods may be called in any thread.

    Text that ends with a carriage return is the state of a bar. On a terminal the bars are below everything else,
    one line for each rank; elsewhere a bar is a line now and then, and at its end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._bars: dict[str, str] = {}
        self._told: dict[str, float] = {}
        self._drawn = 0.0
        self._screen: Any = None

    def show(self, out: str, piece: str) -> None:
        """Show a line, or the state of a bar, that was written to `out`, ``stdout`` or ``stderr``."""
        text = piece.rstrip("\r\n")
        prefix = found[0] if (found := _PREFIX.match(text)) else ""
        bar = f"{out} {prefix}"
        with self._lock:
            if not piece.endswith("\r"):
                state = self._end_bar(bar)
                # Of a line that ends with both, the carriage return may have come before.
                _write(out, f"{state}\n" if text == prefix and state else piece)
            elif not text[len(prefix) :].strip():
                self._end_bar(bar)
            else:
                self._bars[bar] = text
                self._draw(out, bar)

    def close(self, timeout: float) -> None:
        """Forget the bars that are left, unless a stream of the program has held a write for `timeout` seconds."""
        if self._lock.acquire(timeout=timeout):
            try:
                for bar in [*self._bars]:
                    self._end_bar(bar)
            finally:
                self._lock.release()

    def _end_bar(self, bar: str) -> str:
        """Remove a bar from the screen. Returns its last state, empty if there was none."""
        self._told.pop(bar, None)
        state = self._bars.pop(bar, "")
        if state and self._screen is not None:
            if self._bars:
                self._redraw()
            else:
                screen, self._screen = self._screen, None
                with contextlib.suppress(Exception):
                    screen.stop()
        return state

    def _draw(self, out: str, bar: str) -> None:
        now = self._clock()
        if self._screen is None and _is_terminal():
            with contextlib.suppress(Exception):
                self._screen = _opened()
        if self._screen is None:
            if now - self._told.setdefault(bar, now) >= FILE_INTERVAL:
                self._told[bar] = now
                _write(out, f"{self._bars[bar]}\n")
        elif now - self._drawn >= DRAW_INTERVAL:
            self._drawn = now
            self._redraw()

    def _redraw(self) -> None:
        from rich.text import Text

        shown = sorted(self._bars.items(), key=lambda item: _rank(item[1]))
        lines = [text for _, text in shown[:MOST]]
        lines += [f"… and {len(shown) - MOST} more"] * (len(shown) > MOST)
        with contextlib.suppress(Exception):
            text = Text("\n").join(Text.from_ansi(line) for line in lines)
            text.no_wrap, text.overflow = True, "crop"
            self._screen.update(text, refresh=True)


def pieces(pipe: IO[bytes]) -> Iterator[str]:
    """The lines and the states of bars that come from a pipe, each as soon as it is complete."""
    rest: list[bytes] = []
    while chunk := pipe.read1(1 << 16):  # type: ignore[attr-defined]
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end:
            yield from _PIECE.findall(b"".join((*rest, chunk[:end])).decode(errors="replace"))
            rest.clear()
        rest.append(chunk[end:])
    if last := b"".join(rest):
        yield f"{last.decode(errors='replace')}\n"


def _write(out: str, text: str) -> None:
    """Write where this program writes at that moment: in a notebook that is the cell."""
    # It may be None, or an object of the user's that raises anything. The job goes on without it.
    with contextlib.suppress(Exception):
        stream = getattr(sys, out)
        stream.write(text)
        stream.flush()


def _rank(text: str) -> int:
    found = _PREFIX.match(text)
    return int(found[1]) if found else 0


def _is_terminal() -> bool:
    """Return True if bars can be redrawn, and nobody else redraws a part of the screen."""
    from rich.file_proxy import FileProxy

    with contextlib.suppress(Exception):
        streams = (sys.stdout, sys.stderr)
        others = any(isinstance(each, FileProxy) for each in streams) and not LivePart.open()
        return sys.stderr.isatty() and not others
    return False


def _opened() -> Any:
    """A part of the screen below what is written meanwhile."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    if console.is_dumb_terminal:
        return None
    # Lines of a stdout that is a file go there.
    part = LivePart(console, transient=True, redirect_stdout=sys.stdout.isatty())
    part.start()
    return part


class LivePart:
    """A part of the screen below what is written meanwhile: the bars of ranks, or the table of a callback.

    All parts of a process are one live display of rich, as each of two would erase lines of the other. When it
    stops, a part that is `transient` vanishes, and another stays.
    """

    _lock = threading.RLock()
    _live: Any = None
    _parts: ClassVar[list[LivePart]] = []

    def __init__(self, console: Console, *, transient: bool = False, redirect_stdout: bool = True) -> None:
        self._console, self._transient, self._redirect = console, transient, redirect_stdout
        self._content: RenderableType = ""

    @classmethod
    def open(cls) -> bool:
        """Return True if a part is shown."""
        return cls._live is not None

    def start(self) -> None:
        """Show the part, if it is not shown yet, below the others."""
        from rich.live import Live

        with self._lock:
            if self in self._parts:
                return
            if LivePart._live is None:
                live = Live(console=self._console, auto_refresh=False, redirect_stdout=self._redirect)
                live.start()
                LivePart._live = live
            self._parts.append(self)

    def update(self, content: RenderableType, *, refresh: bool = True) -> None:
        """Replace the content of the part."""
        with self._lock:
            self._content = content
            if self in self._parts:
                self._draw(refresh)

    def stop(self) -> None:
        """End the part, if it is shown."""
        with self._lock:
            if self not in self._parts:
                return
            self._parts.remove(self)
            if self._parts:
                self._draw(refresh=True)
                if not self._transient:
                    LivePart._live.console.print(self._content)
                return
            live, LivePart._live = LivePart._live, None
            live.transient = self._transient
            live.stop()

    def _draw(self, refresh: bool) -> None:
        from rich.console import Group

        contents = [part._content for part in self._parts]
        LivePart._live.update(contents[0] if len(contents) == 1 else Group(*contents), refresh=refresh)
