"""The master's decisions, one event at a time; its state is checked after each."""

from __future__ import annotations

import signal

import pytest

from tests.unit.master.job import KILL, TERM, Job
from unirun.errors import EXIT_BUDGET, EXIT_RENDEZVOUS, IllegalTransition
from unirun.master import JobPhase, RolePhase, WorkerPhase
from unirun.master.events import (
    AgentLost,
    Event,
    JoinTimedOut,
    OwnerLost,
    ToAgent,
)
from unirun.master.step import OWNER_LOST_GRACE
from unirun.master.telling import present, status_of
from unirun.wire.messages import RoleChanged, StartRole, Stop, StopWorkers, View
from unirun.wire.reports import (
    Join,
    Notice,
    Sample,
    SpawnerReady,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)


class TestLaunching:
    def test_waits_for_every_node(self) -> None:
        job = Job({"actor": 4}, nodes=("n0", "n1"))
        job.on(Join("n1", 1, "h", {"actor": "h:1"}))
        assert job.state.phase is JobPhase.LAUNCHING
        assert job.orders(StartRole) == []

    def test_then_orders_every_role(self) -> None:
        job = Job({"actor": 2, "rollout": 3}).launched()
        assert job.state.phase is JobPhase.RUNNING
        actor, rollout = job.orders(StartRole)
        assert (actor.role, actor.generation, actor.restarts, actor.world_size) == ("actor", 0, 0, 2)
        assert [m.rank for m in rollout.members] == [0, 1, 2]
        assert rollout.endpoint == "127.0.0.1:2"
        assert job.phases() == {"actor": "starting", "rollout": "starting"}

    def test_splits_a_role_over_its_nodes(self) -> None:
        job = Job({"actor": 3}, nodes=("n0", "n1")).launched()
        one, two = job.orders(StartRole)
        assert [
            c.node for c in job.commands if isinstance(c, ToAgent) and isinstance(c.message, StartRole)
        ] == [
            "n0",
            "n1",
        ]
        assert (one.local_world_size, one.group_rank, one.group_world_size) == (2, 0, 2)
        assert (two.local_world_size, two.group_rank, two.group_world_size) == (1, 1, 2)
        assert [(m.rank, m.local_rank) for m in (*one.members, *two.members)] == [(0, 0), (2, 1), (1, 0)]

    def test_shows_all_roles_to_all_workers(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).launched()
        assert [role.name for role in job.orders(View)[-1].roles] == ["actor", "rollout"]

    def test_refuses_a_node_that_joins_twice_or_is_unknown(self) -> None:
        job = Job({"actor": 2}).launched()
        for node in ("n0", "n9"):
            with pytest.raises(IllegalTransition, match="joined twice, or has no place"):
                job.on(Join(node, 2, "h", {}))

    def test_ends_when_a_node_does_not_come(self) -> None:
        job = Job({"actor": 2}, nodes=("n0", "n1"))
        job.on(Join("n0", 1, "h", {"actor": "h:1"}), JoinTimedOut())
        assert job.state.phase is JobPhase.FAILED
        assert job.end == (EXIT_RENDEZVOUS, "n1 did not join within 60 s")

    def test_does_not_mind_the_deadline_when_all_are_there(self) -> None:
        assert Job({"actor": 1}).running().on(JoinTimedOut()).commands == []

    def test_tells_when_torch_is_imported(self) -> None:
        job = Job({"actor": 1}).on(SpawnerReady("n0", 1.25))
        assert job.told(Notice) == [Notice("n0", "spawner ready in 1.2 s")]


class TestARoleComesUp:
    def test_and_runs_when_all_ranks_do(self) -> None:
        job = Job({"actor": 2}).launched()
        job.on(WorkerStarted("n0", "actor", 0, 0, 7), WorkerRunning("actor", 0, 0, 0))
        assert job.phases() == {"actor": "starting"}
        assert job.told(RoleChanged)[-1] == RoleChanged("actor", "starting", 0, 1, 2)
        job.on(WorkerStarted("n0", "actor", 1, 0, 8), WorkerRunning("actor", 1, 0, 0))
        assert job.phases() == {"actor": "running"}
        assert "running: role actor: all 2 ranks run" in job.records

    def test_even_when_a_hello_overtakes_the_news_of_the_fork(self) -> None:
        job = Job({"actor": 1}).launched()
        job.on(WorkerRunning("actor", 0, 0, 0), WorkerStarted("n0", "actor", 0, 0, 7))
        (worker,) = job.state.roles["actor"].workers
        assert (worker.phase, worker.pid) == (WorkerPhase.RUNNING, 7)

    def test_and_watchers_learn_of_each_process(self) -> None:
        started = WorkerStarted("n0", "actor", 0, 0, 7)
        assert Job({"actor": 1}).launched().on(started).told(WorkerStarted) == [started]

    def test_and_a_rank_that_has_ended_well_counts_as_up(self) -> None:
        job = Job({"actor": 2}).launched()
        job.exits("actor", 0, 0)
        job.on(WorkerStarted("n0", "actor", 1, 0, 8), WorkerRunning("actor", 1, 0, 0))
        assert job.phases() == {"actor": "running"}


class TestTheEnd:
    def test_comes_when_all_ranks_have_ended_well(self) -> None:
        job = Job({"actor": 2}).running().exits("actor", 0)
        assert job.state.phase is JobPhase.RUNNING
        job.exits("actor", 1)
        assert job.state.phase is JobPhase.SUCCEEDED
        assert job.end == (0, "actor succeeded")

    def test_needs_the_primary_roles_only_and_stops_the_others(self) -> None:
        job = Job({"actor": 1, "rollout": 2}, primary=("actor",)).running().exits("actor", 0)
        assert job.state.phase is JobPhase.STOPPING
        assert job.orders(StopWorkers) == [StopWorkers("rollout", (0, 1), TERM, 30.0)]
        job.obey()
        assert job.state.phase is JobPhase.SUCCEEDED
        assert job.finish is not None
        assert job.finish.verdict.code == 0
        assert job.phases() == {"actor": "succeeded", "rollout": "stopped"}

    def test_does_not_come_with_a_role_that_is_not_primary(self) -> None:
        job = Job({"actor": 1, "rollout": 1}, primary=("actor",)).running().exits("rollout", 0)
        assert job.state.phase is JobPhase.RUNNING
        assert job.phases()["rollout"] == "succeeded"

    def test_is_final(self) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0)
        state = job.state
        late = (Stop(TERM, "late"), AgentLost("n0", "late"), OwnerLost(), Join("n0", 1, "h", {}))
        job.on(*late, WorkerExited("actor", 0, 0, 1.0, 1, None), JoinTimedOut())
        assert job.state == state
        assert job.commands == []


class TestAFailure:
    def test_without_a_budget_ends_the_job_with_the_workers_code(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).running().exits("actor", 1, 7)
        assert job.state.phase is JobPhase.STOPPING
        assert [o.role for o in job.orders(StopWorkers)] == ["actor", "rollout"]
        job.obey()
        assert job.finish is not None
        assert job.finish.verdict.code == 7
        assert job.phases() == {"actor": "failed", "rollout": "stopped"}

    @pytest.mark.parametrize(("code", "by", "status"), [(1, None, 1), (None, 9, 137), (None, 11, 139)])
    def test_of_any_kind_gives_the_code_that_a_shell_gives(
        self, code: int | None, by: int | None, status: int
    ) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0, code, by)
        assert job.finish is not None
        assert job.finish.verdict.code == status

    def test_within_the_budget_restarts_its_role_and_no_other(self) -> None:
        job = Job({"actor": 2, "rollout": 2}, restarts={"actor": 1}).running()
        rollout = job.state.roles["rollout"]
        job.exits("actor", 0, 1)
        assert job.phases() == {"actor": "restarting", "rollout": "running"}
        assert job.orders(StopWorkers) == [StopWorkers("actor", (1,), TERM, 30.0)]
        assert job.orders(StartRole) == []
        job.obey()
        (order,) = job.orders(StartRole)
        assert (order.role, order.generation, order.restarts) == ("actor", 1, 1)
        assert [m.incarnation for m in order.members] == [1, 1]
        assert job.state.roles["rollout"] == rollout
        assert {role.name: role.generation for role in job.orders(View)[0].roles} == {
            "actor": 1,
            "rollout": 0,
        }
        assert job.all_run("actor").phases() == {"actor": "running", "rollout": "running"}

    def test_starts_the_next_generation_only_when_the_last_worker_is_gone(self) -> None:
        job = Job({"actor": 3}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert job.orders(StartRole) == []
        job.exits("actor", 2, by=KILL, asked=KILL)
        assert len(job.orders(StartRole)) == 1

    def test_restarts_ranks_that_had_ended_well_too(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().exits("actor", 0, 0)
        job.exits("actor", 1, 1)
        (order,) = job.orders(StartRole)
        assert [m.rank for m in order.members] == [0, 1]

    def test_of_a_peer_that_follows_spends_no_second_restart(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().exits("actor", 0, by=9)
        job.exits("actor", 1, 1, asked=TERM, error=WorkerError("connection closed by peer", "", job.now))
        assert job.phases() == {"actor": "starting"}
        assert job.state.roles["actor"].restarts == 1
        assert len(job.state.failures) == 2

    def test_after_the_budget_ends_the_job_with_its_own_code(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 2}).running()
        for _ in range(2):
            job.exits("actor", 0, 1)
            assert job.state.phase is JobPhase.RUNNING
            job.all_run("actor")
        job.exits("actor", 0, 1)
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_BUDGET
        assert "all 2 restarts of role actor are used up" in job.finish.verdict.report

    def test_before_the_role_is_up_is_a_failure_like_any_other(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).launched().exits("actor", 0, 1)
        assert job.phases() == {"actor": "starting"}
        assert job.state.roles["actor"].generation == 1

    def test_tells_who_why_and_what_was_decided(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, by=9, note="out of memory")
        assert "exit: actor:0 ended: killed by SIGKILL, out of memory" in job.records
        assert "decision: actor:0 ended with killed by SIGKILL; restart 1 of 1 of role actor" in job.records
        assert "restart: role actor starts as generation 1" in job.records
        assert job.told(Notice)[0].source == "actor:0"

    def test_is_reported_with_cause_traceback_and_log(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).running()
        error = WorkerError("ValueError: nan", "Traceback (most recent call last):\nValueError: nan", job.now)
        job.exits("actor", 1, 1, error=error)
        late = WorkerError("RuntimeError: Connection closed by peer", "Traceback", job.now)
        job.exits("actor", 0, 1, asked=TERM, error=late).exits("rollout", 0, by=TERM, asked=TERM)
        assert job.finish is not None
        lines = job.finish.verdict.report.splitlines()
        assert lines[0].startswith("job failed: actor:1 ended with exit code 1")
        assert "other failures (1):" in lines
        assert "root cause: actor:1 on n0: exit code 1 (the first of 2 failures)" in lines
        assert lines[-2:] == ["  ValueError: nan", "  log: /logs/actor/1/0/stderr.log"]
        assert job.finish.verdict.code == 1

    def test_of_a_worker_that_never_ran_is_not_taken_for_an_old_one(self) -> None:
        job = Job({"actor": 2}).running()
        job.on(WorkerExited("actor", 0, 0, job.now, 1, None, note="no process can be forked")).obey()
        assert job.finish is not None
        assert "no process can be forked" in job.finish.verdict.report


class TestAStop:
    def test_stops_every_role_and_ends_with_the_signals_code(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).running().on(Stop(int(signal.SIGINT), "got SIGINT"))
        assert job.orders(StopWorkers) == [
            StopWorkers("actor", (0, 1), int(signal.SIGINT), 30.0),
            StopWorkers("rollout", (0,), int(signal.SIGINT), 30.0),
        ]
        job.obey()
        assert job.state.phase is JobPhase.STOPPED
        assert job.end == (130, "got SIGINT")

    def test_takes_its_own_grace(self) -> None:
        job = Job({"actor": 1}).running().on(Stop(TERM, "unirun stop", 2.5))
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0,), TERM, 2.5)]

    def test_that_comes_again_kills(self) -> None:
        job = Job({"actor": 2}).running().on(Stop(TERM, "one")).exits("actor", 0, by=TERM, asked=TERM)
        job.on(Stop(TERM, "two"))
        assert job.orders(StopWorkers) == [StopWorkers("actor", (1,), KILL, 0.0)]
        job.obey()
        assert job.end == (143, "one")

    def test_of_a_job_that_ends_by_itself_kills_only_when_it_comes_again(self) -> None:
        job = Job({"actor": 1, "rollout": 1}, primary=("actor",)).running().exits("actor", 0)
        assert job.on(Stop(TERM, "one")).orders(StopWorkers) == []
        assert job.on(Stop(TERM, "two")).orders(StopWorkers) == [StopWorkers("rollout", (0,), KILL, 0.0)]
        assert job.obey().end == (0, "actor succeeded")

    def test_before_anything_runs_ends_at_once(self) -> None:
        job = Job({"actor": 1}).on(Stop(TERM, "early"))
        assert job.end == (143, "early")
        assert job.phases() == {"actor": "stopped"}

    def test_ends_a_restart(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 3}).running().exits("actor", 0, 1).on(Stop(TERM, "stop"))
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert job.orders(StartRole) == []
        assert job.state.phase is JobPhase.STOPPED

    def test_makes_a_failure_on_the_way_out_no_new_decision(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 3}).running().on(Stop(TERM, "stop"))
        job.exits("actor", 0, 1, asked=TERM, error=WorkerError("RuntimeError: x", "", job.now))
        assert job.orders(StartRole) == []
        assert job.exits("actor", 1, by=TERM, asked=TERM).end == (143, "stop")
        assert job.phases() == {"actor": "failed"}

    def test_leaves_a_role_alone_that_has_succeeded(self) -> None:
        job = Job({"actor": 1, "rollout": 1}).running().exits("actor", 0).on(Stop(TERM, "stop"))
        assert [o.role for o in job.orders(StopWorkers)] == ["rollout"]
        assert job.obey().phases() == {"actor": "succeeded", "rollout": "stopped"}

    def test_comes_from_an_owner_that_died_too(self) -> None:
        job = Job({"actor": 1}).running().on(OwnerLost())
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0,), TERM, OWNER_LOST_GRACE)]
        assert job.obey().end == (143, "the unirun command was killed")


class TestALostAgent:
    def test_takes_its_workers_with_it_and_ends_the_job(self) -> None:
        job = Job({"actor": 2}).running().on(AgentLost("n0", "the peer closed the stream"))
        assert job.state.phase is JobPhase.FAILED
        assert job.finish is not None
        assert job.finish.verdict.code == 137
        assert "the agent of node n0 is gone: the peer closed the stream" in job.finish.verdict.report

    def test_of_one_node_stops_those_of_the_others(self) -> None:
        job = Job({"actor": 4}, nodes=("n0", "n1")).running().on(AgentLost("n1", "gone"))
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0, 2), TERM, 30.0)]
        assert job.obey().finish is not None

    def test_is_not_explained_by_a_failure_that_was_dealt_with(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, 77).all_run("actor")
        job.now += 3600.0
        job.on(AgentLost("n0", "gone"))
        assert job.finish is not None
        assert job.finish.verdict.code == 137
        assert "exit code 77" not in job.finish.verdict.report

    def test_while_the_job_stops_is_part_of_that(self) -> None:
        job = Job({"actor": 2}).running().on(Stop(TERM, "stop"), AgentLost("n0", "gone"))
        assert job.end == (143, "stop")

    def test_is_announced_by_workers_that_it_has_stopped_by_itself(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 5}).running()
        job.exits("actor", 0, by=TERM, asked=TERM, cause="leaving")
        assert job.phases() == {"actor": "stopping"}
        job.exits("actor", 1, 0, asked=TERM, cause="leaving")
        assert job.phases() == {"actor": "stopped"}
        assert job.state.phase is JobPhase.RUNNING
        assert job.orders(StartRole) == []
        assert job.on(AgentLost("n0", "it left")).state.phase is JobPhase.FAILED

    def test_that_stopped_its_workers_for_a_dead_command_fits_the_masters_own_news(self) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0, 0, asked=TERM, cause="leaving").on(OwnerLost())
        assert job.end == (143, "the unirun command was killed")


class TestNewsOfThePast:
    def test_of_an_earlier_incarnation_changes_nothing(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        state = job.state
        job.on(WorkerStarted("n0", "actor", 0, 0, 7), WorkerRunning("actor", 0, 0, 0))
        job.exits("actor", 0, 1, incarnation=0)
        assert job.state == state

    def test_that_is_told_twice_counts_once(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 5}).running().exits("actor", 0, 1)
        state = job.exits("actor", 0, 1).state
        assert state.roles["actor"].restarts == 1
        assert len(state.failures) == 1

    @pytest.mark.parametrize(
        ("event", "says"),
        [
            (WorkerRunning("nobody", 0, 0, 0), "no role nobody"),
            (WorkerRunning("actor", 9, 0, 0), "no worker actor:9"),
            (WorkerRunning("actor", -1, 0, 0), "no worker actor:-1"),
            (WorkerExited("actor", 0, 3, 1.0, 0, None), "has no incarnation 3 yet"),
        ],
    )
    def test_about_what_cannot_be_is_refused(self, event: Event, says: str) -> None:
        with pytest.raises(IllegalTransition, match=says):
            Job({"actor": 1}).running().on(event)


def test_a_notice_is_recorded_and_passed_on() -> None:
    job = Job({"actor": 1}).running().on(Notice("actor:0", "is slow"), Sample("n0", {}, {}))
    assert job.told(Notice) == [Notice("actor:0", "is slow")]
    assert job.records == "notice: actor:0: is slow"


def test_the_status_tells_what_the_state_holds() -> None:
    job = Job({"actor": 2}, restarts={"actor": 1}).running()
    status = status_of(job.state, {"actor:0": 5_000_000, "actor:9": 1}, {"actor:0": 1.5})
    (role,) = status.roles
    assert (status.phase, status.code, role.phase, role.max_restarts) == ("running", None, "running", 1)
    assert (role.workers[0].memory, role.workers[0].cpu, role.workers[0].pid) == (5_000_000, 1.5, 1)
    ended = status_of(job.exits("actor", 0).exits("actor", 1).state, {"actor:0": 1}, {})
    assert (ended.phase, ended.code, ended.reason) == ("succeeded", 0, "actor succeeded")
    assert [(w.pid, w.exit, w.memory) for w in ended.roles[0].workers] == [(None, "exit code 0", None)] * 2


def test_who_attaches_late_is_told_what_is_there() -> None:
    job = Job({"actor": 2}).launched().on(WorkerStarted("n0", "actor", 1, 0, 8))
    assert present(job.state) == [
        RoleChanged("actor", "starting", 0, 0, 2),
        WorkerStarted("n0", "actor", 1, 0, 8),
    ]


def test_old_failures_are_forgotten_one_by_one() -> None:
    job = Job({"actor": 1}, restarts={"actor": 400}).running()
    for _ in range(300):
        job.exits("actor", 0, 1)
    assert len(job.state.failures) == 256
    assert job.state.roles["actor"].phase is RolePhase.STARTING


@pytest.mark.parametrize("signum", [0, -9, 65, 10_000])
def test_a_stop_with_a_signal_that_does_not_exist_is_refused(signum: int) -> None:
    job = Job({"actor": 1}).running()
    with pytest.raises(IllegalTransition, match="no signal"):
        job.on(Stop(signum, "unirun stop"))
