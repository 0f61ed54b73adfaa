"""Metrics for Prometheus, read by its own parser."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed

from tests.unit.dashboard.recorded import MARKUP, START, record, recorded_status
from unirun.dashboard.openmetrics import Exposition, add_job, exposition, goodput
from unirun.dashboard.watching import Jobs
from unirun.observe.events import Durations, LoggedEvent, LoggedFailure, failures, read_events
from unirun.observe.status import FailureStatus, JobStatus, RoleStatus

NOW = START + 100.0


def families(status: JobStatus, events: list[LoggedEvent]) -> dict[str, Metric]:
    to = Exposition()
    add_job(to, status, events, NOW)
    return {family.name: family for family in parsed(to.text())}


def value(found: dict[str, Metric], family: str, sample: str = "", **labels: str) -> float:
    values = [
        each.value
        for each in found[family].samples
        if each.name == (sample or family) and labels.items() <= each.labels.items()
    ]
    assert len(values) == 1, (family, labels, values)
    return float(values[0])


def test_prometheus_reads_all_that_is_known_of_a_job() -> None:
    job = record("job-1", phase="running")
    found = families(recorded_status("job-1", 4, "running"), [*read_events(job.events)])
    assert value(found, "unirun_job_up", job="job-1") == 1
    assert value(found, "unirun_rank_up", role="actor", rank="3") == 1
    assert value(found, "unirun_rank_ready", role="actor", rank="3") == 1
    assert value(found, "unirun_rank_restarts", "unirun_rank_restarts_total", role="actor", rank="1") == 1
    assert value(found, "unirun_role_restarts", "unirun_role_restarts_total", role="actor") == 1
    assert value(found, "unirun_failures", "unirun_failures_total") == 1
    assert value(found, "unirun_recovery_seconds", "unirun_recovery_seconds_sum", role="actor") == 2.0
    assert (
        value(found, "unirun_recovery_seconds", "unirun_recovery_seconds_bucket", role="actor", le="2.5") == 1
    )
    assert value(found, "unirun_call_seconds", "unirun_call_seconds_count", target="actor") == 40
    bucket = "unirun_call_seconds", "unirun_call_seconds_bucket"
    found_below = [value(found, *bucket, target="actor", le=le) for le in ("0.003", "0.1", "+Inf")]
    assert found_below == [0, 38, 40]
    assert value(found, "unirun_edge_bytes", "unirun_edge_bytes_total", direction="sent") == 40_000
    assert value(found, "unirun_weights_staleness_versions", rank="1", channel="policy") == 1
    assert value(found, "unirun_reported", rank="0", name="loss") == 0.5
    assert 0.8 < value(found, "unirun_goodput_ratio") < 0.9


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 9.0]), max_size=20))
def test_a_bucket_has_all_that_is_at_most_its_bound(seconds: list[float]) -> None:
    to, bounds = Exposition(), (0.5, 1.0, 2.0)
    to.histogram("waits_seconds", "Waits.", seconds, bounds, {"job": "j"})
    found = {family.name: family for family in parsed(to.text())}
    for bound in (*bounds, math.inf):
        label = "+Inf" if bound == math.inf else str(bound)
        count = sum(each <= bound for each in seconds)
        assert value(found, "waits_seconds", "waits_seconds_bucket", le=label) == count
    assert value(found, "waits_seconds", "waits_seconds_sum") == sum(seconds)


def test_queues_have_families_of_their_own() -> None:
    status = recorded_status("job-1", 1, "running")
    worker = replace(
        status.roles[0].workers[0], metrics={"samples/items": 7.0, "samples/put": 1.5, MARKUP: 1.0}
    )
    found = families(replace(status, roles=(replace(status.roles[0], workers=(worker,)),)), [])
    assert value(found, "unirun_queue_items", queue="samples") == 7.0
    assert value(found, "unirun_reported", name="samples/put") == 1.5
    assert value(found, "unirun_reported", name=MARKUP) == 1.0


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb", MARKUP, "é"])
def test_any_text_is_a_label(text: str) -> None:
    to = Exposition()
    to.add("a", "gauge", "Words.", 1.0, {"name": text})
    assert [family.samples[0].labels["name"] for family in parsed(to.text())] == [text]


def test_samples_of_one_family_stand_together_for_several_jobs() -> None:
    record("job-1", phase="running")
    record("job-2", ranks=2, phase="running")
    found = {family.name: family for family in parsed(exposition(Jobs(), NOW))}
    assert {each.labels["job"] for each in found["unirun_rank_up"].samples} == {"job-1", "job-2"}


def test_a_job_that_has_ended_long_ago_is_left_out() -> None:
    record("job-1")
    assert "job-1" in exposition(Jobs(), START + 200)
    assert "job-1" not in exposition(Jobs(), time.time())


def test_a_job_whose_processes_are_gone_is_shown_for_an_hour_after_it_has_written_its_state() -> None:
    written = record("job-1", phase="running").state.stat().st_mtime
    phases = {
        minutes: 'phase="lost"' in exposition(Jobs(), written + 60.0 * minutes)
        for minutes in (1, 59, 61, 600)
    }
    assert phases == {1: True, 59: True, 61: False, 600: False}


def test_time_before_the_start_and_after_a_failure_is_no_goodput() -> None:
    job = record("job-1")
    events = [*read_events(job.events)]
    status = recorded_status("job-1", 4)
    # 10.1 s until both roles run, and 2 s from the failure until the role runs again.
    assert goodput(status, [*failures(events)], events, NOW) == pytest.approx((100 - 10.1 - 2.0) / 100)
    assert goodput(replace(status, ended=None), [], [], NOW) == 0.0


def test_time_until_a_role_has_come_further_than_before_is_no_goodput() -> None:
    job = record("job-1")
    events = [*read_events(job.events)]
    status = recorded_status("job-1", 4)
    (failure,) = failures(events)
    for useful, lost in ((None, 2.0), (0.0, 2.0), (5.0, 7.0)):
        found = [replace(failure, durations=replace(failure.durations, away=2.0, useful=useful))]
        assert goodput(status, found, events, NOW) == pytest.approx((100 - 10.1 - lost) / 100)


AWAY = st.tuples(st.integers(0, 30), st.integers(0, 10), st.none() | st.integers(0, 5))


@given(st.lists(AWAY, max_size=5), st.integers(0, 10))
def test_each_second_without_new_work_counts_once_whatever_failures_it_is_in(
    parts: list[tuple[int, int, int | None]], begun: int
) -> None:
    status = JobStatus(
        "job-1", "job", "failed", "", 100.0, 120.0, 1, (RoleStatus("a", "failed", 0, 0, 0, ()),)
    )
    events = [LoggedEvent("1.1", 100.0 + begun, "running", "it runs", about=("a",))]
    found = [
        LoggedFailure(
            number,
            "1.2",
            "",
            FailureStatus("a", 0, 0, "n0", 100.0 + at, "exit code 1"),
            Durations(away=float(away), useful=None if useful is None else float(useful)),
        )
        for number, (at, away, useful) in enumerate(parts, 1)
    ]
    lost = set(range(begun)).union(*(range(at, at + away + (useful or 0)) for at, away, useful in parts))
    new = 20 - len(lost & set(range(20)))
    assert goodput(status, found, events, 500.0) == pytest.approx(new / 20)
