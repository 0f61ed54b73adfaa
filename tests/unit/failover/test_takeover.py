"""A master that comes in another's place: it orders again what was lost, nothing twice, and hears what has happened."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import KILL, TERM, Job, plain
from tests.unit.failover.services import Services, program, service
from tests.unit.failover.takeover import TWO, end, join, kinds, rejoin, starts, take_over
from tests.unit.failover.workloads import serving, up, workload
from unirun.errors import IllegalTransition, Refused
from unirun.failover.context import decode, encode
from unirun.failover.draft import After, Due, Record, ToAgent
from unirun.failover.restart_or_end import shutdown_order
from unirun.failover.state import Exit, JobPhase, Ports, RolePhase, Verdict, WorkerPhase, WorkerState
from unirun.failover.takeover import REJOIN_TIMEOUT, resume
from unirun.spec.job import EntryKind
from unirun.values import RankAddress, WorkerId
from unirun.wire.messages import ExitAck, Shutdown, StartRole, Stop, StopWorkers, View, WorkerOutput
from unirun.wire.reports import (
    CallCount,
    Calls,
    Ending,
    FromWorker,
    Health,
    HeldWorker,
    Join,
    OpenStore,
    StoreEnded,
    StoreOpened,
    WorkerError,
)


class TestTakingOver:
    def test_taking_over_makes_no_difference_to_a_job_that_has_ended(self) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0)
        state = decode(encode(job.state))
        assert resume(state, 9.0) == (state, [])

    def test_taking_over_knows_of_workers_only_what_was_ordered(self) -> None:
        job = Job({"actor": 2}).running().exits("actor", 1)
        take_over(job)
        one, two = job.state.roles["actor"].workers
        assert (one.phase, one.pid, one.incarnation) == (WorkerPhase.STARTING, None, 0)
        assert two.ended_well
        assert job.state.away == {"n0"}

    def test_taking_over_is_recorded_and_gives_the_nodes_their_time(self) -> None:
        job = Job({"actor": 1}).running()
        assert plain(take_over(job)) == [
            Record("master", "another master goes on with the job"),
            After(REJOIN_TIMEOUT, Due.REJOIN),
        ]

    def test_taking_over_of_a_job_that_nobody_has_joined_yet_waits_for_the_rest_of_the_time(self) -> None:
        job = Job({"actor": 1})
        job.now = 110.0
        assert take_over(job) == [After(48.0, Due.JOIN)]
        job.now = 158.0
        assert take_over(job) == [After(REJOIN_TIMEOUT, Due.JOIN)], "nobody could join meanwhile"

    def test_taking_over_tells_nobody_anything(self) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0, 1)
        assert not any(isinstance(command, ToAgent) for command in take_over(job))


class TestOfANodeThatHasEverything:
    def test_after_a_takeover_of_an_intact_node_nothing_is_ordered_again(self) -> None:
        job = rejoin(Job({"actor": 2, "rollout": 1}).running())
        assert kinds(job) == [View]
        assert job.phases() == {"actor": "running", "rollout": "running"}

    def test_after_a_takeover_of_an_intact_node_the_workers_stand_as_they_stood(self) -> None:
        job = Job({"actor": 2}).running()
        before = job.state
        assert rejoin(job).state.roles == before.roles

    def test_after_a_takeover_of_an_intact_node_the_addresses_are_those_that_it_tells(self) -> None:
        job = Job({"actor": 1}, kinds={"actor": "workload"}).running()
        before = job.state.roles["actor"].with_worker(
            replace(
                job.state.roles["actor"].workers[0],
                phase=WorkerPhase.SERVING,
                addresses={"socket": "a:1"},
                recoverable=True,
            )
        )
        job.state = job.state.with_role(before)
        rejoin(job)
        (worker,) = job.state.roles["actor"].workers
        assert (worker.phase, worker.addresses, worker.recoverable) == (
            WorkerPhase.SERVING,
            {"socket": "a:1"},
            True,
        )
        assert job.orders(View)[-1].roles[0].workers[0].addresses == {"socket": "a:1"}

    def test_after_a_takeover_of_an_intact_node_who_follows_the_job_learns_of_its_processes(self) -> None:
        job = rejoin(Job({"actor": 2}).running())
        assert job.told(WorkerOutput) == [
            WorkerOutput(WorkerId("actor", 0, 0), 0, "n0"),
            WorkerOutput(WorkerId("actor", 1, 0), 1, "n0"),
        ]

    def test_after_a_takeover_of_an_intact_node_a_second_one_of_its_name_is_refused(self) -> None:
        job = rejoin(Job({"actor": 1}).running())
        with pytest.raises(Refused, match="joined twice"):
            job.on(Join("n0", 2, "n0", {"actor": "h:1"}))
        with pytest.raises(Refused, match="has no place"):
            job.on(Join("n9", 1, "n9", {"actor": "h:1"}))

    def test_after_a_takeover_of_an_intact_node_it_may_come_back_on_another_stream(self) -> None:
        job = Job({"actor": 2}).running()
        before = job.state
        assert kinds(join(job, before)) == [View]
        assert job.state.roles == before.roles

    def test_after_a_takeover_of_an_intact_node_a_second_takeover_finds_the_same(self) -> None:
        job = Job({"actor": 2}).running()
        first = rejoin(job).state
        assert rejoin(job).state == first


class TestAWorkerThatAnAgentHolds:
    @pytest.mark.parametrize(
        ("held", "phase"),
        [
            (HeldWorker(WorkerId("actor", 0, 1)), WorkerPhase.STARTING),
            (HeldWorker(WorkerId("actor", 0, 1), 7), WorkerPhase.ALIVE),
            (HeldWorker(WorkerId("actor", 0, 1), 7, running=True, generation=1), WorkerPhase.RUNNING),
            (
                HeldWorker(
                    WorkerId("actor", 0, 1), 7, True, 1, {"socket": "a"}, serving=True, recoverable=True
                ),
                WorkerPhase.SERVING,
            ),
            (HeldWorker(WorkerId("actor", 0, 1), 7, True, 9, serving=True), WorkerPhase.SERVING),
        ],
    )
    def test_a_worker_that_its_agent_holds_stands_as_it_says(
        self, held: HeldWorker, phase: WorkerPhase
    ) -> None:
        """Another node is away, so nothing follows yet."""
        job = Job({"actor": 2}, nodes=TWO, kinds={"actor": "workload"}, restarts={"actor": 1}).running()
        job.exits("actor", 0, by=KILL)
        before = job.state.roles["actor"].workers[0]
        take_over(job)
        job.on(replace(job.join("n0"), workers=(held,)))
        assert job.state.roles["actor"].workers[0] == replace(
            before,
            phase=phase,
            pid=held.pid,
            generation=1,
            addresses=held.addresses,
            recoverable=held.recoverable if held.serving else None,
        )

    @pytest.mark.parametrize("incarnation", [0, 1])
    def test_a_worker_that_its_agent_holds_stands_as_before_when_it_does_not(self, incarnation: int) -> None:
        """The order to start it was lost."""
        job = Job({"actor": 2}, nodes=TWO, kinds={"actor": "workload"}, restarts={"actor": 1}).running()
        told = (CallCount("actor", "sum", 2, 10, 10, 0.5, ((1, 1),)),)
        for _ in range(incarnation):
            job.on(FromWorker(WorkerId("actor", 0, 0), Calls(told))).exits("actor", 0, by=KILL)
        before = job.state.roles["actor"].workers[0]
        assert before.called == (told if incarnation else ())
        job.state, _ = resume(job.state, job.now)
        job.on(job.join("n0"))
        ended = WorkerState(0, "n0", 0, WorkerPhase.EXITED, exit=Exit(signal=TERM), called=told)
        assert job.state.roles["actor"].workers[0] == (ended if incarnation else WorkerState(0, "n0"))

    def test_a_service_that_is_ready_stays_quiet(self) -> None:
        """Watchers are told how its agent says that it stands, not what the store knows of it."""
        job = rejoin(Services(service(count=2), program()).up())
        quiet = {output.worker.role: output.quiet for output in job.told(WorkerOutput)}
        assert quiet == {"engine": True, "train": False}

    def test_a_service_that_is_not_ready_any_more_does_not_run_as_a_whole(self) -> None:
        """Its agent comes back on another stream, to the same master."""
        job = Services(service(), program()).up()
        before = job.state
        held = job.state.roles["engine"].workers[0]
        unready = replace(held, health=Health(False, 5.0, "no answer"), phase=WorkerPhase.RUNNING)
        told = before.with_role(before.roles["engine"].with_worker(unready))
        assert join(job, told).phases() == {"engine": "starting", "train": "running"}


class TestAnOrderThatWasLost:
    def test_a_lost_order_to_start_the_first_workers_is_given_again(self) -> None:
        job = Job({"actor": 3}).launched()
        rejoin(job, lost=[("actor", 0, 0), ("actor", 2, 0)])
        assert starts(job) == [("actor", 0, [(0, 0), (2, 0)])]
        assert kinds(job)[0] is View, "who is started must be welcomed with what holds now"
        assert job.all_run("actor").phases() == {"actor": "running"}

    def test_a_lost_order_to_start_a_generation_is_given_again(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().exits("actor", 0, 1).obey()
        assert job.phases() == {"actor": "starting"}
        rejoin(job, lost=[("actor", 0, 1), ("actor", 1, 1)])
        assert starts(job) == [("actor", 1, [(0, 1), (1, 1)])]
        assert job.orders(StartRole)[0].restarts == 1
        assert job.all_run("actor").phases() == {"actor": "running"}

    def test_a_lost_order_to_start_one_worker_again_is_given_again_and_the_others_are_left_alone(
        self,
    ) -> None:
        job = Job({"actor": 3}, kinds={"actor": "workload"}, restarts={"actor": 1}).running()
        job.exits("actor", 1, by=KILL)
        rejoin(job, lost=[("actor", 1, 1)])
        assert starts(job) == [("actor", 1, [(1, 1)])]
        assert job.orders(StopWorkers) == []

    @pytest.mark.parametrize("kind", ["workload", "program"])
    def test_a_lost_order_to_start_one_worker_again_costs_its_rank_nothing_of_what_it_had(
        self, kind: EntryKind
    ) -> None:
        job = Job({"actor": 2}, kinds={"actor": kind}, restarts={"actor": 3}).running()
        worker = replace(
            job.state.roles["actor"].workers[1],
            called=(CallCount("actor", "sum", 2, 10, 10, 0.5, ((1, 1),)),),
            ports=Ports("n0", RankAddress("n0", (20000,))),
            paid=(50.0,),
            new_ports=1,
            step=7,
        )
        job.state = job.state.with_role(job.state.roles["actor"].with_worker(worker))
        job.exits("actor", 1, by=KILL)
        ordered = job.state.roles["actor"].workers[1]
        assert (ordered.incarnation, ordered.step) == (1, 7)
        rejoin(job, lost=[("actor", 1, 1)])
        assert job.state.roles["actor"].workers[1] == ordered

    def test_a_lost_order_to_open_a_store_is_given_again_and_then_it_goes_on(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}, stores_open=False).running()
        job.exits("actor", 0, 1).obey()
        assert (job.state.roles["actor"].generation, job.state.roles["actor"].opened) == (1, 0)
        rejoin(job, stores=[StoreOpened("actor", 0)])
        assert set(job.orders(OpenStore)) == {OpenStore("actor", 1)}
        assert starts(job) == []
        assert starts(job.on(StoreOpened("actor", 1))) == [("actor", 1, [(0, 1), (1, 1)])]
        assert starts(job.on(StoreOpened("actor", 1))) == [], "however often it is told"

    def test_a_lost_order_to_open_the_first_store_is_given_again(self) -> None:
        job = rejoin(Job({"actor": 1}).launched(), lost_stores=["actor"])
        assert job.orders(OpenStore) == [OpenStore("actor", 0)]

    def test_a_lost_order_to_stop_a_generation_is_given_again_to_those_that_live(self) -> None:
        job = Job({"actor": 3, "rollout": 1}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        rejoin(job, ended=[end("actor", 1, by=TERM, sent=TERM, cause="order")])
        assert job.orders(StopWorkers) == [StopWorkers("actor", (2,), TERM, 30.0)]
        job.exits("actor", 2, by=TERM, asked=TERM)
        assert starts(job) == [("actor", 1, [(0, 1), (1, 1), (2, 1)])]

    def test_a_lost_order_to_stop_the_job_is_given_again(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).running().on(Stop(int(signal.SIGINT), "got SIGINT"))
        rejoin(job)
        assert [(o.role, o.ranks) for o in job.orders(StopWorkers)] == [
            ("actor", (0, 1)),
            ("rollout", (0,)),
        ]
        assert job.obey().end == (130, "got SIGINT")

    def test_a_lost_order_to_start_is_not_given_again_when_the_job_is_to_end(self) -> None:
        job = Job({"actor": 2}).launched().on(Stop(TERM, "enough"))
        rejoin(job, lost=[("actor", 0, 0), ("actor", 1, 0)])
        assert starts(job) == []
        assert job.end == (143, "enough")

    def test_a_lost_order_to_open_a_store_is_not_given_again_when_the_job_is_to_end(self) -> None:
        job = rejoin(Job({"actor": 1}).running().on(Stop(TERM, "enough")), lost_stores={"actor"})
        assert job.orders(OpenStore) == []

    def test_a_lost_order_to_start_some_is_not_given_again_when_their_role_starts_anew(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).launched().exits("actor", 0, 1)
        assert job.phases() == {"actor": "restarting"}
        rejoin(job, lost=[("actor", 1, 0)])
        ((role, generation, members),) = starts(job)
        assert (role, generation) == ("actor", 1)
        assert [rank for rank, _ in members] == [0, 1]

    def test_a_lost_order_to_launch_a_job_that_was_not_decided_is_decided_now(self) -> None:
        job = Job({"actor": 2}, nodes=TWO).on(Join("n0", 1, "n0", {"actor": "h:1"}))
        take_over(job)
        job.on(Join("n0", 1, "n0", {"actor": "h:1"}))
        assert job.state.phase is JobPhase.LAUNCHING
        assert job.on(Join("n1", 1, "n1", {"actor": "h:2"})).state.phase is JobPhase.RUNNING
        assert starts(job) == [("actor", 0, [(0, 0)]), ("actor", 0, [(1, 0)])]


class TestAnEndThatNoMasterHasHeardOf:
    def test_an_unreported_exit_is_a_failure_like_any_other(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running()
        error = WorkerError("ValueError: x", "Traceback", 201.0)
        rejoin(job, ended=[replace(end("actor", 0), error=error)])
        assert job.phases() == {"actor": "restarting"}
        assert job.orders(StopWorkers) == [StopWorkers("actor", (1,), TERM, 30.0)]
        assert job.orders(ExitAck) == [ExitAck(WorkerId("actor", 0, 0))]
        assert [f.message for f in job.state.failures] == ["ValueError: x"]
        assert starts(job.obey()) == [("actor", 1, [(0, 1), (1, 1)])]

    def test_an_unreported_exit_may_be_that_of_one_that_is_started_again_alone(self) -> None:
        job = Job({"actor": 3}, kinds={"actor": "workload"}, restarts={"actor": 1}).running()
        rejoin(job, ended=[end("actor", 2, by=KILL)])
        assert starts(job) == [("actor", 1, [(2, 1)])]
        assert job.orders(StopWorkers) == []

    def test_an_unreported_exit_may_be_the_end_of_the_job(self) -> None:
        job = Job({"actor": 2}).running().exits("actor", 0)
        rejoin(job, ended=[end("actor", 1, 0)])
        assert job.end == (0, "actor succeeded")

    def test_an_unreported_exit_is_kept_once_though_it_is_told_again(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().exits("actor", 0, 1).obey()
        before = job.state.roles["actor"]
        rejoin(job, ended=[end("actor", 0, 1), end("actor", 1, by=TERM, sent=TERM, cause="order")])
        assert job.orders(ExitAck) == [ExitAck(WorkerId("actor", 0, 0)), ExitAck(WorkerId("actor", 1, 0))]
        assert (job.state.roles["actor"].restarts, len(job.state.failures)) == (before.restarts, 1)
        assert starts(job) == []

    def test_an_unreported_exit_of_two_spends_one_restart_of_their_role(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running()
        rejoin(job, ended=[end("actor", 0, 1), end("actor", 1, 1, sent=TERM, cause="order")])
        assert job.state.roles["actor"].restarts == 1
        assert starts(job) == [("actor", 1, [(0, 1), (1, 1)])]

    def test_an_unreported_exit_is_never_one_by_an_order_that_was_not_written(self) -> None:
        """Such an order is not given, so who has ended by one is not let vanish."""
        job = Job({"actor": 2}).running()
        with pytest.raises(
            IllegalTransition, match="actor:1 ended: .* by an order that no master has written"
        ):
            rejoin(job, ended=[end("actor", 1, by=TERM, sent=TERM, cause="order")])

    def test_an_unreported_exit_of_a_store_is_heard_of_too(self) -> None:
        job = Job({"actor": 2}, kinds={"actor": "workload"}, restarts={"actor": 1}).running()
        before = job.state
        for worker in before.roles["actor"].workers:
            serving = replace(worker, phase=WorkerPhase.SERVING, addresses={"socket": "a"}, recoverable=True)
            before = before.with_role(before.roles["actor"].with_worker(serving))
        job.state = before
        gone = StoreEnded("actor", 0, 200.0, "it was killed")
        rejoin(job, stores=[gone])
        assert OpenStore("actor", 1) in job.orders(OpenStore)

    @pytest.mark.parametrize("later", [True, False])
    def test_an_unreported_end_of_a_store_costs_nothing_when_all_ranks_run(self, *, later: bool) -> None:
        """The master knows it when all nodes have joined."""
        job = up(workload(2, restarts=0, nodes=TWO).running())
        before = job.state
        take_over(job)
        ended = StoreEnded("actor", 0, 200.0, "it was killed")
        join(job, before, "n0", stores=[] if later else [ended])
        if later:
            job.on(ended)
        assert job.state.roles["actor"].generation == 0
        join(job, before, "n1")
        role = job.state.roles["actor"]
        assert (role.phase, role.generation, role.restarts) == (RolePhase.REFORMING, 1, 0)

    def test_a_store_that_ended_when_some_had_succeeded_is_not_missed_by_the_next_master_either(self) -> None:
        gone = StoreEnded("actor", 0, 200.0, "it was killed")
        job = serving().exits("actor", 1).on(gone)
        rejoin(job, stores=[gone])
        assert job.state.roles["actor"].generation == 0
        assert job.phases() == {"actor": "running", "trainer": "running"}


class TestAnEndOfTheJobThatCouldNotBeWritten:
    """The store was away. The agent was told, and tells it."""

    def test_an_unwritten_end_of_the_job_is_told_as_it_was_decided(self) -> None:
        job = Job({"actor": 1}).running()
        verdict = Verdict(JobPhase.FAILED, 7, "no restarts", by_failure=True)
        told = Shutdown(30.0, Ending("failed", 7, "no restarts", by_failure=True))
        assert shutdown_order(job.state, verdict) == told

    def test_an_unwritten_end_of_the_job_is_the_end_of_the_job(self) -> None:
        job = Job({"actor": 2}).running()
        ending = Ending("stopped", 130, "got SIGINT")
        rejoin(job, ending=ending, ended=[end("actor", 0, by=TERM, sent=TERM, cause="leaving")])
        assert job.orders(StopWorkers)[-1].ranks == (1,)
        assert job.exits("actor", 1, by=TERM, asked=TERM, cause="leaving").end == (130, "got SIGINT")

    def test_an_unwritten_end_of_the_job_that_is_success_has_roles_that_have_succeeded(self) -> None:
        """The agents of these roles have left since; no other process knows of that."""
        job = Job({"actor": 2, "rollout": 1}, nodes=TWO, primary=("actor",)).running()
        before = job.state
        take_over(job)
        ending = Ending("succeeded", 0, "actor succeeded")
        join(job, before, "n0", ending=ending, ended=[end("actor", 0, 0)])
        assert job.phases() == {"actor": "succeeded", "rollout": "stopping"}
        assert job.orders(StopWorkers)[-1].role == "rollout"
        job.on(Due.REJOIN)
        assert job.exits("rollout", 0, by=TERM, asked=TERM, cause="leaving").end == (0, "actor succeeded")

    def test_an_unwritten_end_of_the_job_has_the_exit_code_of_its_cause(self) -> None:
        job = Job({"actor": 2}).running()
        ending = Ending("failed", 0, "no restarts", by_failure=True)
        rejoin(job, ending=ending, ended=[end("actor", 0, 77)])
        job.exits("actor", 1, by=TERM, asked=TERM, cause="leaving")
        assert job.end is not None
        assert job.end[0] == 77

    def test_an_unwritten_end_of_the_job_whose_cause_was_lost_with_its_node_is_told_all_the_same(
        self,
    ) -> None:
        job = Job({"actor": 1}).running()
        rejoin(job, ending=Ending("failed", 137, "n1 is gone", by_failure=True))
        assert job.exits("actor", 0, by=TERM, asked=TERM, cause="leaving").end == (137, "n1 is gone")

    def test_an_unwritten_end_of_the_job_does_not_change_one_that_was_written(self) -> None:
        job = Job({"actor": 1}).running().on(Stop(int(signal.SIGINT), "got SIGINT"))
        rejoin(job, ending=Ending("stopped", 143, "enough"))
        assert job.exits("actor", 0, by=TERM, asked=TERM).end == (130, "got SIGINT")
