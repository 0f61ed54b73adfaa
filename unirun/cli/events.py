"""``unirun events [JOB]``: what happened to a job, what was decided, and what caused it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from msgspec import to_builtins

from unirun.cli.output import duration
from unirun.cli.stored import find_here
from unirun.errors import JobError, UsageError
from unirun.launcher.foreground.terminal import say
from unirun.observe.events import EventReader, LoggedEvent, covers, read_events, story, term_of, too_late
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, read_summary

FOLLOW_INTERVAL = 0.1
"""Seconds between two looks at a log that is followed."""


def main(options: Any) -> int:
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
    reader, latest = EventReader(job.events), 0
    while True:
        # Asked first: the last events are written before that.
        ended = read_summary(job).phase in ENDED
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
    if text[-1:].isalpha():
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
