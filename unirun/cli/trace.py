"""``unirun trace JOB -o trace.json``: what a job did, on one clock, for Perfetto and chrome://tracing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import convert

from unirun.cli.output import write_file
from unirun.cli.stored import find_here
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.events import read_events, read_lines
from unirun.observe.jobdir import JobDir, directories_of_nodes
from unirun.observe.spans import SPANS, TraceSpan, read_spans
from unirun.observe.status import JobStatus, read_status
from unirun.observe.trace import MetricRow, offsets, trace_events
from unirun.values import WorkerId


def main(options: Any) -> int:
    """Write the trace. Returns 0. Raises `JobError`, `UsageError`."""
    job = find_here(options.store, options.job, "trace")
    status = read_status(job)
    events, spans = list(read_events(job.events)), spans_of(job, status)
    nodes = {f"{role.name}:{each.rank}": each.node for role in status.roles for each in role.workers}
    rows = list(trace_events(events, metrics_of(job), spans, nodes))
    write_file(options.output, json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
    calls = sum(span.kind == "call" for found in spans.values() for span in found)
    say(f"{options.output}: {len(rows)} trace events, {calls} calls")
    for node, clock in offsets(events, spans, nodes).items():
        within = "" if clock.within is None else f", within {1e3 * clock.within:.3g} ms"
        say(f"the clock of {node} is {1e3 * clock.seconds:+.3g} ms from the master's{within}")
    if not any(spans.values()):
        warn(
            "the job has written no spans: calls are in traces of jobs with UNIRUN_TRACE=1 in their environment"
        )
    return 0


def spans_of(job: JobDir, status: JobStatus) -> dict[WorkerId, list[TraceSpan]]:
    """The spans of all incarnations of all ranks."""
    found: dict[WorkerId, list[TraceSpan]] = {}
    for role in status.roles:
        for worker in role.workers:
            for incarnation in range(worker.incarnation + 1):
                who = WorkerId(role.name, worker.rank, incarnation)
                for folder in (job, *directories_of_nodes(job)):
                    found.setdefault(who, []).extend(read_spans(folder.worker_logs(who) / SPANS))
    return {who: spans for who, spans in found.items() if spans}


def metrics_of(job: JobDir) -> Iterator[MetricRow]:
    """The metrics that workers have reported; a line of another version is left out."""
    with contextlib.suppress(OSError):
        for line in read_lines(Path(job.metrics)):
            with contextlib.suppress(ValueError):
                yield convert(line, MetricRow)
