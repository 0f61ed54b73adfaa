"""``unirun failures [JOB]``: all failures of a job, their likely causes, and what was decided."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import to_builtins

from unirun.cli.events import lines
from unirun.cli.output import print_table
from unirun.cli.stored import find_here
from unirun.errors import JobError
from unirun.launcher.foreground.terminal import say
from unirun.observe.events import LoggedEvent, LoggedFailure, consequences, failures, read_events

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


def main(options: Any) -> int:
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
    yield f"log: {record.log}/stderr.log"


def _seconds(time: float | None) -> str:
    return "" if time is None else f"{time:.3f} s"
