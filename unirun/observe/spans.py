"""The spans of a worker: what it did from when to when, for ``unirun trace``. One JSON object a line.

They are written if the variable `TRACE` is set. A worker that is killed has written all but those of its last
`WRITE_INTERVAL` seconds. Times are nanoseconds since the epoch, by the clock of the worker's host.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import convert
from msgspec.json import Encoder

from unirun.values import Value
from unirun.wire.reporting import report, report_error

TRACE = "UNIRUN_TRACE"
"""The variable, in the environment of the command: ``UNIRUN_TRACE=1 unirun …``; ``UNIRUN_TRACE=collectives`` for these,
too."""

TRACED_COLLECTIVES = "collectives"
"""The value of `TRACE` with which collectives are among the spans."""

SPANS = "spans.jsonl"
"""The file, in the directory of a worker's logs."""

WRITE_INTERVAL = 0.2
"""Seconds between two writes."""

SpanKind = Literal["call", "run", "life", "collective"]
"""A call as its caller sees it, as its worker runs it; a collective; and any other span of a worker."""


Look = Callable[[bool], None]
"""Looks for what has happened, and writes its spans; True is the last look of this process."""


class TraceSpan(Value):
    """One span. A call has an id, `caller` and `seq`, in both processes; `workers` are those to which it was sent."""

    kind: SpanKind
    name: str
    began: int
    ended: int
    caller: str = ""
    seq: int = 0
    workers: tuple[str, ...] = ()
    failed: bool = False


class Spans:
    """Writes the spans of this process, if its job is traced. Any thread may do so.

    A span is kept in memory, which is all that a call waits for. A thread writes those that there are. It is the only
    thread of a trace: what has to be looked for is looked for by it (`also`).
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._handle = -1
        path = environ.get("TORCHELASTIC_ERROR_FILE")
        if environ.get(TRACE) and path:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            # A full disk costs the trace, and nothing else.
            with contextlib.suppress(OSError):
                self._handle = os.open(Path(path).parent / SPANS, flags, 0o600)
        self.on = self._handle >= 0
        self._kept: list[Callable[[], TraceSpan]] = []
        self._looks: list[Look] = []
        self._writing, self._over = threading.Lock(), threading.Event()
        self._process = os.getpid()
        if self.on:
            threading.Thread(target=self._run, name="unirun-spans", daemon=True).start()
            atexit.register(self.close)

    def write(self, kind: SpanKind, name: str, began: int, ended: int = 0, **about: Any) -> None:
        """Write a span that ends now, or has `ended`, if spans are on."""
        if self.on:
            self.keep(partial(TraceSpan, kind, name, began, ended or time.time_ns(), **about))

    def keep(self, make: Callable[[], TraceSpan]) -> None:
        """Write the span that `make` returns, which the thread calls. For spans that are on, and many."""
        self._kept.append(make)

    def also(self, look: Look) -> None:
        """Let the thread call `look` before it writes. One that raises is reported, and not called again."""
        self._looks.append(look)

    def close(self) -> None:
        """Write what is kept; the thread ends. In a fork, which has no thread, the spans are those of its parent."""
        if os.getpid() == self._process:
            self._over.set()
            self._flush(last=True)

    def _run(self) -> None:
        try:
            while not self._over.wait(WRITE_INTERVAL):
                self._flush()
        except Exception as error:  # noqa: BLE001 - the work goes on without a trace
            self.on = False
            self._kept.clear()
            report("unirun: this worker is not traced any more")
            report_error(error)

    def _flush(self, *, last: bool = False) -> None:
        with self._writing:
            for look in self._looks[:]:
                self._take_look(look, last)
            # Other threads append meanwhile.
            kept = self._kept[:]
            del self._kept[: len(kept)]
            lines = memoryview(Encoder().encode_lines([make() for make in kept]))
            with contextlib.suppress(OSError):
                while lines:
                    lines = lines[os.write(self._handle, lines) :]

    def _take_look(self, look: Look, last: bool) -> None:
        try:
            look(last)
        except Exception as error:  # noqa: BLE001 - the trace goes on without what it would have found
            self._looks.remove(look)
            report("unirun: some of this worker is not traced any more")
            report_error(error)


_spans: tuple[int, Spans] | None = None


def spans() -> Spans:
    """The spans of this process; the first call opens the file. A fork has its own."""
    global _spans
    if _spans is None or _spans[0] != os.getpid():
        _spans = os.getpid(), Spans(os.environ if os.getpid() == os.getsid(0) else {})
    return _spans[1]


def read_spans(path: Path) -> Iterator[TraceSpan]:
    """The spans in a file; none if there is no file. A line that is not whole is left out."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                yield convert(json.loads(line), TraceSpan)
