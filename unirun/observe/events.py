"""The event log of a job: what happened, what was decided, and what caused it. One JSON object a line.

docs/events.md has the schema and all kinds of events.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from msgspec import ValidationError, convert, field, to_builtins

from unirun.errors import JobError
from unirun.observe.ownership import read_file
from unirun.observe.status import FailureStatus
from unirun.values import Value, natural


class LineLog:
    """Appends to the file at `path`, which is created with the first line.

    On a full disk lines are lost, and no error is raised: the log is for people. A line that was written in part stays
    on a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._cut = False

    def open(self) -> None:
        """Open the file now. Raises OSError."""
        if self._file is None:
            file = self._path.open("a+b", buffering=0)
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                self._cut = file.read(1) != b"\n"
            self._file = file

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one object."""
        line = json.dumps(value).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.open()
            assert self._file is not None
            if self._cut:
                line = b"\n" + line
            written = self._file.write(line)
            # A disk that is almost full takes a part of the line.
            if written:
                self._cut = written < len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in `path`, the oldest first. A line that is incomplete, or nested too deeply, is left out.

    Raises OSError.
    """
    for line in read_file(path).splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            yield json.loads(line)


SCHEMA: Literal[1] = 1


class LoggedEvent(Value):
    """One line of the log.

    `id` is unique in the job: the master's term and a number. `time` is in seconds since the epoch. `cause` is the id
    of the event that this one follows from, empty when it has none. `about` names the workers (``actor:2``,
    ``actor:0-3``), roles and nodes that it is about. `details` are those of the kind.
    """

    id: str
    time: float
    kind: str
    text: str
    cause: str = ""
    about: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    schema: Literal[1] = SCHEMA


class EventLog:
    """Appends the events of the master of term `epoch` to a file. Raises `JobError` when it cannot be opened."""

    def __init__(self, path: Path, epoch: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._lines = LineLog(path)
        try:
            self._lines.open()
        except OSError as error:
            raise JobError(f"the event log {path} cannot be written: {error.strerror}") from error
        self._clock, self._epoch, self._own = clock, epoch, 0

    def write(
        self,
        kind: str,
        text: str,
        *,
        id: str = "",
        cause: str = "",
        about: tuple[str, ...] = (),
        **details: Any,
    ) -> LoggedEvent:
        """Append one event, and return it. One without an `id` gets one of the log's own."""
        if not id:
            self._own += 1
            id = f"{self._epoch}.{self._own}"
        event = LoggedEvent(id, round(self._clock(), 6), kind, text, cause, about, details)
        self._lines.append(to_builtins(event))
        return event

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_events(path: Path) -> Iterator[LoggedEvent]:
    """The events in `path`, the oldest first. A line that is not whole (yet, or for want of space) is left out.

    Raises `JobError` when the file cannot be read, or another version of unirun has written it.
    """
    try:
        for line in read_lines(path):
            try:
                yield convert(line, LoggedEvent)
            except ValueError as error:
                problem = f"{path} has the event {str(line)[:160]}, which this unirun does not know: {error}"
                raise JobError(problem, "use the version of unirun that has run the job") from error
    except OSError as error:
        raise JobError(f"no events can be read from {path}: {error.strerror}") from error


class EventReader:
    """Reads the events of the log at `path` as they are written."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[LoggedEvent]:
        """The events since the last call. A line of another version is left out, as one that is not whole.

        Raises `JobError` when the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JobError(f"no events can be read from {self._path}: {error.strerror}") from error
        whole = data.rfind(b"\n") + 1
        self._at += whole
        found = []
        for line in data[:whole].splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(convert(json.loads(line), LoggedEvent))
        return found


def term_of(event: LoggedEvent) -> int:
    """The term of the master that has written an event; 0 if its id has none."""
    found = re.match(r"\d{1,9}", event.id)
    return int(found[0]) if found else 0


def too_late(events: Iterable[LoggedEvent]) -> set[str]:
    """The ids of the events that a master has written after another one had taken its place: what it has decided by
    then was not carried out."""
    found, latest = set(), 0
    for event in events:
        latest = max(latest, term_of(event))
        if term_of(event) < latest:
            found.add(event.id)
    return found


def led_to(path: Path, id: str) -> list[str]:
    """The event `id` of the log in `path`, and what it follows from, the earliest first, in words.

    Raises `JobError` as `read_events` does.
    """
    by_id = {event.id: event for event in read_events(path)}
    events = chain(by_id, by_id[id]) if id in by_id else []
    return [f"{event.kind}: {event.text}" for event in reversed(events)]


def story(events: Sequence[LoggedEvent], who: str) -> list[LoggedEvent]:
    """The events about `who` (``actor:2``, ``actor``, a node), and all that they follow from, the oldest first."""
    by_id = {event.id: event for event in events}
    chosen: set[str] = set()
    for event in events:
        if any(covers(each, who) for each in event.about):
            chosen.update(each.id for each in chain(by_id, event))
    return [event for event in events if event.id in chosen]


def chain(by_id: dict[str, LoggedEvent], event: LoggedEvent) -> list[LoggedEvent]:
    """`event` and what it follows from, the latest first. Of a cause whose line was lost, nothing is known."""
    found, at = [event], by_id.get(event.cause)
    while at is not None and at not in found:
        found.append(at)
        at = by_id.get(at.cause)
    return found


def covers(subject: str, who: str) -> bool:
    """Return True if an event about `subject` is about `who`: the same subject, a rank of that role, or one
    of several ranks."""
    if subject == who:
        return True
    role, _, ranks = subject.partition(":")
    wanted, _, rank = who.partition(":")
    if role != wanted:
        return False
    if not ranks or not rank:
        return True
    if (number := natural(rank)) is None:
        return False
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        low, high = natural(first), natural(last or first)
        if low is not None and high is not None and low <= number <= high:
            return True
    return False


# The failures of a job as its log has them: the record of each, and how long it took to recover.


class Durations(Value):
    """The seconds of the parts of a recovery, each None if it was not reached, or is not known.

    `detect`: from the failure until the master has noticed it. `decide`: until the decision was written and told.
    `respawn`: until the rank has a process again. `rejoin`: until every rank of the role runs in one generation.
    `away`: from the failure until then. `useful`: from then until it has come further than before the failure.
    """

    detect: float | None = None
    decide: float | None = None
    respawn: float | None = None
    rejoin: float | None = None
    away: float | None = None
    useful: float | None = None


class LoggedFailure(Value):
    """A failure in the log: its `number`, from 1, the `id` of its event and the `cause` of that, its `record`, and how
    long the recovery has taken. `steps_lost` is the number of steps that the role has had to do again; None if its
    ranks report none."""

    number: int
    id: str
    cause: str
    record: FailureStatus
    durations: Durations = Durations()
    steps_lost: int | None = None


def failures(events: Sequence[LoggedEvent]) -> Iterator[LoggedFailure]:
    """The failures of a job in the order of the log. A record that another version has written is left out."""
    number = 0
    for at, event in enumerate(events):
        if event.kind != "failure":
            continue
        try:
            record = convert(event.details.get("failure"), FailureStatus)
        except ValidationError:
            continue
        number += 1
        took, lost = _recovery(record, events, at)
        yield LoggedFailure(number, event.id, event.cause, record, took, lost)


def _recovery(record: FailureStatus, events: Sequence[LoggedEvent], at: int) -> tuple[Durations, int | None]:
    """The durations of the recovery from the failure whose event is `events[at]`, and the steps that it has lost."""
    decided = spawned = running = useful = lost = None
    for index in range(at, len(events)):
        event = events[index]
        if event.kind == "decision" and decided is None and event.cause == events[at].cause:
            decided = event.time
        if (
            event.kind == "started"
            and spawned is None
            and any(covers(who, record.who) for who in event.about)
        ):
            spawned = event.time
        if event.kind == "running" and running is None and record.role in event.about:
            running = event.time
        if event.kind == "resumed" and lost is None and record.role in event.about:
            with contextlib.suppress(KeyError, TypeError):
                lost = max(event.details["furthest"] - event.details["first"], 0)
        if event.kind == "caught_up" and record.role in event.about:
            useful = event.time
        fails_again = event.kind == "failure" and running is not None and role_of(event) == record.role
        if useful is not None or fails_again or event.kind == "stopping":
            break
    took = Durations(
        detect=_between(record.time, record.noticed),
        decide=_between(record.noticed, decided),
        respawn=_between(decided, spawned),
        rejoin=_between(spawned, running),
        away=_between(record.time, running),
        useful=_between(running, useful),
    )
    return took, lost


def role_of(event: LoggedEvent) -> str:
    """The role that an event is about first, or whose rank it is."""
    return event.about[0].partition(":")[0] if event.about else ""


def _between(start: float | None, end: float | None) -> float | None:
    """The seconds between two times. The clocks of two hosts may differ, so that the earlier one comes later."""
    return None if start is None or end is None else round(max(end - start, 0.0), 6)


def consequences(events: Sequence[LoggedEvent], failure: LoggedFailure) -> list[LoggedEvent]:
    """The events that a failure follows from, and all that follow from its exit, the oldest first."""
    by_id = {event.id: event for event in events}
    chosen = {each.id for each in chain(by_id, by_id[failure.id])} if failure.id in by_id else set()
    root = failure.cause
    for event in events:
        # A cause is written before what follows from it.
        if event.cause and (event.cause == root or event.cause in chosen):
            chosen.add(event.id)
    return [event for event in events if event.id in chosen]
