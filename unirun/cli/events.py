"""``unirun events``, ``failures`` and ``trace``: what happened to a job, what was decided, and what caused it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from unirun.cli.output import duration, print_table, write_file
from unirun.cli.stored import find_here
from unirun.errors import JobError, UsageError
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.events import (
    EventReader,
    LoggedEvent,
    LoggedFailure,
    consequences,
    covers,
    failures,
    read_events,
    read_lines,
    story,
    term_of,
    too_late,
)
from unirun.observe.jobdir import JobDir, directories_of_nodes, file_of
from unirun.observe.spans import SPANS, TraceSpan, read_spans
from unirun.observe.status import ENDED, JobStatus, is_between_runs, read_status, read_summary
from unirun.observe.trace import MetricRow, offsets, trace_events
from unirun.values import WorkerId

FOLLOW_INTERVAL = 0.1
"""Seconds between two looks at a log that is followed."""


def show_events(options: Any) -> int:
    """Print the events of a job, the oldest first, each below the one that caused it; with -f one line each as they
    come. Returns 0. Raises `JobError`, `UsageError`."""
    since = 0.0 if options.since is None else moment(options.since, time.time())
    job = find_here(options.store, options.job, "events")
    if options.follow:
        _follow(job, options, since)
        return 0
    events = list(read_events(job.events))
    late = too_late(events)
    if options.story is not None:
        events = story(events, options.story)
        if not events:
            problem = f"no event of job {job.run_id} concerns {options.story}"
            raise JobError(
                problem, "name a worker (actor:2), a role (actor) or a node; unirun status lists them"
            )
    chosen = [e for e in events if e.time >= since and (not options.kind or e.kind in options.kind)]
    for line in _as_json(chosen, late) if options.json else lines(chosen, late):
        say(line)
    return 0


def _follow(job: JobDir, options: Any, since: float) -> None:
    """Print events as they are written, until the job has ended."""
    uid = ""
    while True:
        try:
            # Asked first: the last events are written before that.
            ended = read_summary(job).phase in ENDED
            if uid != job.uid:
                # At first, and when Slurm has requeued the job.
                uid, reader, latest = job.uid, EventReader(job.events), 0
        except JobError as error:
            if not is_between_runs(job, error):
                raise
            time.sleep(FOLLOW_INTERVAL)
            continue
        for event in reader.read():
            latest = max(latest, term_of(event))
            late = {event.id} if term_of(event) < latest else set()
            concerns = options.story is None or any(covers(each, options.story) for each in event.about)
            if concerns and event.time >= since and (not options.kind or event.kind in options.kind):
                say(_as_json([event], late)[0] if options.json else _dated(event, late))
        sys.stdout.flush()
        if ended:
            return
        time.sleep(FOLLOW_INTERVAL)


def moment(text: str, now: float) -> float:
    """The time that ``--since`` means: ``30m`` ago, or a date. Raises `UsageError`."""
    # A Z at the end is the zone of a date.
    if text[-1:].isalpha() and not text.endswith("Z"):
        return now - duration("--since", text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError(
            f"--since {text!r:.80} is no time", "for example 30m, 2026-11-27 or 2026-11-27T05:00"
        ) from error


def _as_json(events: Sequence[LoggedEvent], late: Collection[str]) -> list[str]:
    """The lines of the log; `replaced` is added to the events of a master that had been replaced."""
    rows = (to_builtins(each) | ({"replaced": True} if each.id in late else {}) for each in events)
    return [json.dumps(row) for row in rows]


def _dated(event: LoggedEvent, late: Collection[str]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(event.time))
    return f"{when}.{int(event.time % 1 * 1000):03d}  {_words(event, late)}"


def _words(event: LoggedEvent, late: Collection[str]) -> str:
    mark = f" (of the master of term {term_of(event)}, which had been replaced)" if event.id in late else ""
    return f"{event.kind}: {event.text}{mark}"


def lines(events: Sequence[LoggedEvent], late: Collection[str] = ()) -> list[str]:
    """One line for each event: seconds since the first, kind and text, indented below its cause. Those in `late` are
    marked."""
    if not events:
        return []
    began, ids = events[0].time, {event.id for event in events}
    effects: dict[str, list[LoggedEvent]] = {}
    for event in events:
        effects.setdefault(event.cause if event.cause in ids else "", []).append(event)
    found = [f"events since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(began))}, in seconds"]
    # A stack instead of a recursion: a long job is a long chain.
    due = [(event, 0) for event in reversed(effects.get("", []))]
    while due:
        event, depth = due.pop()
        found.append(f"{event.time - began:10.3f}  {'  ' * depth}{_words(event, late)}")
        due += [(effect, depth + 1) for effect in reversed(effects.get(event.id, []))]
    return found


RULES = {
    "exit": "the end of its process",
    "node": "the loss of its node",
    "hang": "a wait that did not end",
    "peers": "what its peers report",
    "probe": "its probe",
    "port": "another process that listens on its port",
    "store": "the end of its rendezvous store",
    "weights": "weights that it could not be given",
    "network": "connections between two nodes that get no answer",
}
"""The rules by which failures are noticed, in words."""


def show_failures(options: Any) -> int:
    """Print the failures of a job, the oldest first, or one of them. Returns 0."""
    job = find_here(options.store, options.job, "failures")
    events = list(read_events(job.events))
    found = list(failures(events))
    if options.why is not None:
        one = next((each for each in found if each.number == options.why), None)
        if one is None:
            raise JobError(
                f"job {job.run_id} has no failure {options.why}", f"it has had {len(found)} so far"
            )
        found = [one]
    if options.json:
        for each in found:
            story = consequences(events, each) if options.why is not None else ()
            more = {"events": [to_builtins(event) for event in story]} if options.why is not None else {}
            print(json.dumps({**to_builtins(each), **more}))
    elif options.why is not None:
        for line in _explained(found[0], events):
            say(line)
    elif not found:
        say(f"job {job.run_id} has had no failure")
    else:
        headers = ["N", "SECONDS", "WORKER", "INCARNATION", "NODE", "EXIT", "LIKELY CAUSE", "DECIDED"]
        headers += ["AWAY", "STEPS LOST"]
        print_table(headers, [_row(each, events[0].time) for each in found])
    return 0


def _row(failure: LoggedFailure, began: float) -> list[str]:
    record = failure.record
    return [
        str(failure.number),
        f"{record.time - began:.3f}",
        record.who,
        str(record.incarnation),
        record.node,
        record.exit,
        record.cause,
        record.decision.rpartition(f"{record.exit}; ")[2],
        _seconds(failure.durations.away),
        "" if failure.steps_lost is None else str(failure.steps_lost),
    ]


def _explained(failure: LoggedFailure, events: Sequence[LoggedEvent]) -> Iterator[str]:
    """The lines about one failure: its record, its durations, the events around it, its error."""
    record, took = failure.record, failure.durations
    slots = f", slot {', '.join(record.slots)}" if record.slots else ""
    since = record.time - events[0].time
    yield f"failure {failure.number}: {record.who} on {record.node}{slots}, {since:.3f} s after the first event"
    step = f", at step {record.step}" if record.step >= 0 else ""
    yield f"  incarnation {record.incarnation}, generation {record.generation}, {record.exit}{step}"
    yield f"likely cause: {record.cause} ({record.kind})"
    yield f"noticed by: {RULES.get(record.rule, record.rule)}{f' ({record.note})' if record.note else ''}"
    yield f"decided: {record.decision or 'nothing more, as that of an earlier failure was being carried out'}"
    for other in record.affected:
        yield f"affected: {other}"
    parts = {part: _seconds(getattr(took, part)) for part in took.__struct_fields__}
    yield f"took: {', '.join(f'{part} {time}' for part, time in parts.items() if time) or 'not known'}"
    if failure.steps_lost is not None:
        yield f"steps lost: {failure.steps_lost}"
    yield from lines(consequences(events, failure))
    words = record.traceback or record.message or record.tail
    if words:
        yield "error:" if record.traceback or record.message else "the end of its output:"
        yield from (f"  {line}" for line in words.rstrip().splitlines())
    if record.log:
        yield f"log: {record.log}/stderr.log"


def _seconds(time: float | None) -> str:
    return "" if time is None else f"{time:.3f} s"


def write_trace(options: Any) -> int:
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
    folders = (job, *directories_of_nodes(job))
    for role in status.roles:
        for worker in role.workers:
            for incarnation in range(worker.incarnation + 1):
                who = WorkerId(role.name, worker.rank, incarnation)
                if (path := file_of(folders, who, SPANS)) is not None:
                    found[who] = [*read_spans(path)]
    return {who: spans for who, spans in found.items() if spans}


def metrics_of(job: JobDir) -> Iterator[MetricRow]:
    """The metrics that workers have reported; a line of another version is left out."""
    with contextlib.suppress(OSError):
        for line in read_lines(Path(job.metrics)):
            with contextlib.suppress(ValueError):
                yield convert(line, MetricRow)
