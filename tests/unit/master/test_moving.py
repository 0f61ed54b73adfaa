"""When a node is gone its ranks are placed anew, and nobody else is touched who need not be."""

from __future__ import annotations

import pytest

from tests.unit.master.documents import kept, written
from tests.unit.master.job import TERM, Job
from tests.unit.master.takeover import take_over
from unirun.collocation import Device, Inventory, Node
from unirun.errors import EXIT_BUDGET, EXIT_PLACEMENT, EXIT_RENDEZVOUS, IllegalTransition
from unirun.master.context import restore
from unirun.master.events import AgentLost, JoinTimedOut, RejoinTimedOut
from unirun.master.state import JobPhase, RolePhase
from unirun.master.telling import status_of
from unirun.wire.messages import OpenStore, StartRole, Stop, StopWorkers, View
from unirun.wire.reports import Notice, WorkerExited, WorkerFormed, WorkerServing
from unirun.wire.spawning import StoreOpened


def nodes(count: int, devices: int = 2) -> Inventory:
    there = tuple(Device(str(number), "") for number in range(devices))
    return Inventory(tuple(Node(f"n{number}", (0,), there) for number in range(count)))


def scripts(count: int = 4, *, of: int = 3, restarts: int = 2, **more: object) -> Job:
    return Job({"actor": count}, restarts={"actor": restarts}, inventory=nodes(of), **more)  # type: ignore[arg-type]


def workloads(
    restarts: int = 2, *, of: int = 4, recoverable: bool = False, least: dict[str, int] | None = None
) -> Job:
    """Four actors on two nodes, two critics on another, a trainer beside them."""
    job = Job(
        {"actor": 4, "critic": 2, "trainer": 1},
        restarts={"actor": restarts, "critic": restarts, "trainer": restarts},
        kinds={"actor": "workload", "critic": "workload", "trainer": "trainer"},
        primary=("trainer",),
        inventory=nodes(of),
        least=least,
    ).running()
    for role in job.state.roles.values():
        for worker in role.workers:
            who = role.name, worker.rank, worker.incarnation
            ready = role.kind != "trainer" or recoverable
            job.on(WorkerServing(*who, {"socket": f"{role.name}{worker.rank}"}, ready))
    return job


def gone(node: str) -> AgentLost:
    return AgentLost(node, "the peer closed the stream")


def places(job: Job, role: str = "actor") -> list[str]:
    return [place.node for place in job.state.placement.of_role(role)]


def ranks(job: Job) -> dict[str, list[int]]:
    """By node, who was ordered to start."""
    found: dict[str, list[int]] = {}
    for command in job.commands:
        if hasattr(command, "node") and isinstance(command.message, StartRole):
            found.setdefault(command.node, []).extend(member.rank for member in command.message.members)
    return found


class TestARoleOfScripts:
    def test_starts_again_with_the_lost_ranks_on_the_node_that_was_free(self) -> None:
        job = scripts().running().on(gone("n1"))
        assert job.phases() == {"actor": "restarting"}
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0, 1), TERM, 30.0)]
        job.exits("actor", 0, by=TERM, asked=TERM)
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}
        assert [worker.node for worker in job.state.roles["actor"].workers] == ["n0", "n0", "n2", "n2"]
        assert job.all_run("actor").state.roles["actor"].phase is RolePhase.RUNNING

    def test_spends_one_restart_however_many_were_lost(self) -> None:
        job = scripts().running().on(gone("n1"))
        assert job.state.roles["actor"].restarts == 1
        assert {failure.rank for failure in job.state.failures} == {2, 3}
        assert all("restart 1 of 2" in failure.decision for failure in job.state.failures)

    def test_without_restarts_ends_the_job(self) -> None:
        job = scripts(restarts=0).running().on(gone("n1")).obey()
        assert job.end is not None
        code, report = job.end
        assert code == 137
        assert "role actor has no restarts" in report

    def test_ends_it_too_when_they_are_used_up(self) -> None:
        job = scripts(of=4, restarts=1).running().on(gone("n1"))
        for rank in (0, 1):
            job.exits("actor", rank, by=TERM, asked=TERM)
        job.all_run("actor").on(gone("n2")).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_BUDGET

    def test_has_its_store_where_its_rank_0_has_gone(self) -> None:
        job = scripts().running().on(gone("n0"))
        job.exits("actor", 2, by=TERM, asked=TERM).exits("actor", 3, by=TERM, asked=TERM)
        assert job.orders(OpenStore) == [OpenStore("actor", 1)]
        assert job.orders(StartRole)[0].endpoint == "n2:1"

    def test_that_restarts_already_does_so_elsewhere_at_no_further_cost(self) -> None:
        job = scripts().running().exits("actor", 0, 1)
        assert job.phases() == {"actor": "restarting"}
        job.on(gone("n1"))
        assert job.state.roles["actor"].restarts == 1
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}

    def test_gets_its_store_elsewhere_when_the_node_goes_that_was_to_serve_it(self) -> None:
        job = scripts(stores_open=False).running().exits("actor", 2, 1)
        for rank in (0, 1, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert job.orders(OpenStore) == [OpenStore("actor", 1)]
        job.on(gone("n0"))
        assert job.orders(OpenStore) == [OpenStore("actor", 1)], "the same, as nobody has met in it"
        assert job.state.roles["actor"].restarts == 1
        job.on(StoreOpened("actor", 1))
        assert ranks(job) == {"n2": [0, 1], "n1": [2, 3]}

    def test_that_has_ended_is_left_where_it_was(self) -> None:
        job = Job(
            {"actor": 2, "critic": 2},
            restarts={"actor": 1, "critic": 1},
            inventory=nodes(3),
        ).running()
        job.exits("actor", 0).exits("actor", 1).on(gone("n0"))
        assert (job.phases(), places(job)) == ({"actor": "succeeded", "critic": "running"}, ["n0", "n0"])

    def test_may_fit_nowhere_else(self) -> None:
        job = scripts(of=2).running().on(gone("n1")).obey()
        assert job.end is not None
        code, report = job.end
        assert code == EXIT_PLACEMENT
        assert "its ranks fit nowhere else: actor needs room for 4 ranks" in report

    def test_becomes_smaller_where_it_may(self) -> None:
        job = scripts(of=2, least={"actor": 2}).running().on(gone("n0"))
        assert len(job.state.roles["actor"].workers) == 4, "as long as some of them live"
        assert kept(job.state) == restore(written(job.state))
        for rank in (2, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        (order,) = job.orders(StartRole)
        assert (order.world_size, [m.rank for m in order.members], order.restarts) == (2, [0, 1], 1)
        assert job.all_run("actor").phases() == {"actor": "running"}
        assert kept(job.state) == restore(written(job.state))

    def test_that_has_become_smaller_takes_late_news_of_who_is_not_needed(self) -> None:
        job = scripts(of=2, least={"actor": 2}).running().on(gone("n0"))
        for rank in (2, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        before = job.state
        assert job.exits("actor", 3, 1, incarnation=0).state == before
        with pytest.raises(IllegalTransition, match="there is no worker actor:4"):
            job.exits("actor", 4, 1, incarnation=0)


class TestWorkloads:
    def test_that_live_on_form_the_next_generation_with_those_that_come(self) -> None:
        job = workloads()
        assert places(job) == ["n0", "n0", "n1", "n1"]
        job.on(gone("n0"))
        role = job.state.roles["actor"]
        assert (role.phase, role.generation) == (RolePhase.REFORMING, 1)
        assert job.orders(StopWorkers) == []
        assert ranks(job) == {"n3": [0, 1]}
        assert [worker.incarnation for worker in role.workers] == [1, 1, 0, 0]

    def test_of_other_roles_are_not_touched(self) -> None:
        job = workloads()
        before = job.state.roles["critic"]
        assert job.on(gone("n0")).state.roles["critic"] is before

    def test_never_become_fewer_as_their_callers_count_on_them(self) -> None:
        job = workloads(of=3, least={"actor": 2, "critic": 2})
        job.on(gone("n0")).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_PLACEMENT

    def test_are_missed_by_who_calls_them(self) -> None:
        job = workloads().on(gone("n0"))
        assert "affected: trainer:0 waits for actor:0-1" in job.records
        assert "move: actor:0-1 from n0 to n3" in job.records
        assert any("actor's other 2 ranks keep their memory" in each.text for each in job.told(Notice))

    def test_are_said_to_be_missed_as_long_as_they_are(self) -> None:
        job = workloads()
        assert status_of(job.state, {}, {}).waiting == ()
        job.on(gone("n0"))
        (waits,) = status_of(job.state, {}, {}).waiting
        assert waits.startswith("trainer:0 waits for actor:0-1")
        for rank in (0, 1):
            job.on(WorkerServing("actor", rank, 1, {"socket": "a"}, True))
        for rank in (2, 3):
            job.on(WorkerFormed("actor", rank, 0, 1))
        assert job.phases()["actor"] == "running"
        assert status_of(job.state, {}, {}).waiting == ()

    def test_see_the_lost_ones_and_where_the_next_store_is(self) -> None:
        job = workloads()
        views = [view.roles[0] for view in job.on(gone("n0")).orders(View)]
        assert [worker.phase for worker in views[0].workers][:2] == ["lost", "lost"]
        assert (views[-1].endpoint, views[-1].generation) == ("n3:1", 1)

    def test_end_with_a_trainer_that_is_not_recoverable(self) -> None:
        job = workloads()
        home = job.state.roles["trainer"].workers[0].node
        job.on(gone(home)).obey()
        assert job.end is not None
        assert job.end[0] == 137
        assert "trainer:0 is not recoverable" in job.end[1]

    def test_go_on_with_one_that_is(self) -> None:
        job = workloads(recoverable=True)
        home = job.state.roles["trainer"].workers[0].node
        job.on(gone(home))
        assert job.state.roles["trainer"].workers[0].incarnation == 1
        assert job.state.roles["trainer"].workers[0].node != home


class TestANode:
    def test_that_is_held_back_may_join_whenever_it_likes(self) -> None:
        job = scripts(spares=1)
        job.on(job.join("n0"), job.join("n1"))
        assert job.state.phase is JobPhase.RUNNING
        job.on(job.join("n2"))
        assert "n2" in job.state.agents
        assert job.orders(StartRole) == []
        assert len(job.orders(View)) == 3

    def test_that_has_not_joined_gets_nobody(self) -> None:
        job = scripts(spares=1)
        job.on(job.join("n0"), job.join("n1"))
        job.on(gone("n1")).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_PLACEMENT

    def test_that_nobody_uses_is_given_up_and_that_is_all(self) -> None:
        job = scripts(spares=1).running()
        before = job.state.roles
        job.on(gone("n2"))
        assert (job.state.roles, job.state.placement.lost) == (before, ("n2",))
        assert job.state.placement.spares == ()
        assert "the job goes on without it" in job.told(Notice)[0].text

    def test_that_was_given_up_does_not_come_back(self) -> None:
        job = scripts().running().on(gone("n1"))
        assert job.state.given_up("n1")
        with pytest.raises(IllegalTransition, match="has no place in this job"):
            job.on(job.join("n1"))
        before = job.state
        assert job.on(gone("n1")).state == before

    def test_whose_agent_leaves_is_waited_for(self) -> None:
        """Its workers have a moment to end, and must not have successors before."""
        job = scripts().running()
        before = job.state
        job.on(WorkerExited("actor", 2, 0, 5.0, 0, None, "leaving", TERM))
        assert job.state == before
        job.on(gone("n1"))
        assert job.phases() == {"actor": "restarting"}

    def test_that_is_gone_before_the_start_is_planned_around(self) -> None:
        job = scripts()
        job.on(job.join("n0"), gone("n1"))
        assert job.state.phase is JobPhase.LAUNCHING
        assert places(job) == ["n0", "n0", "n2", "n2"]
        job.on(job.join("n2"))
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}
        assert job.state.roles["actor"].restarts == 0

    def test_that_does_not_join_in_time_is_planned_around(self) -> None:
        job = scripts()
        job.on(job.join("n0"), job.join("n2"))
        assert job.state.phase is JobPhase.LAUNCHING
        job.on(JoinTimedOut())
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}
        assert job.state.placement.lost == ("n1",)

    def test_that_does_not_join_in_time_ends_the_job_where_it_is_needed(self) -> None:
        job = scripts(of=2)
        job.on(job.join("n0"), JoinTimedOut())
        assert job.end == (EXIT_RENDEZVOUS, "n1 did not join within 60 s")

    def test_is_one_of_several_that_do_not_find_the_next_master(self) -> None:
        job = scripts(of=4).running()
        take_over(job)
        for node in ("n0", "n3"):
            job.on(job.join(node))
        job.on(RejoinTimedOut())
        assert job.state.placement.lost == ("n1", "n2")
        assert places(job) == ["n0", "n0", "n3", "n3"]
        assert job.state.roles["actor"].restarts == 1

    def test_that_is_lost_while_the_job_stops_is_part_of_that(self) -> None:
        job = scripts().running().on(Stop(TERM, "enough"), gone("n1"))
        job.exits("actor", 0, by=TERM, asked=TERM).exits("actor", 1, by=TERM, asked=TERM)
        assert job.end == (143, "enough")

    def test_is_lost_for_the_next_master_too(self) -> None:
        job = scripts().running().on(gone("n1"))
        found = restore(written(job.state))
        assert found == kept(job.state)
        assert found.placement.lost == ("n1",)
        assert found.inventory.names == ("n0", "n1", "n2")
