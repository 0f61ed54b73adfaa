"""The spans of a worker in any history: it forks, its writes are short, and it closes them at any moment."""

from __future__ import annotations

import atexit
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.effort import examples
from unirun.observe import spans
from unirun.observe.spans import SPANS, Spans, TraceSpan, read_spans


class Process(SimpleNamespace):
    """The calls of the system of a process, whose id changes in a fork. A write takes so many bytes at most."""

    pid = 1
    most = 1 << 20
    O_WRONLY, O_CREAT, O_APPEND, O_CLOEXEC = os.O_WRONLY, os.O_CREAT, os.O_APPEND, os.O_CLOEXEC
    open = staticmethod(os.open)

    def getpid(self) -> int:
        return self.pid

    def write(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data[: self.most])


class History(RuleBasedStateMachine):
    """One worker. The reference is the list of what it was told to write."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = ExitStack()
        self.folder = Path(self.opened.enter_context(tempfile.TemporaryDirectory()))
        self.process = Process()
        # Its thread writes when the history says so.
        self.opened.enter_context(mock.patch.multiple(spans, os=self.process, WRITE_INTERVAL=3600.0))
        self.spans = Spans({spans.TRACE: "1", "TORCHELASTIC_ERROR_FILE": str(self.folder / "error.json")})
        self.opened.callback(os.close, self.spans._handle)
        self.told: list[str] = []
        self.number = 0

    @rule(count=st.integers(1, 3))
    def spans_end(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.told.append(f"span {self.number}")
            self.spans.write("life", self.told[-1], 1, 2)

    @rule()
    def the_thread_writes(self) -> None:
        self.spans._flush()

    @rule()
    def a_span_ends_while_the_thread_writes(self) -> None:
        def make() -> TraceSpan:
            self.spans_end(1)
            return TraceSpan("life", name, 1, 2)

        self.number += 1
        name = f"span {self.number}"
        self.told.append(name)
        self.spans.keep(make)

    @rule(most=st.sampled_from((1 << 20, 1, 20)))
    def a_write_takes_a_part(self, most: int) -> None:
        self.process.most = most

    @rule()
    def a_fork_ends(self) -> None:
        """It has the memory of the worker, and closes what it has of it."""
        kept = [*self.spans._kept]
        self.process.pid = 2
        self.spans.close()
        self.process.pid = 1
        self.spans._kept[:] = kept

    def teardown(self) -> None:
        # Those that end while it writes for the last time are lost.
        self.spans._flush()
        self.spans.close()
        atexit.unregister(self.spans.close)
        found = [span.name for span in read_spans(self.folder / SPANS)]
        self.opened.close()
        assert found == self.told


TestSpans = History.TestCase
TestSpans.settings = examples(60, shrunk=False)
