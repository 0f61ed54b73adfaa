"""``unirun events [JOB]``: what happened to a job, what was decided, and what caused it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from msgspec import to_builtins

from unirun.cli.commandline import Parser
from unirun.cli.stored import JOB_HELP, STORE_HELP, find_here
from unirun.errors import JobError
from unirun.launcher.foreground.terminal import say
from unirun.observe.status import LoggedEvent, read_events, story


def main(argv: list[str]) -> int:
    """Print the events of a job, the oldest first, each below the one that caused it. Returns 0."""
    parser = Parser(prog="unirun events", description="What happened to a job, what was decided, and why.")
    parser.add_argument("job", nargs="?", help=JOB_HELP)
    parser.add_argument(
        "--story", help="only events of a worker, a role or a node, and their causes", metavar="WHO"
    )
    parser.add_argument("--json", action="store_true", help="one object a line, for programs")
    parser.add_argument("--store", help=STORE_HELP, metavar="URL")
    options = parser.parse_args(argv)
    job = find_here(options.store, options.job, "events")
    events = list(read_events(job.events))
    if options.story is not None:
        events = story(events, options.story)
        if not events:
            problem = f"no event of job {job.run_id} concerns {options.story}"
            raise JobError(
                problem, "name a worker (actor:2), a role (actor) or a node; unirun status lists them"
            )
    for line in (json.dumps(to_builtins(e)) for e in events) if options.json else lines(events):
        say(line)
    return 0


def lines(events: Sequence[LoggedEvent]) -> list[str]:
    """One line for each event: seconds since the first, kind and text, indented below its cause."""
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
        found.append(f"{event.time - began:10.3f}  {'  ' * depth}{event.kind}: {event.text}")
        due += [(effect, depth + 1) for effect in reversed(effects.get(event.id, []))]
    return found
