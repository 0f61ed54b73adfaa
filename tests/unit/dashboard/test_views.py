"""The contents of the page."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.dashboard.recorded import START, record, recorded_status
from unirun.dashboard import views
from unirun.dashboard.views import (
    changes,
    failure_rows,
    graph_picture,
    job_view,
    rank_view,
    stack_view,
    state_of,
    story_rows,
    timeline,
)
from unirun.dashboard.watching import Jobs, WatchedJob
from unirun.errors import JobError
from unirun.observe.events import EventLog, LoggedEvent, read_events
from unirun.observe.status import RoleStatus, WorkerStatus, write_status
from unirun.values import WorkerId
from unirun.wire.reports import RankProgress, RankStacks, ThreadStack, Wait


def worker(phase: str, exit: str = "", ready: bool | None = None) -> WorkerStatus:
    return WorkerStatus(0, phase, "h0", 0, None, exit, ready=ready)


@pytest.mark.parametrize(
    ("role", "one", "failed", "state"),
    [
        ("running", worker("running"), False, "running"),
        ("running", worker("serving", ready=True), False, "serving"),
        ("running", worker("running", ready=False), False, "unready"),
        ("running", worker("starting", ready=False), False, "starting"),
        ("succeeded", worker("exited", "exit code 0"), False, "done"),
        ("restarting", worker("exited", "killed by SIGTERM"), False, "stopped"),
        ("restarting", worker("exited", "killed by SIGKILL"), True, "failed"),
        ("failed", worker("exited", "exit code 1"), False, "failed"),
    ],
)
def test_a_rank_has_one_state(role: str, one: WorkerStatus, failed: bool, state: str) -> None:
    assert state_of(RoleStatus("a", role, 0, 0, 0, (one,)), one, failed=failed) == state


def test_of_a_change_only_the_rows_that_have_changed_are_sent() -> None:
    status = recorded_status("job-1", 100, "running")
    before = job_view(status)
    assert changes(before, job_view(status)) is None
    actor = status.roles[0]
    dead = replace(actor.workers[7], phase="exited", exit="killed by SIGKILL", pid=None)
    workers = (*actor.workers[:7], dead, *actor.workers[8:])
    after = job_view(
        replace(status, roles=(replace(actor, phase="reforming", workers=workers), status.roles[1]), failed=2)
    )
    change = changes(before, after)
    assert change is not None
    assert change["fields"] == {"failed": 2}
    assert change["roles"]["actor"]["fields"] == {"phase": "reforming"}
    assert {*change["roles"]["actor"]["ranks"]} == {"7"}
    patched = copy.deepcopy(before)
    patched.update(change["fields"])
    patched["roles"][0].update(change["roles"]["actor"]["fields"])
    patched["roles"][0]["ranks"][7] = change["roles"]["actor"]["ranks"]["7"]
    assert json.dumps(patched) == json.dumps(after)


def test_other_ranks_or_nodes_are_sent_as_a_whole() -> None:
    before = job_view(recorded_status("job-1", 8))
    other = {**before, "nodes": [*before["nodes"], "h99"]}
    for after in (job_view(recorded_status("job-1", 9)), other):
        assert changes(before, after) == {"all": after}


def test_ten_thousand_ranks_take_little_to_send() -> None:
    assert len(json.dumps(job_view(recorded_status("job-1", 10_000, "running")))) < 1_500_000


def test_a_timeline_has_the_failure_of_a_rank_and_its_return() -> None:
    job = record("job-1")
    found = timeline(recorded_status("job-1", 4), [*read_events(job.events)], START + 200)
    spans = found["roles"][0]["ranks"]
    assert [state for _, _, state in spans[1]] == ["starting", "running", "failed", "starting", "running"]
    assert [state for _, _, state in spans[0]] == ["starting", "running"]
    assert found["end"] == 100.0
    assert spans[1][2] == (20.1, 20.3, "failed")
    assert [mark["kind"] for mark in found["marks"]] == ["failure", "decision"]


@pytest.mark.parametrize("phase", ["running", "succeeded", "failed"])
def test_a_rank_has_one_state_in_all_views_and_failures_are_those_of_its_process(phase: str) -> None:
    status = recorded_status("job-1", 4, phase)
    rows = job_view(status)["roles"][0]["ranks"]
    ranks = [rank_view(status, "actor", rank) or {} for rank in range(4)]
    assert [row[0] for row in rows] == [rank["state"] for rank in ranks]
    # The process before has failed.
    assert rows[1][0] == rows[0][0]
    failed = replace(status, failures=tuple(replace(each, incarnation=1) for each in status.failures))
    state = "running" if phase == "running" else "failed"
    assert (
        job_view(failed)["roles"][0]["ranks"][1][0] == (rank_view(failed, "actor", 1) or {})["state"] == state
    )


def test_the_overview_has_the_latest_of_many_events() -> None:
    job = record("job-1", phase="running")
    log = EventLog(job.events, 2)
    for number in range(300):
        log.write("decision", f"event {number}")
    log.close()
    watched = WatchedJob(job)
    found = watched.overview()
    assert (found["all"], len(found["events"])) == (310, 200)
    assert found["events"] == watched.event_list()["events"][-200:]
    assert found["events"][-1]["text"] == "event 299"


@pytest.mark.parametrize("most", [1, 3, 9])
def test_of_many_spans_failures_and_events_the_latest_are_shown(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    status, events = recorded_status("job-1", 4), [*read_events(record("job-1").events)]
    spans = timeline(status, events, START)["roles"][0]["ranks"]
    monkeypatch.setattr(views, "SPANS", most)
    assert timeline(status, events, START)["roles"][0]["ranks"] == [each[-most:] for each in spans]
    story = story_rows(events, "actor:1")
    assert len(story) > 3
    assert story_rows(events, "actor:1", most) == story[-most:]
    again = [*events, *(replace(each, id=f"2{each.id}", text="again") for each in events)]
    assert len(failure_rows(again, 2)) == 2
    (latest,) = failure_rows(again, 1)
    assert latest == failure_rows(again, 2)[0]


def test_the_graph_has_the_roles_and_their_calls() -> None:
    picture = graph_picture(recorded_status("job-1", 4, role="r<b>"))
    assert "update" in picture
    assert "r&lt;b&gt;" in picture
    assert "<b>" not in picture


def test_a_rank_that_is_not_there_is_none() -> None:
    assert rank_view(recorded_status("job-1", 4), "actor", 4) is None
    assert (rank_view(recorded_status("job-1", 4), "actor", 3) or {})["slots"] == ("3",)


def test_a_watched_job_gives_new_events_once_and_sees_a_new_status() -> None:
    job = record("job-1", phase="running")
    watched = WatchedJob(job)
    assert watched.view()["phase"] == "lost"
    events, number = watched.events_since(0)
    assert (len(events), number) == (10, 10)
    assert watched.events_since(number) == ([], 10)
    write_status(job, recorded_status("job-1", 4, "succeeded"))
    assert watched.view()["phase"] == "succeeded"


def test_every_part_of_the_page_is_there_for_a_job_that_is_over() -> None:
    watched = WatchedJob(record("job-1"))
    assert watched.overview()["events"][-1]["kind"] == "end"
    assert watched.failure_list()["failures"][0]["durations"]["away"] == 2.0
    assert watched.metrics("step")["series"][0]["name"] == "loss"
    assert watched.rank("actor", 0)["logs"][0]["stream"] == "stdout"
    assert watched.event_list()["all"] == 10
    assert "svg" in watched.graph()


def test_only_jobs_that_may_be_shown_are_found() -> None:
    record("job-1")
    record("job-2")
    jobs = Jobs(["job-1"])
    assert [each["run_id"] for each in jobs.summaries()] == ["job-1"]
    assert jobs.find("job-1") is jobs.find("job-1")
    for name in ("job-2", "../jobs/job-1", "job-3"):
        with pytest.raises(JobError):
            jobs.find(name)


def test_a_later_job_of_the_same_name_is_another_one() -> None:
    jobs = Jobs()
    job = record("job-1")
    first = jobs.find("job-1")
    job.token.unlink()
    job.token.write_text("another")
    assert jobs.find("job-1") is not first


def test_equal_stacks_are_one_group_and_the_odd_one_comes_first() -> None:
    def rank(number: int, frame: str, *waits: Wait) -> RankStacks:
        progress = RankProgress(WorkerId("actor", number, 0), waits=waits)
        return RankStacks(progress, 7, "the signal", (ThreadStack("main", (frame,), main=True),))

    reduce = Wait("default_pg", 4, "all_reduce")
    waiting = "/x/torch/distributed/c10d.py:3 in all_reduce"
    found = stack_view(
        [rank(0, waiting, reduce), rank(1, "train.py:9 in load"), rank(2, waiting, reduce)], ["h2"]
    )
    assert found == {
        "silent": ["h2"],
        "roles": [
            {
                "name": "actor",
                "groups": [
                    {"who": "actor:1", "state": "", "frames": ["train.py:9 in load"]},
                    {"who": "actor:0,2", "state": "", "frames": [waiting]},
                ],
                "meetings": ["all_reduce 4 of default_pg: actor:0,2; not there: actor:1"],
            }
        ],
    }


@given(
    st.lists(st.sampled_from(["actor:0", "actor:1", "actor:0-2", "actor", "critic"]), max_size=12),
    st.integers(1, 4),
)
def test_the_story_of_a_rank_has_the_latest_events_about_it(subjects: list[str], last: int) -> None:
    events = [LoggedEvent(str(at), float(at), "exit", "", about=(each,)) for at, each in enumerate(subjects)]
    its = [str(at) for at, each in enumerate(subjects) if each in ("actor:1", "actor:0-2", "actor")]
    assert [row["id"] for row in story_rows(events, "actor:1", last)] == its[-last:]
