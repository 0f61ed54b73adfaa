"""The metrics of jobs in the OpenMetrics text format, as Prometheus reads them. docs/dashboard.md has their names."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf

from unirun.dashboard.watching import Jobs
from unirun.errors import JobError
from unirun.observe.events import LoggedEvent, LoggedFailure, failures
from unirun.observe.status import ENDED, JobStatus
from unirun.wire.reports import FROM, LATENCY_BOUNDS, VERSION

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

SHOWN_AFTER_END_SECONDS = 3600.0
"""Seconds for which a job that has ended is still shown, so that its end is seen."""

RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds in seconds."""

QUEUE = {"items": "unirun_queue_items", "admitted": "unirun_queue_admitted"}
"""The metric of a queue that a worker's report has under ``<queue>/<key>``."""

Labels = Mapping[str, object]


class Exposition:
    """Families of metrics, and their samples in the order in which they were added."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, str, str]] = {}
        self._samples: dict[str, list[str]] = defaultdict(list)

    def add(
        self,
        family: str,
        kind: str,
        words: str,
        value: float,
        labels: Labels,
        *,
        suffix: str = "",
        unit: str = "",
    ) -> None:
        """Add one sample of a family. A counter's sample has the suffix ``_total``."""
        self._kinds.setdefault(family, (kind, unit, words))
        suffix = suffix or ("_total" if kind == "counter" else "_info" if kind == "info" else "")
        shown = ",".join(f'{name}="{_escaped(str(text))}"' for name, text in labels.items())
        self._samples[family].append(f"{family}{suffix}{{{shown}}} {_number(value)}")

    def histogram(
        self, family: str, words: str, values: Sequence[float], bounds: Sequence[float], labels: Labels
    ) -> None:
        """Add the distribution of some seconds."""
        counts = [0] * (len(bounds) + 1)
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.counted(family, words, counts, sum(values), bounds, labels)

    def counted(
        self,
        family: str,
        words: str,
        counts: Sequence[int],
        total: float,
        bounds: Sequence[float],
        labels: Labels,
    ) -> None:
        """Add the distribution of seconds that are `total` together: the counts of those up to each of the bounds, and
        of those above."""
        below = 0
        for bound, count in zip((*bounds, inf), counts, strict=True):
            below += count
            label = {**labels, "le": _number(bound)}
            self.add(family, "histogram", words, below, label, suffix="_bucket", unit="seconds")
        for suffix, value in (("_count", float(below)), ("_sum", total)):
            self.add(family, "histogram", words, value, labels, suffix=suffix, unit="seconds")

    def text(self) -> str:
        """The whole text."""
        lines = []
        for family, (kind, unit, words) in self._kinds.items():
            lines.append(f"# TYPE {family} {kind}")
            if unit:
                lines.append(f"# UNIT {family} {unit}")
            lines += [f"# HELP {family} {_escaped(words)}", *self._samples[family]]
        return "\n".join([*lines, "# EOF"]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if value == inf:
        return "+Inf"
    return repr(float(value)) if value != int(value) or abs(value) > 1e15 else f"{int(value)}.0"


def exposition(jobs: Jobs, now: float) -> str:
    """All metrics of the jobs that run, and of those that have ended within the last hour."""
    found = Exposition()
    for summary in jobs.summaries():
        with suppress(JobError):
            job = jobs.find(summary["run_id"])
            # One whose processes are gone has left no time of its end, but has written its state before.
            ended = summary["ended"] or job.stamp()[0] / 1e9
            if summary["phase"] not in ENDED or now - ended <= SHOWN_AFTER_END_SECONDS:
                add_job(found, job.status, job.events(), now)
    return found.text()


def add_job(to: Exposition, status: JobStatus, events: Sequence[LoggedEvent], now: float) -> None:
    """Add the metrics of one job."""
    job = {"job": status.run_id}
    to.add(
        "unirun_job", "info", "A job and its phase.", 1.0, {**job, "name": status.name, "phase": status.phase}
    )
    up = status.phase not in ENDED
    to.add("unirun_job_up", "gauge", "1 while the job runs.", float(up), job)
    to.add(
        "unirun_job_started_timestamp_seconds",
        "gauge",
        "Start of the job.",
        status.started,
        job,
        unit="seconds",
    )
    to.add("unirun_job_restarts", "counter", "Restarts of the whole job.", status.restarts, job)
    to.add("unirun_failures", "counter", "Failures of ranks.", status.failed, job)
    to.add("unirun_nodes_lost", "counter", "Nodes that were lost.", len(status.lost), job)
    found = [*failures(events)]
    words = "Share of the time since the start in which the job did new work."
    share = goodput(status, found, events, now)
    to.add("unirun_goodput_ratio", "gauge", words, share, job, unit="ratio")
    _add_roles(to, status, found, job)
    _add_calls(to, status, job)
    _add_reports(to, status, job)


def _add_roles(to: Exposition, status: JobStatus, found: Sequence[LoggedFailure], job: Labels) -> None:
    for role in status.roles:
        of_role = {**job, "role": role.name}
        to.add("unirun_role_restarts", "counter", "Restarts of a role.", role.restarts, of_role)
        words = "Generation of the process group of a role."
        to.add("unirun_role_generation", "gauge", words, role.generation, of_role)
        away = [
            each.durations.away
            for each in found
            if each.record.role == role.name and each.durations.away is not None
        ]
        words = "Time from a failure until every rank of the role runs again."
        to.histogram("unirun_recovery_seconds", words, away, RECOVERY_BUCKETS, of_role)
        for worker in role.workers:
            rank = {**of_role, "rank": worker.rank, "node": worker.node}
            runs = worker.phase in ("running", "serving")
            to.add("unirun_rank_up", "gauge", "1 while the rank runs.", float(runs), rank)
            ready = runs if worker.ready is None else worker.ready
            to.add("unirun_rank_ready", "gauge", "1 while the rank is ready.", float(ready), rank)
            to.add("unirun_rank_restarts", "counter", "Restarts of a rank.", worker.incarnation, rank)
            if worker.memory is not None:
                words = "Memory of the process of a rank."
                to.add("unirun_rank_memory_bytes", "gauge", words, worker.memory, rank, unit="bytes")
            if worker.cpu is not None:
                words = "Processor time of the process of a rank."
                to.add("unirun_rank_cpu_seconds", "counter", words, worker.cpu, rank, unit="seconds")


def _add_calls(to: Exposition, status: JobStatus, job: Labels) -> None:
    for call in status.calls:
        edge = {**job, "source": call.source, "target": call.target, "method": call.method}
        words = "Calls between two roles, and the time until their answers."
        if call.latencies:
            to.counted("unirun_call_seconds", words, call.latencies, call.seconds, LATENCY_BOUNDS, edge)
        words = "Arguments (sent) and results (returned) of calls between two roles."
        for direction, size in (("sent", call.bytes), ("returned", call.returned)):
            labels = {**edge, "direction": direction}
            to.add("unirun_edge_bytes", "counter", words, size, labels, unit="bytes")


def _add_reports(to: Exposition, status: JobStatus, job: Labels) -> None:
    """The latest reports of ranks. Those of unirun's own channels and queues have families of their own."""
    newest: dict[str, float] = {}
    reports = [
        ({**job, "role": role.name, "rank": worker.rank}, name, value)
        for role in status.roles
        for worker in role.workers
        for name, value in worker.metrics.items()
        if value is not None
    ]
    for _, name, value in reports:
        if name.endswith(VERSION):
            newest[name] = max(newest.get(name, 0.0), value)
    for rank, name, value in reports:
        before, _, key = name.rpartition("/")
        if FROM in name:
            continue
        if name.endswith(VERSION):
            labels = {**rank, "channel": name.removesuffix(VERSION)}
            to.add(
                "unirun_weights_version", "gauge", "Version of the weights that a rank has.", value, labels
            )
            words = "Versions by which a rank is behind the newest one."
            to.add(
                "unirun_weights_staleness_versions",
                "gauge",
                words,
                newest[name] - value,
                labels,
                unit="versions",
            )
        elif before and key in QUEUE:
            words = "Items in a queue." if key == "items" else "Items that were admitted and are not done."
            to.add(QUEUE[key], "gauge", words, value, {**rank, "queue": before})
        else:
            words = "The latest value that a rank has reported."
            to.add("unirun_reported", "gauge", words, value, {**rank, "name": name})


def goodput(
    status: JobStatus, found: Iterable[LoggedFailure], events: Sequence[LoggedEvent], now: float
) -> float:
    """The share of the time since the start in which the job did new work: not before every role has run, and not from
    a failure until its role runs again and has come further than before."""
    end = status.ended if status.ended is not None else now
    whole = end - status.started
    if whole <= 0:
        return 0.0
    first: dict[str, float] = {}
    for event in events:
        if event.kind == "running":
            for role in event.about:
                first.setdefault(role, event.time)
    begun = [first.get(role.name, end) for role in status.roles]
    away = [(status.started, max(begun, default=end))]
    for each in found:
        took = each.durations
        lasted = end - each.record.time if took.away is None else took.away + (took.useful or 0.0)
        away.append((each.record.time, each.record.time + lasted))
    lost, until = 0.0, status.started
    for start, stop in sorted(away):
        lost += max(0.0, min(stop, end) - max(start, until))
        until = max(until, min(stop, end))
    return max(0.0, 1.0 - lost / whole)
