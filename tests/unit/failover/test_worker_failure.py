"""The master's decisions when a worker fails or an agent is lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import KILL, TERM, Job
from unirun.errors import EXIT_BUDGET
from unirun.failover.draft import AgentLost, OwnerLost
from unirun.failover.state import Exit, Failure, JobPhase, RolePhase
from unirun.values import WorkerId
from unirun.wire.messages import StartRole, Stop, StopWorkers, View
from unirun.wire.reports import (
    Notice,
    WorkerError,
    WorkerExited,
)


class TestAFailure:
    def test_a_failure_without_a_budget_ends_the_job_with_the_workers_code(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).running().exits("actor", 1, 7)
        assert job.state.phase is JobPhase.STOPPING
        assert [o.role for o in job.orders(StopWorkers)] == ["actor", "rollout"]
        job.obey()
        assert job.finish is not None
        assert job.finish.verdict.code == 7
        assert job.phases() == {"actor": "failed", "rollout": "stopped"}

    @pytest.mark.parametrize(("code", "by", "status"), [(1, None, 1), (None, 9, 137), (None, 11, 139)])
    def test_a_failure_of_any_kind_gives_the_code_that_a_shell_gives(
        self, code: int | None, by: int | None, status: int
    ) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0, code, by)
        assert job.finish is not None
        assert job.finish.verdict.code == status

    def test_a_failure_within_the_budget_restarts_its_role_and_no_other(self) -> None:
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

    @staticmethod
    def fatal(*codes: int) -> Job:
        """Two actors with restarts left, none of which follows one of these exit codes."""
        job = Job({"actor": 2}, restarts={"actor": 9})
        role = replace(job.state.role_spec("actor"), fatal_exit_codes=codes)
        job.state = replace(job.state, spec=replace(job.state.spec, roles=(role,)))
        return job.running()

    @pytest.mark.parametrize(("code", "by", "status"), [(77, None, 77), (None, 11, 139)])
    def test_a_failure_with_a_fatal_exit_code_ends_the_job_with_that(
        self, code: int | None, by: int | None, status: int
    ) -> None:
        job = self.fatal(77, 139).exits("actor", 1, code, by).obey()
        assert job.finish is not None
        assert (job.finish.verdict.code, job.state.roles["actor"].restarts) == (status, 0)
        assert "no restart follows" in job.finish.verdict.reason

    def test_a_failure_with_another_exit_code_is_followed_by_a_restart(self) -> None:
        assert self.fatal(77).exits("actor", 1, 76).phases() == {"actor": "restarting"}

    def test_a_failure_with_a_fatal_exit_code_ends_the_job_though_its_role_restarts_already(self) -> None:
        job = self.fatal(77).exits("actor", 1, 1).exits("actor", 0, 77)
        assert job.finish is not None
        assert job.finish.verdict.code == 77

    def test_a_failure_with_a_fatal_exit_code_is_none_if_the_worker_was_told_to_end(self) -> None:
        job = self.fatal(77).exits("actor", 1, 1).exits("actor", 0, 77, asked=TERM)
        assert job.all_run("actor").phases() == {"actor": "running"}

    def test_a_failure_counts_within_the_window_of_the_role_only(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1})
        role = replace(job.state.role_spec("actor"), restart_window=60.0)
        job.state = replace(job.state, spec=replace(job.state.spec, roles=(role,)))
        job.running().exits("actor", 0, 1).all_run("actor")
        job.now += 60
        job.exits("actor", 0, 1).all_run("actor")
        assert job.state.roles["actor"].restarts == 2
        job.exits("actor", 0, 1)
        assert job.end is not None
        assert job.end[0] == EXIT_BUDGET

    def test_a_failure_starts_the_next_generation_only_when_the_last_worker_is_gone(self) -> None:
        job = Job({"actor": 3}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert job.orders(StartRole) == []
        job.exits("actor", 2, by=KILL, asked=KILL)
        assert len(job.orders(StartRole)) == 1

    def test_a_failure_restarts_ranks_that_had_ended_well_too(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().exits("actor", 0, 0)
        job.exits("actor", 1, 1)
        (order,) = job.orders(StartRole)
        assert [m.rank for m in order.members] == [0, 1]

    def test_a_failure_of_a_peer_that_follows_spends_no_second_restart(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().exits("actor", 0, by=9)
        job.exits("actor", 1, 1, asked=TERM, error=WorkerError("connection closed by peer", "", job.now))
        assert job.phases() == {"actor": "starting"}
        assert job.state.roles["actor"].restarts == 1
        assert len(job.state.failures) == 2

    def test_a_failure_after_the_budget_ends_the_job_with_its_own_code(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 2}).running()
        for _ in range(2):
            job.exits("actor", 0, 1)
            assert job.state.phase is JobPhase.RUNNING
            job.all_run("actor")
        job.exits("actor", 0, 1)
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_BUDGET
        assert "all 2 restarts of role actor are used up" in job.finish.verdict.report

    def test_a_failure_before_the_role_is_up_is_a_failure_like_any_other(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).launched().exits("actor", 0, 1)
        assert job.phases() == {"actor": "starting"}
        assert job.state.roles["actor"].generation == 1

    def test_a_failure_tells_who_why_and_what_was_decided(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, by=9, note="out of memory")
        assert "exit: actor:0 ended: killed by SIGKILL, out of memory" in job.records
        assert "decision: actor:0 was killed by SIGKILL; restart 1 of 1 of role actor" in job.records
        assert "restart: role actor starts as generation 1" in job.records
        assert job.told(Notice)[0].source == "actor:0"

    def test_a_failure_is_reported_with_cause_traceback_and_log(self) -> None:
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
        assert job.finish.verdict.error_file == "/logs/actor/1/0/error.json"
        assert job.finish.verdict.code == 1

    @pytest.mark.parametrize("error", [None, WorkerError("ValueError: nan", "Traceback", 55.0)])
    def test_a_failure_is_remembered_with_all_that_was_told(self, error: WorkerError | None) -> None:
        job = Job({"actor": 2}, restarts={"actor": 3}).running().exits("actor", 0, 1).obey().all_run("actor")
        job.on(
            WorkerExited(WorkerId("actor", 1, 1), 60.0, None, KILL, "own", None, error, "a note", "the end")
        )
        assert job.state.failures[-1] == Failure(
            WorkerId(role="actor", rank=1, incarnation=1),
            generation=1,
            node="n0",
            time=55.0 if error else 60.0,
            exit=Exit(signal=KILL),
            message="ValueError: nan" if error else "",
            traceback="Traceback" if error else "",
            note="a note",
            tail="the end",
            log="/logs/actor/1/1",
            decision="actor:1 was killed by SIGKILL; restart 2 of 3 of role actor",
            noticed=job.now,
        )

    def test_a_failure_of_a_worker_that_never_ran_is_not_taken_for_an_old_one(self) -> None:
        job = Job({"actor": 2}).running()
        job.on(
            WorkerExited(WorkerId("actor", 0, 0), job.now, 1, None, note="no process can be forked")
        ).obey()
        assert job.finish is not None
        assert "no process can be forked" in job.finish.verdict.report

    def test_a_worker_that_never_ran_has_no_log_that_a_report_names(self) -> None:
        job = Job({"actor": 2}).launched()
        job.on(
            WorkerExited(WorkerId("actor", 0, 0), job.now, 1, None, note="its log cannot be written")
        ).obey()
        assert job.state.failures[-1].log == ""
        assert job.finish is not None
        assert job.finish.verdict.report.endswith("  its log cannot be written")


def test_old_failures_are_forgotten_one_by_one() -> None:
    job = Job({"actor": 1}, restarts={"actor": 400}).running()
    for _ in range(300):
        job.exits("actor", 0, 1)
    assert len(job.state.failures) == 256
    assert job.state.roles["actor"].phase is RolePhase.STARTING


class TestALostAgent:
    def test_a_lost_agent_takes_its_workers_with_it_and_ends_the_job(self) -> None:
        job = Job({"actor": 2}).running().on(AgentLost("n0", "the peer closed the stream"))
        assert job.state.phase is JobPhase.FAILED
        assert job.finish is not None
        assert job.finish.verdict.code == 137
        assert "the agent of node n0 is gone: the peer closed the stream" in job.finish.verdict.report

    def test_a_lost_agent_of_one_node_stops_those_of_the_others(self) -> None:
        job = Job({"actor": 4}, nodes=("n0", "n1")).running().on(AgentLost("n1", "gone"))
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0, 2), TERM, 30.0)]
        assert job.obey().finish is not None

    def test_a_lost_agent_is_not_explained_by_a_failure_that_was_dealt_with(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, 77).all_run("actor")
        job.now += 3600.0
        job.on(AgentLost("n0", "gone"))
        assert job.finish is not None
        assert job.finish.verdict.code == 137
        assert "exit code 77" not in job.finish.verdict.report

    def test_a_lost_agent_while_the_job_stops_is_part_of_that(self) -> None:
        job = Job({"actor": 2}).running().on(Stop(TERM, "stop"), AgentLost("n0", "gone"))
        assert job.end == (143, "stop")

    def test_a_lost_agent_is_announced_by_workers_that_it_has_stopped_by_itself(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 5}).running()
        job.exits("actor", 0, by=TERM, asked=TERM, cause="leaving")
        assert job.phases() == {"actor": "stopping"}
        job.exits("actor", 1, 0, asked=TERM, cause="leaving")
        assert job.phases() == {"actor": "stopped"}
        assert job.state.phase is JobPhase.RUNNING
        assert job.orders(StartRole) == []
        assert job.on(AgentLost("n0", "it left")).state.phase is JobPhase.FAILED

    def test_a_lost_agent_that_stopped_its_workers_for_a_dead_command_fits_the_masters_own_news(self) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0, 0, asked=TERM, cause="leaving").on(OwnerLost())
        assert job.end == (143, "the unirun command was killed")
