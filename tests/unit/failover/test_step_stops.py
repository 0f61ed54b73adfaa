"""The master's decisions when it is asked to end the job."""

from __future__ import annotations

import signal

import pytest

from tests.unit.failover.job import KILL, TERM, Job
from unirun.errors import Refused
from unirun.failover.draft import OwnerLost
from unirun.failover.state import OWNER_LOST_GRACE_SECONDS, JobPhase
from unirun.wire.messages import PassOn, StartRole, Stop, StopWorkers
from unirun.wire.reports import (
    WorkerError,
)


class TestAStop:
    def test_a_stop_stops_every_role_and_ends_with_the_signals_code(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).running().on(Stop(int(signal.SIGINT), "got SIGINT"))
        assert job.orders(StopWorkers) == [
            StopWorkers("actor", (0, 1), int(signal.SIGINT), 30.0),
            StopWorkers("rollout", (0,), int(signal.SIGINT), 30.0),
        ]
        job.obey()
        assert job.state.phase is JobPhase.STOPPED
        assert job.end == (130, "got SIGINT")

    def test_a_stop_may_have_another_code_than_the_signals(self) -> None:
        job = Job({"actor": 1}).running().on(Stop(TERM, "nobody reads", code=141))
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0,), TERM, 30.0)]
        assert job.obey().end == (141, "nobody reads")

    def test_a_stop_takes_its_own_grace(self) -> None:
        job = Job({"actor": 1}).running().on(Stop(TERM, "unirun stop", 2.5))
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0,), TERM, 2.5)]

    def test_a_stop_that_comes_again_kills(self) -> None:
        job = Job({"actor": 2}).running().on(Stop(TERM, "one")).exits("actor", 0, by=TERM, asked=TERM)
        job.on(Stop(TERM, "two"))
        assert job.orders(StopWorkers) == [StopWorkers("actor", (1,), KILL, 0.0)]
        job.obey()
        assert job.end == (143, "one")

    def test_a_stop_that_does_not_hurry_changes_nothing_when_it_comes_again(self) -> None:
        job = Job({"actor": 2}).running().on(Stop(TERM, "got SIGTERM", urgent=False))
        for _ in range(3):
            assert job.on(Stop(TERM, "the master got SIGTERM", urgent=False)).orders(StopWorkers) == []
        job.exits("actor", 0, by=TERM, asked=TERM).exits("actor", 1, by=TERM, asked=TERM)
        assert job.end == (143, "got SIGTERM")

    def test_a_stop_of_a_job_that_ends_by_itself_kills_only_when_it_comes_again(self) -> None:
        job = Job({"actor": 1, "rollout": 1}, primary=("actor",)).running().exits("actor", 0)
        assert job.on(Stop(TERM, "one")).orders(StopWorkers) == []
        assert job.on(Stop(TERM, "two")).orders(StopWorkers) == [StopWorkers("rollout", (0,), KILL, 0.0)]
        assert job.obey().end == (0, "actor succeeded")

    def test_a_stop_before_anything_runs_ends_at_once(self) -> None:
        job = Job({"actor": 1}).on(Stop(TERM, "early"))
        assert job.end == (143, "early")
        assert job.phases() == {"actor": "stopped"}

    def test_a_stop_ends_a_restart(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 3}).running().exits("actor", 0, 1).on(Stop(TERM, "stop"))
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert job.orders(StartRole) == []
        assert job.state.phase is JobPhase.STOPPED

    def test_a_stop_makes_a_failure_on_the_way_out_no_new_decision(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 3}).running().on(Stop(TERM, "stop"))
        job.exits("actor", 0, 1, asked=TERM, error=WorkerError("RuntimeError: x", "", job.now))
        assert job.orders(StartRole) == []
        assert job.exits("actor", 1, by=TERM, asked=TERM).end == (143, "stop")
        assert job.phases() == {"actor": "failed"}

    def test_a_stop_leaves_a_role_alone_that_has_succeeded(self) -> None:
        job = Job({"actor": 1, "rollout": 1}).running().exits("actor", 0).on(Stop(TERM, "stop"))
        assert [o.role for o in job.orders(StopWorkers)] == ["rollout"]
        assert job.obey().phases() == {"actor": "succeeded", "rollout": "stopped"}

    def test_a_stop_comes_from_an_owner_that_died_too(self) -> None:
        job = Job({"actor": 1}).running().on(OwnerLost())
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0,), TERM, OWNER_LOST_GRACE_SECONDS)]
        assert job.obey().end == (143, "the unirun command was killed")


class TestASignalThatIsPassedOn:
    def test_all_agents_pass_it_on_and_the_job_goes_on(self) -> None:
        job = Job({"actor": 2}).running().on(PassOn(10))
        assert job.orders(PassOn) == [PassOn(10)]
        assert (job.state.phase, job.state.asked_to_stop) == (JobPhase.RUNNING, False)

    def test_only_the_agent_of_the_named_node_passes_it_on(self) -> None:
        job = Job({"actor": 2}).running()
        (node,) = job.state.agents
        assert job.on(PassOn(10, "elsewhere")).orders(PassOn) == []
        assert job.on(PassOn(10, node)).orders(PassOn) == [PassOn(10, node)]

    def test_one_that_does_not_exist_is_refused(self) -> None:
        with pytest.raises(Refused, match="no signal"):
            Job({"actor": 1}).running().on(PassOn(0))


@pytest.mark.parametrize("signum", [0, -9, 65, 10_000])
def test_a_stop_with_a_signal_that_does_not_exist_is_refused(signum: int) -> None:
    job = Job({"actor": 1}).running()
    with pytest.raises(Refused, match="no signal"):
        job.on(Stop(signum, "unirun stop"))


def test_a_job_that_is_stopped_with_code_0_has_succeeded() -> None:
    """So a `Trainer` ends its job, whose workers would serve for ever."""
    job = Job({"actor": 1}).running().on(Stop(TERM, "its trainer was shut down", code=0))
    job.exits("actor", 0, by=TERM, asked=TERM)
    assert (job.state.phase, job.state.code) == (JobPhase.SUCCEEDED, 0)


@pytest.mark.parametrize("code", [-1, 256])
def test_a_stop_with_a_code_that_is_none_of_a_stopped_job_is_refused(code: int) -> None:
    job = Job({"actor": 1}).running()
    with pytest.raises(Refused, match="does not end with"):
        job.on(Stop(TERM, "unirun stop", code=code))


@pytest.mark.parametrize(
    ("code", "by", "error", "fails"),
    [
        (None, TERM, False, False),
        (None, TERM, True, False),
        (1, None, False, False),
        (1, None, True, True),
        (128 + TERM, None, True, False),
        (None, KILL, True, True),
        (0, None, True, False),
    ],
)
def test_who_was_told_to_end_fails_only_with_an_error_that_is_not_of_the_signal(
    code: int | None, by: int | None, error: bool, fails: bool
) -> None:
    job = Job({"actor": 1}).running().on(Stop(TERM, "enough"))
    job.exits("actor", 0, code, by, asked=TERM, error=WorkerError("x", "", 1.0) if error else None)
    assert bool(job.state.failures) is fails
    assert job.phases() == {"actor": "failed" if fails else "stopped"}
    assert job.end == (143, "enough")


def test_who_was_not_told_fails_by_any_signal() -> None:
    job = Job({"actor": 2}).running().on(Stop(TERM, "enough")).exits("actor", 0, by=TERM)
    assert [each.worker.rank for each in job.state.failures] == [0]
