"""The spans of a worker: what it did from when to when, for ``unirun trace``. One JSON object a line.

They are written if the variable `TRACE` is set, each with one write, so those of a worker that is killed are there.
Times are nanoseconds since the epoch, by the clock of the worker's host.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import convert
from msgspec.json import encode

from unirun.values import Value

TRACE = "UNIRUN_TRACE"
"""The variable, in the environment of the command: ``UNIRUN_TRACE=1 unirun …``; ``UNIRUN_TRACE=collectives`` for these,
too."""

TRACED_COLLECTIVES = "collectives"
"""The value of `TRACE` with which collectives are among the spans."""

SPANS = "spans.jsonl"
"""The file, in the directory of a worker's logs."""

SpanKind = Literal["call", "run", "life", "collective"]
"""A call as its caller sees it, as its worker runs it; a collective; and any other span of a worker."""


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
    """Writes the spans of this process, if its job is traced. Any thread may do so."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._handle = -1
        path = environ.get("TORCHELASTIC_ERROR_FILE")
        if environ.get(TRACE) and path:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            # A full disk costs the trace, and nothing else.
            with contextlib.suppress(OSError):
                self._handle = os.open(Path(path).parent / SPANS, flags, 0o600)
        self.on = self._handle >= 0

    def write(self, kind: SpanKind, name: str, began: int, **about: Any) -> None:
        """Write a span that ends now, or `ended`, if spans are on."""
        if not self.on:
            return
        row = {"kind": kind, "name": name, "began": began, "ended": time.time_ns(), **about}
        with contextlib.suppress(OSError):
            os.write(self._handle, encode(row) + b"\n")


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
