"""The jobs that the page shows, and their metrics as charts. A request reads what has changed in their files."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Literal, TypeGuard, TypeVar

from msgspec import ValidationError, convert, to_builtins

from unirun.dashboard.reading import RankLog, Tail, log_files, log_path, read_part, search
from unirun.dashboard.views import (
    Plain,
    event_rows,
    failure_rows,
    graph_picture,
    job_view,
    rank_view,
    stack_view,
    story_rows,
    timeline,
)
from unirun.errors import JobError
from unirun.experiments.starting import job_of, phase_of, trials
from unirun.launcher.asking import ask_stacks
from unirun.observe.events import LoggedEvent
from unirun.observe.jobdir import JobDir, all_jobs, job_at
from unirun.observe.status import ENDED, JobStatus, Summary, read_status, read_summary
from unirun.values import Value
from unirun.wire.messages import AskStacks

EVENTS = 50_000
"""Events of a job that are kept; of more, the latest."""

STEPS = "steps.jsonl"
"""The metrics of a trial, in its directory."""

FAILURES = 500
"""Failures of a job that are shown; of more, the latest."""

SHOWN_EVENTS = 2_000

LOST_SECONDS = 5.0
"""Seconds between two looks at a job that waits for Slurm: its end may change no file, and Slurm is asked for it."""

Document = TypeVar("Document", bound=JobStatus | Summary)


class KeptDocument(Generic[Document]):
    """A document of a job, which is read again only if it may be another one: its file has changed, or the processes
    of the job are gone."""

    def __init__(self, job: JobDir, path: os.PathLike[str], read: Callable[[JobDir], Document]) -> None:
        self._job, self._path = job, path
        self._read: Callable[[JobDir], Document] = read
        self._read_at = (0, 0, 0)
        self._document: Document | None = None

    def stamp(self) -> tuple[int, int, int]:
        """Changes when the document may have. It costs a few calls of the system. Raises `JobError`."""
        return (*_stamp(self._path), self._loss())

    def _loss(self) -> int:
        """0 as long as the job is known to live, or to have written its end. -1 once it was read that it is lost: that
        changes no file, and a viewer who has not read it has to be told."""
        if self._document is None:
            return 0
        if self._document.phase == "lost":
            return -1
        if self._document.phase in ENDED or self._job.alive():
            return 0
        return 1 + int(time.monotonic() / LOST_SECONDS)

    def get(self) -> Document:
        """The document as it is now. Raises `JobError`."""
        stamp = self.stamp()
        if self._document is None or stamp != self._read_at:
            self._document = self._read(self._job)
            self._read_at = (*stamp[:2], self._loss() if self._document.phase in ENDED else stamp[2])
        return self._document


class WatchedJob:
    """The files of one job. Several threads may ask at once."""

    def __init__(self, job: JobDir) -> None:
        self.job, self.born = job, birth(job)
        self._lock = threading.Lock()
        self._status = KeptDocument(job, job.state, read_status)
        self._summary = KeptDocument(job, job.summary, read_summary)
        self._viewed: JobStatus | None = None
        self._view: Plain = {}
        self._events: deque[LoggedEvent] = deque(maxlen=EVENTS)
        self._event_tail, self._metric_tail = Tail(job.events), Tail(job.metrics)
        self._book: Book | None = None
        self._step_tail: Tail | None = None
        self._events_so_far = 0

    def stamp(self) -> tuple[int, ...]:
        """Changes when one of the files has, or the job may be lost. Its first number is the time of the state in ns.
        Raises `JobError`, also when another job has taken the id."""
        if birth(self.job) != self.born:
            raise JobError(f"job {self.job.run_id} is gone", "another one may have taken its id")
        return (*self._status.stamp(), _size(self.job.events) + _size(self.job.metrics))

    @property
    def status(self) -> JobStatus:
        """The status as it is now. Raises `JobError`."""
        with self._lock:
            return self._status.get()

    @property
    def summary(self) -> Summary:
        """The job in short. Raises `JobError`."""
        with self._lock:
            return self._summary.get()

    def view(self) -> Plain:
        """The job as the page shows it. Raises `JobError`."""
        with self._lock:
            status = self._status.get()
            if status is not self._viewed:
                self._viewed, self._view = status, job_view(status)
            return self._view

    def events(self) -> Sequence[LoggedEvent]:
        """The events so far, the oldest first."""
        return self._events_and_their_number()[0]

    def _events_and_their_number(self) -> tuple[Sequence[LoggedEvent], int]:
        """The events that are kept, and how many there were. Both are of one moment: another viewer may read more."""
        with self._lock:
            for line in self._event_tail.new():
                with suppress(ValidationError):
                    self._events.append(convert(line, LoggedEvent))
                    self._events_so_far += 1
            return tuple(self._events), self._events_so_far

    def events_since(self, number: int) -> tuple[list[Plain], int]:
        """The events from a number on, without their details, and the number of the next one. At most the latest
        `SHOWN_EVENTS` are given."""
        events, so_far = self._events_and_their_number()
        count = min(max(so_far - number, 0), len(events), SHOWN_EVENTS)
        return event_rows(events[len(events) - count :]), so_far

    def book(self) -> Book:
        """The metrics so far. Raises `JobError`."""
        status = self.status
        with self._lock:
            if self._book is None:
                self._book = Book(status.started)
                roots = [root for root in trials("") if job_of(root) == status.run_id]
                self._step_tail = Tail(roots[0] / STEPS) if roots else None
            for line in self._metric_tail.new():
                self._book.add_line(line)
            for line in self._step_tail.new() if self._step_tail is not None else ():
                self._book.add_step(line)
            return self._book

    # The contents of the parts of the page.

    def overview(self) -> Plain:
        """The job, its latest events, and the number of all. Raises `JobError`."""
        events, so_far = self._events_and_their_number()
        return {**self.view(), "events": event_rows(events[-200:]), "all": so_far}

    def event_list(self) -> Plain:
        """The latest events."""
        events, so_far = self.events_since(0)
        return {"events": events, "all": so_far}

    def failure_list(self) -> Plain:
        """The failures with their diagnoses. Raises `JobError`."""
        return {"failures": failure_rows(self.events(), FAILURES), "failed": self.status.failed}

    def stacks(self) -> Plain:
        """The stacks of the ranks, which are asked for them. Raises `JobError`."""
        if self.status.phase in ENDED:
            raise JobError(f"job {self.status.run_id} has ended", "its ranks have no stacks any more")
        return stack_view(*ask_stacks(self.job, AskStacks()))

    def graph(self) -> Plain:
        """The picture of the calls. Raises `JobError`."""
        return {"svg": graph_picture(self.status)}

    def timeline(self) -> Plain:
        """The spans of the ranks. Raises `JobError`."""
        return timeline(self.status, self.events(), time.time())

    def metrics(self, axis: Axis) -> Plain:
        """The names and the points of all metrics. Raises `JobError`."""
        book = self.book()
        names = book.names()
        chosen = [(each["role"], each["name"]) for each in names]
        points: Plain = to_builtins({"series": book.points(axis, chosen)})
        return {"names": names, "too_many": book.too_many, "left_out": self._metric_tail.left_out, **points}

    def rank(self, role: str, rank: int) -> Plain:
        """One rank, its latest events and its logs. Raises `JobError`."""
        found = rank_view(self.status, role, rank)
        if found is None:
            raise JobError(f"job {self.job.run_id} has no {role}:{rank}"[:200])
        logs = [to_builtins(each) for each in log_files(self.job, self.status, role, rank)]
        return {**found, "events": story_rows(self.events(), f"{role}:{rank}"), "logs": logs}

    def log(
        self, role: str, rank: int, log: RankLog, *, before: int | None = None, after: int | None = None
    ) -> Plain:
        """A part of a log. Raises `JobError`."""
        path = log_path(self.job, self.status, role, rank, log)
        try:
            found: Plain = to_builtins(read_part(path, before=before, after=after))
        except OSError as error:
            raise JobError(f"this log of {role}:{rank} cannot be read: {error.strerror}") from error
        return found

    def search(self, role: str, rank: int, log: RankLog, words: str, before: int | None) -> Plain:
        """The lines of a log that have these words. Raises `JobError`."""
        path = log_path(self.job, self.status, role, rank, log)
        try:
            found: Plain = to_builtins(search(path, words, before))
        except OSError as error:
            raise JobError(f"this log of {role}:{rank} cannot be read: {error.strerror}") from error
        return found


def _stamp(path: os.PathLike[str]) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except OSError:
        return (0, 0)
    return (info.st_mtime_ns, info.st_ino)


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class Jobs:
    """The jobs that the page may show: those of this user, or only some of them."""

    def __init__(self, only: Sequence[str] = ()) -> None:
        self.only = tuple(only)
        self._watched: dict[str, WatchedJob] = {}
        self._lock = threading.Lock()

    def find(self, run_id: str) -> WatchedJob:
        """The job with this id. Raises `JobError` for one that is not to be shown, and one without files."""
        if self.only and run_id not in self.only:
            raise JobError("this page does not show that job")
        job = job_at(run_id)
        if not job.path.is_dir() or job.path.is_symlink():
            raise JobError(f"no job is called {run_id}")
        with self._lock:
            return self._known(job)

    def _known(self, job: JobDir) -> WatchedJob:
        known = self._watched.get(job.run_id)
        # Another job may have taken the id.
        if known is None or known.born != birth(job):
            known = self._watched[job.run_id] = WatchedJob(job)
        return known

    def summaries(self) -> list[Plain]:
        """The jobs in short, the newest first. One without a status is left out."""
        jobs = {job.run_id: job for job in all_jobs() if not self.only or job.run_id in self.only}
        with self._lock:
            for gone in self._watched.keys() - jobs.keys():
                del self._watched[gone]
            watched = [self._known(job) for job in jobs.values()]
        found: list[Plain] = []
        for each in reversed(watched):
            with suppress(JobError):
                found.append(to_builtins(each.summary))
        return found

    def trials(self) -> list[Plain]:
        """The trials of experiments, and their jobs."""
        return [
            {"experiment": root.parts[-2], "trial": root.parts[-1], "phase": phase_of(job), "job": job}
            for root in trials("")
            if (job := job_of(root)) and (not self.only or job in self.only)
        ]


def birth(job: JobDir) -> tuple[int, int]:
    """Distinguishes the directory of a job from a later one with its name."""
    return _stamp(job.token)


BINS = 1024
"""Points of a chart. When there are more, two neighbours become one."""

LARGEST = 1e200
"""The sums of values below it are finite."""

NAMES = 500
"""Metrics of a job that are kept. Others are counted only."""

STEP_NAMES = ("step", "global_step", "training_iteration", "_training_iteration", "iteration")
"""Names of metrics that count steps, so that the others of the same report belong to that step."""

Axis = Literal["time", "step"]


class Points(Value):
    """The points of one chart line, in the order of `x`. `more` is the number of values that were not finite."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    more: int


class Series:
    """Values over `x`, which is 0 or more, in at most `BINS` bins of one width. It is doubled when they do not
    suffice."""

    def __init__(self) -> None:
        # In seconds or steps, at first.
        self._width = 0.05
        # By the number of the bin: how many values, the sums of x and of the values, the least, the greatest.
        self._bins: dict[int, list[float]] = {}
        self._more = 0

    def add(self, x: float, value: float | None) -> None:
        """Add one value; None is one that is not finite. Those beyond `LARGEST` count as such."""
        if value is None or not (abs(value) < LARGEST and abs(x) < LARGEST):
            self._more += 1
            return
        number = int(max(x, 0.0) / self._width)
        found = self._bins.get(number)
        if found is None:
            self._bins[number] = [1, x, value, value, value]
            while len(self._bins) > BINS:
                self._halve()
            return
        found[0] += 1
        found[1] += x
        found[2] += value
        found[3] = min(found[3], value)
        found[4] = max(found[4], value)

    def _halve(self) -> None:
        self._width *= 2
        merged: dict[int, list[float]] = {}
        for number, (count, x, total, low, high) in self._bins.items():
            into = merged.setdefault(number // 2, [0, 0.0, 0.0, low, high])
            into[0] += count
            into[1] += x
            into[2] += total
            into[3] = min(into[3], low)
            into[4] = max(into[4], high)
        self._bins = merged

    def points(self) -> Points:
        """The points so far."""
        rows = [
            (x / count, total / count, low, high)
            for _, (count, x, total, low, high) in sorted(self._bins.items())
        ]
        x, mean, low, high = ([_short(row[n]) for row in rows] for n in range(4))
        return Points(x, mean, low, high, self._more)


def _short(value: float) -> float:
    """Seven digits, which a chart does not need more of."""
    return float(f"{value:.7g}")


class Book:
    """The series of one job, by role and name: over the seconds since its start, and over the steps that were reported
    with them."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._series: dict[tuple[str, str, Axis], Series] = {}
        self._ranks: dict[tuple[str, str], set[int]] = {}
        self.too_many = 0
        """Values whose names were too many."""

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Add a line of ``metrics.jsonl``. One that is not as unirun writes it is left out."""
        values, role, rank, when = (line.get(name) for name in ("values", "role", "rank", "time"))
        if not (isinstance(values, dict) and isinstance(role, str) and isinstance(rank, int)):
            return
        if not (_is_number(when) and abs(when) < LARGEST):
            return
        step = next((values[name] for name in STEP_NAMES if _is_number(values.get(name))), None)
        for name, value in values.items():
            self._add(role, rank, name, value, {"time": when - self._began, "step": step})

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Add a line of the ``steps.jsonl`` of a trial."""
        step = line.get("step")
        if _is_number(step):
            for name, value in line.items():
                if name != "step" and (value is None or _is_number(value)):
                    self._add("trial", 0, name, value, {"step": step})

    def _add(self, role: str, rank: int, name: str, value: Any, xs: Mapping[Axis, float | None]) -> None:
        if not (value is None or _is_number(value)):
            return
        if (role, name) not in self._ranks and len(self._ranks) >= NAMES:
            self.too_many += 1
            return
        self._ranks.setdefault((role, name), set()).add(rank)
        for axis, x in xs.items():
            if x is not None:
                self._series.setdefault((role, name, axis), Series()).add(x, value)

    def names(self) -> list[dict[str, Any]]:
        """The role and the name of each metric, the number of ranks that report it, and the axes that it has."""
        return [
            {
                "role": role,
                "name": name,
                "ranks": len(ranks),
                "axes": [axis for axis in ("time", "step") if (role, name, axis) in self._series],
            }
            for (role, name), ranks in self._ranks.items()
        ]

    def points(self, axis: Axis, wanted: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        """The points of some metrics over one axis."""
        return [
            {"role": role, "name": name, "points": series.points()}
            for role, name in wanted
            if (series := self._series.get((role, name, axis))) is not None
        ]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
