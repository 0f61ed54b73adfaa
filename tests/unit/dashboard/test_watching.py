"""Jobs as the page watches them: files are read again only if they may be others."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.dashboard.recorded import START, line, record, recorded_status
from unirun.dashboard import watching
from unirun.dashboard.watching import BINS, Book, Jobs, KeptDocument, Series, WatchedJob
from unirun.errors import JobError
from unirun.observe.jobdir import JobDir
from unirun.observe.status import JobStatus, read_status, write_status


@contextmanager
def living(job: JobDir) -> Iterator[None]:
    """A process of the job lives in this context."""
    handle = os.open(job.lock, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


class Reads:
    """Reads the status of a job, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, job: JobDir) -> JobStatus:
        self.count += 1
        return read_status(job)


def test_a_document_is_read_again_when_its_file_is_another_and_when_the_processes_are_gone() -> None:
    job, reads = record("job-1", phase="running"), Reads()
    kept = KeptDocument(job, job.state, reads)
    with living(job):
        first = kept.get()
        assert (kept.get() is first, first.phase, reads.count) == (True, "running", 1)
        stamp = kept.stamp()
        write_status(job, recorded_status("job-1", 5, "running"))
        assert kept.stamp() != stamp
        assert (len(kept.get().roles[0].workers), reads.count) == (5, 2)
        stamp = kept.stamp()
    # Nothing was written.
    assert kept.stamp() != stamp
    assert (kept.get().phase, kept.get().phase, reads.count) == ("lost", "lost", 3)
    write_status(job, recorded_status("job-1", 5, "succeeded"))
    assert (kept.get().phase, kept.get().phase, reads.count) == ("succeeded", "succeeded", 4)


def test_every_viewer_sees_the_loss_of_a_job_whoever_reads_it_first() -> None:
    job = record("job-1", phase="running")
    watched = WatchedJob(job)
    with living(job):
        assert watched.view()["phase"] == "running"
        seen = watched.stamp()
    assert watched.view()["phase"] == "lost"
    assert watched.stamp() != seen
    assert watched.stamp() == watched.stamp()


def test_a_job_that_waits_for_slurm_is_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    job = record("job-1", phase="pending")
    count, now = 0, 100.0

    def read(_: JobDir) -> JobStatus:
        nonlocal count
        count += 1
        return recorded_status("job-1", 4, "pending")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    kept = KeptDocument(job, job.state, read)
    for _ in range(100):
        kept.get()
        now += 0.2
    assert count == pytest.approx(20 / watching.LOST_SECONDS, abs=2)


def test_a_link_to_a_job_is_none() -> None:
    job = record("job-1")
    job.path.with_name("job-2").symlink_to(job.path)
    with pytest.raises(JobError):
        Jobs().find("job-2")
    assert [each["run_id"] for each in Jobs().summaries()] == ["job-1"]


def test_the_list_reads_what_is_new_and_forgets_jobs_that_were_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = record("job-1")
    record("job-2")
    jobs = Jobs()
    assert [each["run_id"] for each in jobs.summaries()] == ["job-2", "job-1"]
    monkeypatch.setattr(JobDir, "read_json", lambda *_: pytest.fail("it was read before"))
    assert [each["phase"] for each in jobs.summaries()] == ["succeeded", "succeeded"]
    watched = jobs.find("job-1")
    job.path.rename(job.path.with_name(".removed"))
    assert [each["run_id"] for each in jobs.summaries()] == ["job-2"]
    job.path.with_name(".removed").rename(job.path)
    assert jobs.find("job-1") is not watched


VALUES = st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=300)


def binned(values: list[tuple[float, float]], most: int) -> list[list[float]]:
    """The means of both, and the range, of the values in each bin of the least width with which there are few."""
    width = 0.05
    while len({int(x / width) for x, _ in values}) > most:
        width *= 2
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, value in values:
        bins.setdefault(int(x / width), []).append((x, value))
    rows = []
    for _, pairs in sorted(bins.items()):
        xs, ys = zip(*pairs, strict=True)
        rows.append([sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)])
    return rows


@examples(100, shrunk=False)
@given(VALUES)
def test_a_series_has_the_means_and_the_range_of_all_values_in_few_bins(
    values: list[tuple[float, float]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "BINS", 16)
        made = Series()
        for x, value in values:
            made.add(x, value)
    points = made.points()
    found = zip(points.x, points.mean, points.low, points.high, strict=True)
    for row, wanted in zip(found, binned(values, 16), strict=True):
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-3)


def test_a_week_of_points_takes_no_more_than_the_bins() -> None:
    made = Series()
    for second in range(0, 7 * 86400, 5):
        made.add(float(second), 1.0)
    points = made.points()
    assert len(points.x) <= BINS
    assert points.x[-1] > 6.9 * 86400


def test_values_that_are_not_finite_are_counted() -> None:
    made = Series()
    for value in (1.0, None, math.nan, math.inf, 1e300, -(10**400)):
        made.add(0.0, value)
    for x in (math.nan, math.inf, 1e308, 10**400):
        made.add(x, 1.0)
    assert made.points().more == 9
    assert made.points().x == [0]


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e308, 10**400, True, "1"])
def test_any_number_in_a_file_leaves_the_others(number: object) -> None:
    book = Book(START)
    for each in ({**line("actor", 0, START + 1, {}), "time": number}, {"values": {}, "time": number}):
        book.add_line({**each, "values": {"loss": 1.0}})
    book.add_line({**line("actor", 0, START + 1, {}), "values": {"loss": number, "step": number}})
    book.add_line(line("actor", 0, START + 2, {"loss": 0.5}))
    book.add_step({"step": number, "loss": number})
    book.add_step({"step": 1, "loss": 2.0})
    assert 0.5 in book.points("time", [("actor", "loss")])[0]["points"].mean
    assert book.points("step", [("trial", "loss")])[0]["points"].mean == [2]


def test_metrics_have_an_axis_of_steps_if_a_step_was_reported_with_them() -> None:
    book = Book(START)
    book.add_line(line("actor", 0, START + 5, {"loss": 0.5, "step": 3}))
    book.add_line(line("rollout", 0, START + 6, {"reward": 1.0}))
    assert book.points("step", [("actor", "loss")])[0]["points"].x == [3]
    assert book.points("time", [("rollout", "reward")])[0]["points"].x == [6]
    assert [(each["name"], each["axes"]) for each in book.names()] == [
        ("loss", ["time", "step"]),
        ("step", ["time", "step"]),
        ("reward", ["time"]),
    ]


def test_ranks_of_a_role_are_one_line_with_their_range() -> None:
    book = Book(START)
    for rank, value in enumerate((1.0, 2.0, 6.0)):
        book.add_line(line("actor", rank, START + 5, {"loss": value}))
    points = book.points("time", [("actor", "loss")])[0]["points"]
    assert (points.low, points.mean, points.high) == ([1.0], [3.0], [6.0])
    assert book.names()[0]["ranks"] == 3


def test_lines_of_steps_of_a_trial_are_metrics_too() -> None:
    book = Book(START)
    book.add_step({"step": 1, "actorTrain/loss": 0.5, "name": "text", "seconds": None})
    assert book.points("step", [("trial", "actorTrain/loss")])[0]["points"].mean == [0.5]
    assert book.points("step", [("trial", "name")]) == []


def test_names_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "NAMES", 2)
    book = Book(START)
    book.add_line(line("actor", 0, START, {"a": 1.0, "b": 1.0, "c": 1.0}))
    assert (len(book.names()), book.too_many) == (2, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"role": 1},
        {"role": "a", "rank": 0, "time": "x", "values": {}},
        {"role": "a", "rank": 0, "time": 1, "values": []},
    ],
)
def test_a_foreign_line_is_left_out(bad: dict[str, object]) -> None:
    book = Book(START)
    book.add_line(bad)
    assert book.names() == []
