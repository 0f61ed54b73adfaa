"""A node that is taken out: its ranks go elsewhere, and nothing fails."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.failover.context.states import kept
from tests.unit.failover.job import KILL, TERM, Job
from tests.unit.failover.multi_node import gone, places, ranks, scripts, workloads
from tests.unit.failover.takeover import join, take_over
from unirun.failover.context import decode, encode, urgent
from unirun.failover.draft import Event, Straggles, ToAgent
from unirun.failover.nodes import RETRY_REMEDY
from unirun.failover.state import RolePhase
from unirun.failover.status_views import status_of
from unirun.values import WorkerId
from unirun.wire.messages import Drain, Drained, Shutdown, StartRole, StopWorkers
from unirun.wire.reports import (
    FromWorker,
    GroupFormed,
    Notice,
    OpenStore,
    Serving,
    StoreOpened,
    WorkerError,
    WorkerExited,
)


def leaves(job: Job) -> list[str]:
    """The nodes whose agents were told to leave."""
    return [c.node for c in job.commands if isinstance(c, ToAgent) and isinstance(c.message, Shutdown)]


class TestARoleThatRestartsAsAWhole:
    def test_it_starts_again_once_with_the_ranks_elsewhere_and_spends_no_restart(self) -> None:
        job = scripts(restarts=0).running().on(Drain("n1"))
        assert job.phases() == {"actor": "restarting"}
        assert job.orders(StopWorkers) == [
            StopWorkers("actor", (0, 1), TERM, 30.0),
            StopWorkers("actor", (2, 3), TERM, 30.0),
        ]
        job.obey()
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}
        job.all_run("actor")
        role = job.state.roles["actor"]
        assert (role.phase, role.restarts, job.state.failures) == (RolePhase.RUNNING, 0, ())

    def test_the_decision_is_urgent_and_in_the_store(self) -> None:
        job = scripts().running()
        before = job.state
        job.on(Drain("n1"))
        assert urgent(before, job.state)
        assert kept(job.state) == decode(encode(job.state))
        assert job.state.draining == ("n1",)

    def test_errors_of_workers_that_were_told_to_end_are_no_failures(self) -> None:
        job = scripts().running().on(Drain("n1"))
        error = WorkerError("RuntimeError: connection closed by peer", "", 1.0)
        for rank in range(4):
            job.exits("actor", rank, 1, asked=TERM, error=error)
        assert (job.phases(), job.state.failures) == ({"actor": "starting"}, ())

    def test_its_agent_leaves_when_nothing_runs_there(self) -> None:
        job = scripts().running().on(Drain("n1"))
        for rank in (0, 1, 2):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert leaves(job) == []
        job.exits("actor", 3, by=TERM, asked=TERM)
        assert leaves(job) == ["n1"]
        assert job.told(Drained) == [Drained("n1")]
        assert (job.state.placement.lost, job.state.draining, "n1" in job.state.agents) == (
            ("n1",),
            (),
            False,
        )

    def test_it_is_shown_as_one_that_has_left_and_not_as_lost(self) -> None:
        job = scripts().running().on(Drain("n2")).on(gone("n1"))
        status = status_of(job.state, {}, {})
        assert (status.left, status.lost) == (("n2",), ("n1",))

    def test_the_end_of_its_agent_is_no_loss(self) -> None:
        job = scripts().running().on(Drain("n1")).obey().all_run("actor").on(gone("n1"))
        assert (job.phases(), job.state.roles["actor"].generation) == ({"actor": "running"}, 1)

    def test_a_role_that_runs_elsewhere_is_not_touched(self) -> None:
        job = scripts().running()
        before = job.state.roles
        job.on(Drain("n2"))
        assert (job.state.roles, leaves(job)) == (before, ["n2"])

    def test_a_role_may_become_smaller_where_it_may(self) -> None:
        job = scripts(of=2, least={"actor": 2}).running().on(Drain("n1")).obey()
        assert (places(job), leaves(job)) == (["n0", "n0"], ["n1"])
        job.all_run("actor")
        assert job.phases() == {"actor": "running"}


class TestAWorkerThatMovesAlone:
    def drained(self) -> Job:
        return workloads().on(Drain("n1"))

    def test_it_is_told_to_end_and_its_peers_go_on(self) -> None:
        job = self.drained()
        others = "actor's other 2 ranks keep their memory and form generation 1"
        assert f"node n1 is drained; actor:2-3 moves, {others}" in job.records
        assert job.orders(StopWorkers) == [StopWorkers("actor", (2, 3), TERM, 30.0)]
        assert job.phases() == {"actor": "reforming", "critic": "running", "trainer": "running"}
        assert job.orders(StartRole) == []

    def test_its_successor_starts_when_it_has_ended_and_no_restart_is_spent(self) -> None:
        job = self.drained().exits("actor", 2, 0, asked=TERM)
        assert job.orders(StartRole) == []
        job.exits("actor", 3, 1, asked=TERM, error=WorkerError("KeyboardInterrupt", "", 1.0))
        assert ranks(job) == {"n3": [2, 3]}
        role = job.state.roles["actor"]
        assert (role.generation, role.restarts, job.state.failures) == (1, 0, ())
        assert leaves(job) == ["n1"]

    def test_one_that_dies_before_it_hears_of_it_costs_nothing_either(self) -> None:
        job = self.drained().exits("actor", 2, by=KILL).exits("actor", 3, by=TERM, asked=TERM)
        assert ranks(job) == {"n3": [2, 3]}
        assert (job.state.roles["actor"].restarts, job.state.failures) == (0, ())

    def test_the_role_runs_when_all_have_formed_the_next_generation(self) -> None:
        job = self.drained().obey()
        for worker in job.state.roles["actor"].workers:
            who = WorkerId("actor", worker.rank, worker.incarnation)
            if worker.rank < 2:
                job.on(FromWorker(who, GroupFormed(1)))
            else:
                job.on(FromWorker(who, Serving({}, True)))
        assert job.phases()["actor"] == "running"

    def test_the_store_moves_when_rank_0_does(self) -> None:
        job = workloads().on(Drain("n0"))
        assert [
            c.node for c in job.commands if isinstance(c, ToAgent) and isinstance(c.message, OpenStore)
        ] == [job.state.placement.of_role("actor")[0].node]

    def test_its_agent_leaves_when_those_that_live_on_can_meet_in_another_store(self) -> None:
        job = workloads()
        job.stores_open = False
        job.on(Drain("n0")).obey()
        assert job.phases()["actor"] == "reforming"
        assert not any(worker.node == "n0" for worker in job.state.roles["actor"].live)
        assert leaves(job) == []
        assert leaves(job.on(StoreOpened("actor", 1))) == ["n0"]

    def test_a_node_that_dies_while_it_is_drained_is_lost_and_the_ranks_go_where_they_were_to_go(
        self,
    ) -> None:
        job = self.drained().on(gone("n1"))
        assert ranks(job) == {"n3": [2, 3]}
        assert (job.state.draining, job.state.placement.lost) == ((), ("n1",))
        assert job.state.roles["actor"].restarts == 0

    @pytest.mark.parametrize("formed", [True, False])
    def test_one_that_has_met_the_others_in_the_next_store_has_its_successor_in_the_one_after(
        self, *, formed: bool
    ) -> None:
        """All generations have one address. Ranks that have just begun may come to the next store before they are told
        of it, also those that are to leave."""
        job = workloads(of=4).on(Drain("n1"))
        leaving = WorkerId("actor", 2, 0)
        if formed:
            job.on(FromWorker(leaving, GroupFormed(1)))
        job.exits("actor", 3, by=TERM, asked=TERM)
        job.on(WorkerExited(leaving, job.now, None, TERM, "order", TERM, met=1))
        assert {(order.role, order.generation) for order in job.orders(StartRole)} == {("actor", 2)}
        assert sorted(rank for there in ranks(job).values() for rank in there) == [2, 3]
        assert job.state.roles["actor"].restarts == 0

    def test_a_new_master_tells_it_again(self) -> None:
        job = self.drained()
        before = job.state
        take_over(job)
        join(job, before, "n1")
        assert job.orders(StopWorkers) == [StopWorkers("actor", (2, 3), TERM, 30.0)]
        for node in ("n0", "n2", "n3"):
            join(job, before, node)
        job.exits("actor", 2, by=TERM, asked=TERM).exits("actor", 3, by=TERM, asked=TERM)
        assert ranks(job) == {"n3": [2, 3]}


class TestWhileTheJobRecovers:
    @pytest.mark.parametrize("recovers", [{"losses": {"n3": "it is gone"}}, {"away": frozenset({"n3"})}])
    @pytest.mark.parametrize("event", [Drain("n1"), Straggles(WorkerId("actor", 3, 0), "it is slow")])
    def test_no_rank_is_moved(self, event: Event, recovers: dict[str, Any]) -> None:
        job, sound = scripts(of=4).running(), scripts(of=4).running()
        assert sound.on(event).state.placement != job.state.placement
        job.state = replace(job.state, **recovers)
        before = job.state
        assert job.on(event).state == before
        assert job.orders(StopWorkers) == []

    def test_no_node_leaves_until_all_have_joined_the_next_master(self) -> None:
        job = scripts(of=4).running()
        job.state = replace(job.state, draining=("n2",), away=frozenset({"n3"}))
        assert leaves(job.on(Notice("n0", "hm"))) == []
        job.state = replace(job.state, away=frozenset())
        assert leaves(job.on(Notice("n0", "hm"))) == ["n2"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("node", "problem"),
        [
            ("n9", "the job has no node n9"),
            ("n0", "n0 keeps the job's store"),
        ],
    )
    def test_a_node_that_cannot_leave_stays(self, node: str, problem: str) -> None:
        job = scripts().running()
        job.state = replace(job.state, keepers=("n0",))
        before = job.state
        (answer,) = job.on(Drain(node)).told(Drained)
        assert (answer.node, answer.problem) == (node, problem)
        assert job.state == before

    def test_without_room_elsewhere_nothing_changes_and_the_shortage_is_told(self) -> None:
        job = scripts(of=2).running()
        before = job.state
        (answer,) = job.on(Drain("n1")).told(Drained)
        assert "its ranks fit nowhere else: actor needs room for 4 ranks" in answer.problem
        assert job.state == before

    def test_a_trainer_that_is_not_recoverable_keeps_its_node(self) -> None:
        job = workloads()
        node = job.state.placement.of_role("trainer")[0].node
        (answer,) = job.on(Drain(node)).told(Drained)
        assert "trainer:0 is not recoverable" in answer.problem

    def test_a_node_that_has_left_cannot_leave_again(self) -> None:
        job = scripts().running().on(Drain("n2")).on(Drain("n2"))
        assert [answer.problem for answer in job.told(Drained)] == ["n2 has left the job already"]

    def test_who_asks_twice_waits_with_the_first(self) -> None:
        job = scripts().running().on(Drain("n1")).on(Drain("n1"))
        assert job.commands == []

    def test_no_rank_goes_to_a_node_that_is_being_drained(self) -> None:
        job = scripts(2, of=3).running().on(Drain("n0"))
        assert places(job) == ["n1", "n1"]
        job.on(Drain("n1"))
        assert places(job) == ["n2", "n2"]


def test_a_node_may_be_drained_while_its_role_restarts_after_a_failure() -> None:
    job = scripts().running().exits("actor", 0, 1).on(Drain("n1"))
    assert job.state.roles["actor"].restarts == 1
    for rank in (1, 2, 3):
        job.exits("actor", rank, by=TERM, asked=TERM)
    assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}


def test_who_asks_while_a_store_is_being_opened_has_to_ask_again() -> None:
    """The rendezvous store may be on the node that is to leave."""
    job = scripts(stores_open=False).running().exits("actor", 2, 1)
    for rank in (0, 1, 3):
        job.exits("actor", rank, by=TERM, asked=TERM)
    assert job.on(Drain("n0")).told(Drained) == [Drained("n0", "a role is being formed anew", RETRY_REMEDY)]
    job.on(StoreOpened("actor", 1)).all_run("actor")
    assert job.on(Drain("n0")).told(Drained) == []


def test_a_node_that_is_lost_while_ranks_move_leaves_those_that_move_on_their_way() -> None:
    job = workloads(of=5).on(Drain("n1"))
    target = places(job)[2]
    job.on(gone(target))
    assert job.phases()["actor"] == "reforming"
    job.exits("actor", 2, by=TERM, asked=TERM).exits("actor", 3, by=TERM, asked=TERM)
    (there,) = ranks(job)
    assert there not in ("n1", target)
    assert job.state.roles["actor"].restarts == 0
