"""The progress of a worker, in a page of memory that its agent reads: steps, calls, collectives.

A report writes a few integers, takes less than a microsecond, and sends nothing. The page is an anonymous file of the
worker; the agent opens it by ``/proc/PID/fd`` when the worker has announced it, and reads it when it wants to know. So
the last report is there even if the process is stopped or holds the GIL. Times are nanoseconds of the host's monotonic
clock.

In a process without an agent the page is there and nobody reads it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unirun.errors import UnirunError
from unirun.values import Value
from unirun.wire.blocking import open_link, out_of_the_way
from unirun.wire.reports import ProgressPage

if TYPE_CHECKING:
    import asyncio

PAGE_NAME = "unirun-progress"
PAGE_BYTES = 4096

BEGAN, LAST, STEP, COUNT, CALLS, COLLECTIVES, IDLE, ALLOWED, BEAT, EVIDENCE, FIRST, FIRST_AT, BEFORE, TEXT = (
    range(14)
)
"""The integers of a page, 8 bytes each.

The time at which the worker began, or began anew, and that of its latest progress. Its latest step, -1 for none; the
numbers of reports, and of calls and collectives that it has begun. Whether it has nothing to do;
until when it may take its time. The latest look of the sampler (`unirun.launcher.sampler`); whether the agent wants
evidence. The step of its first report since it began or went back to an earlier step, the time of that, and the step
to which it had come before; -1 for none. The length of the text that follows.
"""

_FIELDS = struct.Struct("=14q")
TEXT_LIMIT = PAGE_BYTES - _FIELDS.size

FOR_EVER = 1 << 62
"""After every time of the clock."""

LOOP_BEAT_INTERVAL = 0.2
"""Seconds between two signs of life of an event loop, a fraction of any sensible time-out."""


class Snapshot(Value):
    """The contents of a page. `text` is JSON of what the worker waits for; see `unirun.launcher.sampler`."""

    began: int
    last: int
    step: int
    count: int
    calls: int
    collectives: int
    idle: int
    allowed: int
    beat: int
    evidence: int
    first: int
    first_at: int
    before: int
    text: str = ""


class Page:
    """The page of this process."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.fields = memoryview(memory)[: _FIELDS.size].cast("q")
        """The integers, by the constants of this module. A reader in another process sees each of them whole."""
        self.fields[STEP] = -1
        # The event loop in which tasks wait for another role, and its next sign of life.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat: asyncio.TimerHandle | None = None
        self.begin()

    def begin(self) -> None:
        """The worker begins, or begins another piece of work: its first step may take longer again."""
        fields = self.fields
        fields[COUNT] = 0
        fields[BEFORE], fields[STEP], fields[FIRST] = fields[STEP], -1, -1
        fields[BEGAN] = fields[LAST] = time.monotonic_ns()

    def step(self, number: int | None) -> None:
        """The worker has come to a step; None: to the next one."""
        fields = self.fields
        before, now = fields[STEP], time.monotonic_ns()
        if number is None:
            number = before + 1
        if number < before:
            fields[BEFORE] = before
        if number < before or fields[FIRST] < 0:
            fields[FIRST], fields[FIRST_AT] = number, now
        fields[STEP] = number
        fields[COUNT] += 1
        fields[LAST] = now

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A context for a call that this worker answers. Between two calls it is idle."""
        fields = self.fields
        fields[IDLE], fields[LAST] = 0, time.monotonic_ns()
        fields[CALLS] += 1
        try:
            yield
        finally:
            fields[IDLE] = 1
            fields[COUNT] += 1
            fields[LAST] = time.monotonic_ns()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """A context in which the worker waits for another role, or for the driver: that is no hang of this one. The
        waits of threads besides the main one do not count."""
        if threading.get_ident() != threading.main_thread().ident:
            yield
            return
        fields = self.fields
        before, fields[IDLE] = fields[IDLE], 1
        try:
            yield
        finally:
            fields[IDLE], fields[LAST] = before, time.monotonic_ns()

    @contextlib.contextmanager
    def awaiting(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """A context in which a task of `loop` waits for another role; any number of tasks at the same time. While one
        does, the worker is not late as long as its loop runs. Loops of other threads than the main one do not count.
        """
        if threading.get_ident() != threading.main_thread().ident:
            yield
            return
        if self._loop is not loop:
            # A loop that has ended may have left tasks.
            self._tasks, self._loop = 0, loop
        self._tasks += 1
        if self._tasks == 1:
            self._loop_runs(loop)
        try:
            yield
        finally:
            if self._loop is loop:
                self._tasks -= 1
                if not self._tasks and self._beat is not None:
                    self._beat.cancel()
            self.fields[LAST] = time.monotonic_ns()

    def _loop_runs(self, loop: asyncio.AbstractEventLoop) -> None:
        self.fields[LAST] = time.monotonic_ns()
        self._beat = loop.call_later(LOOP_BEAT_INTERVAL, self._loop_runs, loop)

    @contextlib.contextmanager
    def allowance(self, seconds: float) -> Iterator[None]:
        """A context that may take so many seconds, and the time-out after that."""
        fields = self.fields
        before, now = fields[ALLOWED], time.monotonic_ns()
        # In this order, nan is without an end, too.
        until = now + int(min(FOR_EVER - now, seconds * 1e9))
        fields[ALLOWED] = max(before, until)
        try:
            yield
        finally:
            fields[ALLOWED], fields[LAST] = before, time.monotonic_ns()

    def write(self, text: str) -> None:
        """Replace the text; one that is too long is left out."""
        data = text.encode()
        if len(data) > TEXT_LIMIT:
            data = b""
        self.fields[TEXT] = 0
        self._memory[_FIELDS.size : _FIELDS.size + len(data)] = data
        self.fields[TEXT] = len(data)


def read_page(number: int) -> Snapshot:
    """Read the page behind a descriptor. Raises OSError, and ValueError if it is none."""
    data = os.pread(number, PAGE_BYTES, 0)
    if len(data) < PAGE_BYTES:
        raise ValueError(f"{len(data)} bytes are no page of progress")
    *numbers, length = _FIELDS.unpack_from(data)
    text = data[_FIELDS.size : _FIELDS.size + max(length, 0)].decode(errors="replace")
    return Snapshot(*(*numbers, text))


def open_page(pid: int, number: int) -> int:
    """Open the page that the process `pid` has at this descriptor. Raises OSError if it is no page."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{PAGE_NAME}"):
        raise OSError(f"{path} is no page of progress")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def want_evidence(number: int) -> None:
    """Ask the worker whose page this is for evidence. Raises OSError."""
    os.pwrite(number, struct.pack("=q", 1), EVIDENCE * 8)


_page: Page | None = None
_opening = threading.Lock()


def page() -> Page:
    """The page of this process, which the first call makes and announces to the agent."""
    global _page
    if _page is None:
        with _opening:
            if _page is None:
                _page = _announced()
    return _page


def _announced() -> Page:
    # A process that a worker has started reports nothing in its name: a worker leads its session.
    if "UNIRUN_SOCKET" in os.environ and os.getpid() == os.getsid(0):
        # An agent that cannot be reached learns nothing of the progress; the work goes on.
        with contextlib.suppress(UnirunError, OSError, KeyError):
            number = out_of_the_way(os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC))
            os.ftruncate(number, PAGE_BYTES)
            made = Page(mmap.mmap(number, PAGE_BYTES))
            open_link(os.environ).send(ProgressPage(number))
            return made
    return Page(mmap.mmap(-1, PAGE_BYTES))


def _forget_in_fork() -> None:
    global _page, _opening
    _page, _opening = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_fork)


def progress(step: int | None = None) -> None:
    """Report that this worker has come to `step`, or to the next one.

    Call it once in each step of a loop of your own; `train.report` and calls to workloads do it by themselves. It takes
    less than a microsecond, sends nothing, and may be called anywhere, under torchrun and plain python, too. With
    ``--hang-timeout`` a worker that does not come further is found (docs/hangs.md).
    """
    page().step(step)


def allowance(seconds: float) -> contextlib.AbstractContextManager[None]:
    """A context for what may take longer than a step: an evaluation, a save, a compilation.

    ``with unirun.allowance(600): evaluate()`` adds 600 seconds to ``--hang-timeout`` there, for this rank and for those
    that wait for it. Without an end: ``float("inf")``.
    """
    return page().allowance(seconds)
