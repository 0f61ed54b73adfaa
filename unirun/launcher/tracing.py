"""The spans of a worker beside those of its calls, if its job is traced: its start, its rendezvous, its collectives."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from unirun.launcher.imported import C10D, when_imported
from unirun.launcher.sampler import group_of, operation, recorded, shapes_of
from unirun.observe.spans import TRACE, TRACED_COLLECTIVES, Spans, spans

COLLECTIVES_INTERVAL = 0.5
"""Seconds between two looks at torch's recorder, which keeps the latest 2000 collectives."""

PACKAGE, RENDEZVOUS = "torch.distributed", "init_process_group"
"""The package of torch that has the function with which a script forms its default process group, as its module
`C10D`, and the name of the function."""


def trace_myself(environ: Mapping[str, str]) -> None:
    """Write the start of this process, and from now on its rendezvous and, if they are asked for, its collectives."""
    to = spans()
    if not to.on:
        return
    to.write("life", "start of the process", started())
    trace_rendezvous()
    if environ.get(TRACE) == TRACED_COLLECTIVES:
        to.also(CollectiveTrace(to).look)


def started() -> int:
    """The time at which this process was started, in nanoseconds since the epoch. The kernel has it in hundredths of a
    second, which are rounded up: it is after the order to start."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - max(0, int(age * 1e9))


def trace_rendezvous() -> None:
    """Write each call of `init_process_group`. torch has no hook for it, so it is wrapped, in a worker whose code
    has not imported torch yet when it does so."""
    when_imported(C10D, _wrap)


def _wrap(module: ModuleType) -> None:
    form: Callable[..., Any] = getattr(module, RENDEZVOUS)

    @functools.wraps(form)
    def traced(*args: Any, **kwargs: Any) -> Any:
        began, failed = time.time_ns(), True
        try:
            formed = form(*args, **kwargs)
            failed = False
            return formed
        finally:
            # Not those of a fork of this worker, which are off there.
            spans().write("life", "rendezvous", began, failed=failed)

    setattr(module, RENDEZVOUS, traced)
    if hasattr(sys.modules[PACKAGE], RENDEZVOUS):
        # It has the name from the module, and is imported completely.
        setattr(sys.modules[PACKAGE], RENDEZVOUS, traced)


class CollectiveTrace:
    """The collectives of this process, which are written once they are over. The flight recorder has the time of their
    end on GPUs alone; elsewhere they have no length."""

    def __init__(self, to: Spans) -> None:
        self._spans = to
        self._written: frozenset[tuple[int, int]] = frozenset()
        self._next = 0.0

    def look(self, last: bool) -> None:
        """Write those that are over since the last look, if it is time for one."""
        if time.monotonic() < self._next and not last:
            return
        self._next = time.monotonic() + COLLECTIVES_INTERVAL
        entries = recorded().get("entries", ())
        over = {
            (each["time_created_ns"], each["record_id"]): each
            for each in entries
            if each["retired"] or each["state"] == "completed"
        }
        for number in sorted(over.keys() - self._written):
            entry = over[number]
            began = entry["time_discovered_started_ns"] or entry["time_created_ns"]
            ended = max(entry["time_discovered_completed_ns"], began)
            name = f"{operation(entry)} {entry['collective_seq_id']} of {group_of(entry)} {shapes_of(entry)}"
            self._spans.write("collective", name.rstrip(), began, ended=ended)
        # What the recorder has dropped does not come back.
        self._written = frozenset(over)
