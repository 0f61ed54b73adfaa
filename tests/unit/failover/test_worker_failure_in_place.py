"""A process that is started again alone: the others of its role live on and form the next generation."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import KILL, TERM, Job
from tests.unit.failover.phase_rows import shrinks
from tests.unit.failover.workloads import reformed, seen, serving, up, workload
from unirun.errors import EXIT_BUDGET, EXIT_RENDEZVOUS, IllegalTransition
from unirun.failover.draft import VIEW_DELAY, After, Due, KeepMetrics, ToAgent
from unirun.failover.state import JobPhase, RolePhase, WorkerPhase
from unirun.failover.status_views import status_of
from unirun.values import WorkerId
from unirun.wire.messages import StartRole, StopWorkers, View, WorkerView
from unirun.wire.reports import (
    FromWorker,
    GroupFormed,
    Metrics,
    Notice,
    OpenStore,
    Serving,
    StoreEnded,
    StoreOpened,
    WorkerError,
    WorkerRunning,
)


class TestADeath:
    def test_a_death_starts_that_process_again_and_no_other(self) -> None:
        job = serving().exits("actor", 2, by=KILL)
        (order,) = job.orders(StartRole)
        assert [(m.rank, m.incarnation) for m in order.members] == [(2, 1)]
        assert (order.generation, order.restarts, order.world_size, order.local_world_size) == (1, 1, 4, 4)
        assert job.orders(StopWorkers) == []
        assert job.phases() == {"actor": "reforming", "trainer": "running"}
        assert [w.incarnation for w in job.state.roles["actor"].workers] == [0, 0, 1, 0]
        assert all(w.live for w in job.state.roles["actor"].workers)

    def test_a_death_before_it_was_up_by_an_error_that_lasts_ends_the_job_with_the_workers_code(self) -> None:
        job = workload().launched()
        error = WorkerError("ModuleNotFoundError: No module named 'x'", "Traceback", job.now, permanent=True)
        job.exits("actor", 2, 1, error=error).obey()
        assert job.finish is not None
        assert (job.finish.verdict.code, job.state.roles["actor"].restarts) == (1, 0)
        assert "an error that a restart cannot mend" in job.finish.verdict.report

    def test_a_death_by_such_an_error_after_it_was_up_is_one_like_any_other(self) -> None:
        job = serving()
        job.exits("actor", 2, 1, error=WorkerError("ImportError: x", "Traceback", job.now, permanent=True))
        assert job.state.roles["actor"].restarts == 1

    def test_a_death_is_told_to_every_worker_at_once(self) -> None:
        job = serving(stores_open=False).exits("actor", 2, by=KILL)
        view = seen(job)
        assert view.workers[2] == WorkerView(2, 0, "lost", {})
        assert view.workers[1] == WorkerView(1, 0, "serving", {"socket": "actor1"})
        assert (view.generation, view.phase) == (0, "reforming")

    def test_a_death_gives_the_reason_in_words(self) -> None:
        job = serving().exits("actor", 2, by=KILL)
        says = (
            "actor:2 was killed by SIGKILL; restart 1 of 3: actor:2 alone, actor's other 3 ranks keep "
            "their memory and form generation 1"
        )
        assert f"decision: {says}" in job.records
        assert job.told(Notice) == [Notice("actor:2", says)]
        assert "restart: actor:2 joins generation 1 of role actor" in job.records

    def test_a_death_waits_for_a_new_store_before_anybody_is_told_to_meet(self) -> None:
        job = serving(stores_open=False).exits("actor", 2, by=KILL)
        assert job.orders(OpenStore) == [OpenStore("actor", 1)]
        assert job.orders(StartRole) == []
        job.on(StoreOpened("actor", 1))
        kinds = [type(c.message) for c in job.commands if isinstance(c, ToAgent)]
        assert kinds == [View, StartRole]
        assert seen(job).generation == 1
        assert seen(job).workers[2] == WorkerView(2, 1, "starting", {})

    def test_a_death_is_over_when_the_newcomer_serves_and_the_survivors_are_with_it(self) -> None:
        job = serving().exits("actor", 2, by=KILL)
        job.on(
            WorkerRunning(WorkerId("actor", 2, 1), 1),
            FromWorker(WorkerId("actor", 0, 0), GroupFormed(1)),
            FromWorker(WorkerId("actor", 1, 0), GroupFormed(1)),
        )
        job.on(FromWorker(WorkerId("actor", 3, 0), GroupFormed(1)))
        assert job.phases()["actor"] == "reforming"
        job.on(FromWorker(WorkerId("actor", 2, 1), Serving({}, True)))
        assert job.phases()["actor"] == "running"
        job = serving().exits("actor", 2, by=KILL)
        up(job)
        assert job.phases()["actor"] == "reforming"
        assert reformed(job).phases()["actor"] == "running"

    def test_a_death_of_a_second_worker_while_the_first_comes_back_makes_another_generation(self) -> None:
        for rank, incarnations in ((0, [1, 0, 1, 0]), (2, [0, 0, 2, 0])):
            job = serving().exits("actor", 2, by=KILL).exits("actor", rank, by=KILL)
            role = job.state.roles["actor"]
            assert (role.generation, role.restarts, role.phase) == (2, 2, RolePhase.REFORMING)
            assert [w.incarnation for w in role.workers] == incarnations
            assert reformed(job).phases()["actor"] == "running"

    def test_a_death_of_several_at_once_starts_all_of_them_with_one_store(self) -> None:
        job = serving(stores_open=False).exits("actor", 2, by=KILL).exits("actor", 0, by=KILL)
        assert job.orders(OpenStore) == [OpenStore("actor", 2)]
        assert job.on(StoreOpened("actor", 1)).commands == []
        job.on(StoreOpened("actor", 2))
        (order,) = job.orders(StartRole)
        assert [(m.rank, m.incarnation) for m in order.members] == [(0, 1), (2, 1)]
        assert job.state.roles["actor"].restarts == 2

    def test_a_death_of_a_second_worker_may_be_known_to_a_newcomer_before_it_runs(self) -> None:
        job = serving(count=2).exits("actor", 0, by=KILL).exits("actor", 1, by=KILL)
        for rank in (0, 1):
            job.on(
                WorkerRunning(WorkerId("actor", rank, 1), 2),
                FromWorker(WorkerId("actor", rank, 1), Serving({}, True)),
            )
        assert job.phases()["actor"] == "running"

    def test_a_death_of_all_leaves_a_role_of_newcomers(self) -> None:
        job = serving(count=2).exits("actor", 0, by=KILL).exits("actor", 1, by=KILL)
        assert [w.incarnation for w in job.state.roles["actor"].workers] == [1, 1]
        job.on(FromWorker(WorkerId("actor", 0, 1), GroupFormed(2)))
        assert up(job).phases()["actor"] == "running"

    def test_a_death_before_the_role_is_up_is_a_death_like_any_other(self) -> None:
        job = workload(count=2).launched().exits("actor", 1, 1)
        assert job.phases()["actor"] == "reforming"
        job.on(
            FromWorker(WorkerId("actor", 0, 0), Serving({}, True)),
            FromWorker(WorkerId("actor", 1, 1), Serving({}, True)),
        )
        assert job.phases()["actor"] == "reforming"
        assert job.on(FromWorker(WorkerId("actor", 0, 0), GroupFormed(1))).phases()["actor"] == "running"

    def test_a_death_of_those_who_wait_in_a_generation_that_it_has_ended_spends_one_restart_for_all(
        self,
    ) -> None:
        """Each that loses its store in `setup` must not replace the store of those who came before."""
        job = workload(count=3).launched()
        for rank in range(3):
            job.on(WorkerRunning(WorkerId("actor", rank, 0), 0))
        for rank in range(3):
            job.exits("actor", rank, 1)
        role = job.state.roles["actor"]
        assert (role.generation, role.restarts) == (1, 1)
        assert [(w.incarnation, w.generation, w.live) for w in role.workers] == [(1, 1, True)] * 3
        assert [(o.generation, [m.rank for m in o.members]) for o in job.orders(StartRole)] == [(1, [2])]
        lost, back = job.orders(View)
        assert [each.roles[0].workers[2].phase for each in (lost, back)] == ["lost", "starting"]
        for rank in range(3):
            job.on(WorkerRunning(WorkerId("actor", rank, 1), 1))
        assert up(job).phases()["actor"] == "running"

    def test_a_death_of_those_who_wait_joins_a_store_that_is_still_to_come(self) -> None:
        job = workload(count=2, stores_open=False).launched().exits("actor", 0, 1).exits("actor", 1, 1)
        assert (job.orders(StartRole), job.orders(OpenStore)) == ([], [])
        (order,) = job.on(StoreOpened("actor", 1)).orders(StartRole)
        assert [(m.rank, m.incarnation) for m in order.members] == [(0, 1), (1, 1)]

    def test_a_death_over_the_budget_ends_the_job(self) -> None:
        job = reformed(serving(restarts=1).exits("actor", 2, by=KILL)).exits("actor", 2, by=KILL)
        assert job.state.phase is JobPhase.STOPPING
        job.obey()
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_BUDGET
        assert "all 1 restarts of role actor are used up" in job.finish.verdict.report

    def test_a_death_starts_ranks_again_that_had_ended_well_as_the_group_needs_them(self) -> None:
        job = serving().exits("actor", 1, 0)
        assert job.phases()["actor"] == "running"
        (order,) = job.exits("actor", 2, by=KILL).orders(StartRole)
        assert [(m.rank, m.incarnation) for m in order.members] == [(1, 1), (2, 1)]

    def test_a_death_with_code_0_is_a_failure_while_others_wait_for_the_rank_to_form_a_group(self) -> None:
        job = serving(count=2).exits("actor", 0, by=KILL).exits("actor", 1, 0)
        assert "actor:1 ended with exit code 0, too early; restart 2 of 3: actor:1 alone" in job.records
        assert (job.phases()["actor"], job.state.roles["actor"].generation) == ("reforming", 2)
        (first,) = (each for each in job.state.failures if each.worker.rank == 1)
        assert str(first.exit) == "exit code 0, too early"
        assert reformed(job).phases()["actor"] == "running"

    def test_a_death_with_code_0_before_the_store_of_the_next_generation_is_there_costs_nothing(self) -> None:
        job = serving(count=2, stores_open=False).exits("actor", 0, by=KILL).exits("actor", 1, 0)
        (order,) = job.on(StoreOpened("actor", 1)).orders(StartRole)
        assert [(m.rank, m.incarnation) for m in order.members] == [(0, 1), (1, 1)]
        assert job.state.roles["actor"].restarts == 1

    def test_a_workload_that_ends_with_code_0_before_it_takes_calls_has_failed(self) -> None:
        job = workload().running().exits("actor", 2, 0)
        assert "actor:2 ended with exit code 0, too early; restart 1 of 3" in job.records
        assert job.state.roles["actor"].restarts == 1

    def test_a_death_of_peers_one_after_the_other_has_the_first_as_its_cause(self) -> None:
        job = serving(restarts=1).exits("actor", 2, 7).exits("actor", 1, 1).obey()
        assert job.finish is not None
        assert "root cause: actor:2 on n0: exit code 7" in job.finish.verdict.report

    def test_a_death_spans_nodes_with_the_figures_of_the_whole_role(self) -> None:
        job = serving(nodes=("n0", "n1")).exits("actor", 3, by=KILL)
        (order,) = job.orders(StartRole)
        assert (order.local_world_size, order.group_rank, order.group_world_size) == (2, 1, 2)
        assert [(m.rank, m.local_rank) for m in order.members] == [(3, 1)]


class TestATrainer:
    def test_a_trainer_ends_the_job_when_it_is_not_recoverable(self) -> None:
        job = up(workload().running(), "trainer", recoverable=False).exits("trainer", 0, by=KILL)
        assert job.state.phase is JobPhase.STOPPING
        job.obey()
        assert job.finish is not None
        assert job.finish.verdict.code == 137
        assert "trainer:0 is not recoverable (is_recoverable() returned False)" in job.finish.verdict.report

    def test_a_trainer_ends_the_job_when_it_had_not_said_whether_it_is(self) -> None:
        job = workload().running().exits("trainer", 0, 1)
        assert job.state.phase is JobPhase.STOPPING
        assert "trainer:0 had not told yet whether it is recoverable" in job.records

    def test_a_trainer_is_started_again_when_it_is_and_has_to_say_so_anew(self) -> None:
        job = serving().exits("trainer", 0, by=KILL)
        assert job.phases() == {"actor": "running", "trainer": "reforming"}
        assert job.orders(StartRole)[0].role == "trainer"
        job.exits("trainer", 0, by=KILL)
        assert job.state.phase is JobPhase.STOPPING

    def test_a_trainer_ends_the_job_well_and_its_workloads_are_told_to_end(self) -> None:
        job = serving().exits("trainer", 0, 0)
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0, 1, 2, 3), TERM, 30.0)]
        job.obey()
        assert job.finish is not None
        assert job.finish.verdict.code == 0


class TestServing:
    def test_serving_is_told_at_once_when_the_whole_role_does(self) -> None:
        job = workload(count=2).running()
        job.on(FromWorker(WorkerId("actor", 0, 0), Serving({"torch": "a"}, True)))
        assert job.orders(View) == []
        job.on(FromWorker(WorkerId("actor", 1, 0), Serving({"torch": "b"}, True)))
        assert [w.addresses for w in seen(job).workers] == [{"torch": "a"}, {"torch": "b"}]
        assert [w.phase for w in seen(job).workers] == ["serving", "serving"]

    def test_serving_is_told_in_a_moment_when_it_does_not_come_from_all(self) -> None:
        job = workload(count=3).running().on(Due.VIEW)
        job.on(FromWorker(WorkerId("actor", 0, 0), Serving({}, True)))
        assert [c for c in job.commands if isinstance(c, After)] == [After(VIEW_DELAY, Due.VIEW)]
        job.on(FromWorker(WorkerId("actor", 1, 0), Serving({}, True)))
        assert [c for c in job.commands if isinstance(c, After)] == []
        job.on(Due.VIEW)
        assert [w.phase for w in seen(job).workers] == ["serving", "serving", "running"]
        assert job.on(Due.VIEW).commands == []

    def test_serving_is_what_makes_a_role_of_workloads_run(self) -> None:
        job = workload(count=1).running()
        assert job.phases() == {"actor": "starting", "trainer": "running"}
        assert job.on(FromWorker(WorkerId("actor", 0, 0), Serving({}, True))).phases()["actor"] == "running"

    def test_serving_survives_a_hello_that_comes_late(self) -> None:
        job = serving(count=1).on(WorkerRunning(WorkerId("actor", 0, 0), 0))
        assert job.state.roles["actor"].workers[0].phase is WorkerPhase.SERVING

    def test_serving_of_a_worker_that_is_gone_is_no_news(self) -> None:
        job = serving().exits("actor", 2, by=KILL)
        state = job.state
        job.on(
            FromWorker(WorkerId("actor", 2, 0), Serving({"torch": "old"}, True)),
            FromWorker(WorkerId("actor", 2, 0), GroupFormed(1)),
        )
        assert job.state == state


class TestAStore:
    def test_a_store_that_dies_is_replaced_without_a_restart(self) -> None:
        job = serving().on(StoreEnded("actor", 0, 5.0, "its process was killed"))
        role = job.state.roles["actor"]
        assert job.orders(OpenStore) == [OpenStore("actor", 1)]
        assert (job.orders(StartRole), job.orders(StopWorkers)) == ([], [])
        assert (role.phase, role.generation, role.restarts) == (RolePhase.REFORMING, 1, 0)
        assert seen(job).generation == 1
        assert "role actor forms generation 1, as its store is gone: its process was killed" in job.records
        assert reformed(job).phases()["actor"] == "running"

    def test_a_store_of_an_earlier_generation_is_no_news(self) -> None:
        job = serving().exits("actor", 2, by=KILL)
        state = job.state
        assert job.on(StoreEnded("actor", 0, 5.0, "x"), StoreOpened("actor", 0)).commands == []
        assert job.state == state

    def test_a_store_that_dies_before_its_ranks_have_met_spends_a_restart(self) -> None:
        job = serving(restarts=2).exits("actor", 2, by=KILL).on(StoreEnded("actor", 1, 5.0, "x"))
        role = job.state.roles["actor"]
        assert (role.generation, role.restarts) == (2, 2)
        assert [w.incarnation for w in role.workers] == [0, 0, 1, 0]
        job.on(StoreEnded("actor", 2, 5.0, "x")).obey()
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_BUDGET

    def test_a_store_that_dies_before_the_ranks_of_a_smaller_role_have_met_is_replaced_for_those(
        self,
    ) -> None:
        job = shrinks(restarts=3)
        job.stores_open = False
        job.obey()
        generation = job.state.roles["actor"].generation
        assert job.on(StoreEnded("actor", generation, 5.0, "x")).phases()["actor"] == "restarting"
        job.on(StoreOpened("actor", generation + 1))
        (order,) = job.orders(StartRole)
        assert ([member.rank for member in order.members], order.world_size) == ([0, 1], 2)

    def test_a_store_that_cannot_be_served_at_all_ends_the_job(self) -> None:
        job = (
            workload(restarts=0).launched().on(StoreEnded("actor", 0, 5.0, "no process can be forked")).obey()
        )
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_RENDEZVOUS
        assert job.finish.verdict.report.startswith(
            "the store of role actor is gone before its workers have met"
        )

    def test_a_store_of_scripts_that_dies_is_left_to_their_agent(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().on(StoreEnded("actor", 0, 5.0, "x"))
        assert job.phases() == {"actor": "running"}
        assert job.orders(OpenStore) == []

    def test_a_store_of_scripts_that_cannot_be_opened_again_spends_a_restart(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 2}, stores_open=False).running().exits("actor", 0, 1)
        assert job.phases() == {"actor": "restarting"}
        job.on(StoreEnded("actor", 1, 5.0, "no process can be forked"))
        assert job.orders(OpenStore) == [OpenStore("actor", 2)]
        job.on(StoreEnded("actor", 2, 5.0, "no process can be forked"))
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_BUDGET

    def test_a_store_that_dies_when_some_have_done_their_work_is_not_missed(self) -> None:
        job = serving().exits("actor", 0, 0).on(StoreEnded("actor", 0, 5.0, "x"))
        assert job.phases()["actor"] == "running"
        assert job.orders(OpenStore) == []

    def test_a_store_may_be_heard_of_after_a_rank_has_met_the_others_in_it_and_done_its_work(self) -> None:
        """Started again, that rank would wait in a generation that the others have formed."""
        job = serving(count=2, stores_open=False).on(StoreEnded("actor", 0, 5.0, "x"))
        job.on(
            FromWorker(WorkerId("actor", 0, 0), GroupFormed(1)),
            FromWorker(WorkerId("actor", 1, 0), GroupFormed(1)),
        ).exits("actor", 1, 0)
        assert job.on(StoreOpened("actor", 1)).orders(StartRole) == []
        assert job.phases()["actor"] == "running"

    def test_a_store_opens_in_vain_for_a_job_that_stops(self) -> None:
        job = serving(count=1, stores_open=False).exits("actor", 0, by=KILL).exits("trainer", 0, 0)
        assert job.finish is not None
        assert job.on(StoreOpened("actor", 1)).commands == []

    def test_a_store_of_no_role_is_refused(self) -> None:
        with pytest.raises(IllegalTransition, match="no role nobody"):
            serving().on(StoreOpened("nobody", 1))


class TestFirstOrders:
    def test_first_orders_do_not_wait_for_stores_as_their_sockets_are_there(self) -> None:
        job = workload(stores_open=False).launched()
        kinds = [type(c.message) for c in job.commands if isinstance(c, ToAgent)]
        assert kinds == [View, OpenStore, StartRole, OpenStore, StartRole]
        assert job.orders(OpenStore) == [OpenStore("actor", 0), OpenStore("trainer", 0)]

    def test_first_orders_of_a_store_go_to_the_node_of_rank_0(self) -> None:
        job = workload(nodes=("n1", "n0")).launched()
        nodes = [c.node for c in job.commands if isinstance(c, ToAgent) and isinstance(c.message, OpenStore)]
        assert nodes == ["n1", "n1"]


class TestMetrics:
    def test_metrics_are_kept_and_shown(self) -> None:
        job = serving().on(
            FromWorker(WorkerId("actor", 1, 0), Metrics({"loss": 2.0, "lr": 0.1}, 7.0)),
            FromWorker(WorkerId("actor", 1, 0), Metrics({"loss": 1.0}, 8.0)),
        )
        assert [c for c in job.commands if isinstance(c, KeepMetrics)] == [
            KeepMetrics("actor", 1, 7.0, {"loss": 2.0, "lr": 0.1}),
            KeepMetrics("actor", 1, 8.0, {"loss": 1.0}),
        ]
        status = status_of(job.state, {}, {})
        assert status.roles[0].workers[1].metrics == {"loss": 1.0, "lr": 0.1}

    def test_metrics_of_a_worker_that_is_gone_are_kept_but_not_shown(self) -> None:
        job = (
            serving()
            .exits("actor", 1, by=KILL)
            .on(FromWorker(WorkerId("actor", 1, 0), Metrics({"loss": 2.0}, 7.0)))
        )
        assert any(isinstance(c, KeepMetrics) for c in job.commands)
        assert status_of(job.state, {}, {}).roles[0].workers[1].metrics == {}


def test_the_end_of_a_worker_that_was_told_to_end_is_news_in_a_moment() -> None:
    job = Job({"actor": 2}, restarts={"actor": 1}).running().on(Due.VIEW).exits("actor", 0, 1).on(Due.VIEW)
    job.exits("actor", 1, by=TERM, asked=TERM)
    assert seen(job, "actor").generation == 1
    job = Job({"actor": 2}).running().on(Due.VIEW).exits("actor", 0, 0)
    assert job.orders(View) == []
    assert [w.phase for w in seen(job.on(Due.VIEW)).workers] == ["ended", "running"]
