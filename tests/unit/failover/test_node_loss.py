"""Ranks of a node that is gone are placed anew, and no other rank is touched without need."""

from __future__ import annotations

import pytest

from tests.unit.failover.context.states import kept
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.multi_node import gone, nodes, places, ranks, scripts, workloads
from tests.unit.failover.takeover import join, take_over
from unirun.collocation import Device, Inventory, Node
from unirun.errors import EXIT_BUDGET, EXIT_PLACEMENT, IllegalTransition, Refused
from unirun.failover.context import decode, encode
from unirun.failover.draft import After, Due
from unirun.failover.nodes import LOSS_DELAY
from unirun.failover.state import JobPhase, RolePhase
from unirun.failover.status_views import status_of
from unirun.failover.step import step
from unirun.values import WorkerId
from unirun.wire.messages import StartRole, StopWorkers, View
from unirun.wire.reports import FromWorker, GroupFormed, Notice, OpenStore, Serving, StoreOpened


class TestNodesThatAreLostWithinAMoment:
    """A rack that loses its power is one loss, however many streams end one after the other."""

    def test_nodes_lost_within_5_ms_are_one_decision_and_one_restart(self) -> None:
        job = scripts(of=4).running()
        job.losses_apart = False
        job.on(gone("n0"), gone("n1"))
        assert job.state.roles["actor"].restarts == 1
        assert job.records.count("decision: ") == 1
        assert job.state.placement.lost == ("n0", "n1")
        assert {failure.node for failure in job.state.failures} == {"n0", "n1"}

    def test_nodes_lost_within_5_ms_are_waited_for_once(self) -> None:
        state, commands = step(scripts(of=4).running().state, gone("n0"), 1.0)
        assert commands == [After(LOSS_DELAY, Due.LOSSES)]
        state, commands = step(state, gone("n1"), 1.0)
        assert commands == []
        assert state.losses.keys() == {"n0", "n1"}

    def test_nodes_lost_within_5_ms_are_not_taken_back_meanwhile(self) -> None:
        job = scripts(of=4).running()
        state, _ = step(job.state, gone("n1"), 1.0)
        with pytest.raises(Refused, match="node n1 joined twice, or has no place in this job"):
            step(state, job.join("n1"), 1.0)

    def test_nodes_lost_within_5_ms_are_missed_by_the_next_master_if_this_one_dies_first(self) -> None:
        job = scripts(of=4).running()
        job.state, _ = step(job.state, gone("n1"), 1.0)
        take_over(job)
        assert (job.state.losses, "n1" in job.state.away) == ({}, True)


class TestARoleOfScripts:
    def test_a_script_role_starts_again_with_the_lost_ranks_on_the_node_that_was_free(self) -> None:
        job = scripts().running().on(gone("n1"))
        assert job.phases() == {"actor": "restarting"}
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0, 1), TERM, 30.0)]
        job.exits("actor", 0, by=TERM, asked=TERM)
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}
        assert [worker.node for worker in job.state.roles["actor"].workers] == ["n0", "n0", "n2", "n2"]
        assert job.all_run("actor").state.roles["actor"].phase is RolePhase.RUNNING

    def test_a_script_role_spends_one_restart_however_many_were_lost(self) -> None:
        job = scripts().running().on(gone("n1"))
        assert job.state.roles["actor"].restarts == 1
        assert {failure.worker.rank for failure in job.state.failures} == {2, 3}
        assert all("restart 1 of 2" in failure.decision for failure in job.state.failures)

    def test_a_script_role_without_restarts_ends_the_job(self) -> None:
        job = scripts(restarts=0).running().on(gone("n1")).obey()
        assert job.end is not None
        code, report = job.end
        assert code == 137
        assert "role actor has no restarts" in report

    def test_a_script_role_ends_it_too_when_they_are_used_up(self) -> None:
        job = scripts(of=4, restarts=1).running().on(gone("n1"))
        for rank in (0, 1):
            job.exits("actor", rank, by=TERM, asked=TERM)
        job.all_run("actor").on(gone("n2")).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_BUDGET

    def test_a_script_role_has_its_store_where_its_rank_0_has_gone(self) -> None:
        job = scripts().running().on(gone("n0"))
        job.exits("actor", 2, by=TERM, asked=TERM).exits("actor", 3, by=TERM, asked=TERM)
        assert job.orders(OpenStore) == [OpenStore("actor", 1)]
        assert job.orders(StartRole)[0].endpoint == "n2:1"

    def test_a_script_role_that_restarts_already_does_so_elsewhere_at_no_further_cost(self) -> None:
        job = scripts().running().exits("actor", 0, 1)
        assert job.phases() == {"actor": "restarting"}
        job.on(gone("n1"))
        assert job.state.roles["actor"].restarts == 1
        job.exits("actor", 1, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}

    def test_a_script_role_gets_its_store_elsewhere_when_the_node_goes_that_was_to_serve_it(self) -> None:
        job = scripts(stores_open=False).running().exits("actor", 2, 1)
        for rank in (0, 1, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert job.orders(OpenStore) == [OpenStore("actor", 1)]
        job.on(gone("n0"))
        assert job.orders(OpenStore) == [OpenStore("actor", 1)], "the same, as nobody has met in it"
        assert job.state.roles["actor"].restarts == 1
        job.on(StoreOpened("actor", 1))
        assert ranks(job) == {"n2": [0, 1], "n1": [2, 3]}

    def test_a_script_role_that_has_ended_is_left_where_it_was(self) -> None:
        job = Job(
            {"actor": 2, "critic": 2},
            restarts={"actor": 1, "critic": 1},
            inventory=nodes(3),
        ).running()
        job.exits("actor", 0).exits("actor", 1).on(gone("n0"))
        assert (job.phases(), places(job)) == ({"actor": "succeeded", "critic": "running"}, ["n0", "n0"])

    def test_a_script_role_may_fit_nowhere_else(self) -> None:
        job = scripts(of=2).running().on(gone("n1")).obey()
        assert job.end is not None
        code, report = job.end
        assert code == EXIT_PLACEMENT
        assert "its ranks fit nowhere else: actor needs room for 4 ranks" in report

    def test_a_script_role_becomes_smaller_where_it_may(self) -> None:
        job = scripts(of=2, least={"actor": 2}).running().on(gone("n0"))
        assert len(job.state.roles["actor"].workers) == 4, "as long as some of them live"
        assert kept(job.state) == decode(encode(job.state))
        for rank in (2, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        (order,) = job.orders(StartRole)
        assert (order.world_size, [m.rank for m in order.members], order.restarts) == (2, [0, 1], 1)
        assert job.all_run("actor").phases() == {"actor": "running"}
        assert kept(job.state) == decode(encode(job.state))

    def test_a_script_role_that_has_become_smaller_takes_late_news_of_who_is_not_needed(self) -> None:
        job = scripts(of=2, least={"actor": 2}).running().on(gone("n0"))
        for rank in (2, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        before = job.state
        assert job.exits("actor", 3, 1, incarnation=0).state == before
        with pytest.raises(IllegalTransition, match="there is no worker actor:4"):
            job.exits("actor", 4, 1, incarnation=0)

    def test_a_script_role_may_lose_a_second_node_while_it_becomes_smaller(self) -> None:
        job = scripts(6, of=3, least={"actor": 2}).running().on(gone("n0"))
        assert (job.phases(), places(job)) == ({"actor": "restarting"}, ["n2", "n2", "n1", "n1"])
        job.on(gone("n1"))
        assert places(job) == ["n2", "n2"]
        assert job.state.roles["actor"].restarts == 1, "nothing had begun since the first"
        for rank in (4, 5):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert ranks(job) == {"n2": [0, 1]}

    def test_a_script_role_goes_on_when_those_who_were_there_had_done_their_work(self) -> None:
        job = scripts(of=2).running().exits("actor", 2).exits("actor", 3).on(gone("n1"))
        assert job.phases() == {"actor": "running"}
        assert job.state.roles["actor"].restarts == 0
        assert job.exits("actor", 0).exits("actor", 1).end == (0, "actor succeeded")

    def test_a_script_role_needs_them_once_more_when_it_has_to_start_again(self) -> None:
        job = scripts(of=2).running().exits("actor", 2).exits("actor", 3).on(gone("n1"))
        job.exits("actor", 0, 1).exits("actor", 1, by=TERM, asked=TERM)
        assert job.end is not None
        assert job.end[0] == EXIT_PLACEMENT
        assert "the node of actor:2-3 is gone, and they fit nowhere else" in job.end[1]

    def test_a_script_role_that_cannot_start_again_without_them_takes_the_others_with_it(self) -> None:
        job = Job({"actor": 4, "critic": 1}, restarts={"actor": 2}, inventory=nodes(2, 3)).running()
        assert (places(job), places(job, "critic")) == (["n0", "n0", "n0", "n1"], ["n1"])
        job.exits("actor", 0).exits("actor", 1).exits("actor", 2).on(gone("n0"))
        job.exits("actor", 3, by=TERM, asked=TERM)
        assert job.orders(StopWorkers) == [StopWorkers("critic", (0,), TERM, 30.0)]
        assert job.obey().end == (
            EXIT_PLACEMENT,
            "role actor cannot start again: the node of actor:0-2 is gone, and they fit nowhere else",
        )
        assert job.phases() == {"actor": "stopped", "critic": "stopped"}

    def test_a_script_role_places_them_anew_where_that_costs_nobody_anything(self) -> None:
        job = scripts(of=3).running().exits("actor", 2).exits("actor", 3).on(gone("n1"))
        assert places(job) == ["n0", "n0", "n2", "n2"]
        assert job.phases() == {"actor": "running"}
        job.exits("actor", 0, 1).exits("actor", 1, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}

    def test_a_script_role_never_gets_back_ranks_that_it_has_lost(self) -> None:
        """Those that are left have their work by now, though there would be room on a node that has come late."""
        devices = tuple(Device(str(number), "") for number in range(4))
        inventory = Inventory(tuple(Node(f"n{n}", (0,), devices[: 2 + 2 * (n == 2)]) for n in range(3)))
        job = Job({"actor": 4}, restarts={"actor": 3}, inventory=inventory, least={"actor": 2}, spares=1)
        job.on(job.join("n0"), job.join("n1")).all_run("actor")
        job.on(gone("n1")).obey().all_run("actor")
        assert places(job) == ["n0", "n0"]
        job.on(job.join("n2"), gone("n0"))
        assert places(job) == ["n2", "n2"]
        assert ranks(job) == {"n2": [0, 1]}

    def test_a_script_role_leaves_those_where_they_were_whose_role_has_ended(self) -> None:
        job = Job({"actor": 2, "critic": 2}, restarts={"critic": 1}, inventory=nodes(3)).running()
        there = places(job)
        job.exits("actor", 0).exits("actor", 1).on(gone(places(job, "critic")[0]))
        assert (places(job), places(job, "critic")) == (there, there), "their slots are free"
        assert job.phases() == {"actor": "succeeded", "critic": "starting"}

    def test_a_script_role_may_have_the_slots_of_a_role_that_has_ended(self) -> None:
        job = Job({"actor": 2, "critic": 2}, restarts={"critic": 1}, inventory=nodes(2)).running()
        there = places(job)
        assert set(there).isdisjoint(places(job, "critic"))
        job.exits("actor", 0).exits("actor", 1).on(gone(places(job, "critic")[0]))
        assert (places(job), places(job, "critic")) == (there, there)
        assert job.phases() == {"actor": "succeeded", "critic": "starting"}

    @pytest.mark.parametrize("workload", [False, True])
    def test_a_script_role_starts_again_when_its_store_is_gone_unless_its_workers_can_go_on_without_one(
        self, workload: bool
    ) -> None:
        """Rank 0 had done its work, and nobody else of the role was on its node."""
        job = Job(
            {"actor": 4},
            restarts={"actor": 2},
            inventory=nodes(3),
            kinds={"actor": "workload"} if workload else None,
        ).running()
        for rank in range(4) if workload else ():
            job.on(FromWorker(WorkerId("actor", rank, 0), Serving({"socket": "a"}, True)))
        job.exits("actor", 0).exits("actor", 1).on(gone("n0"))
        role = job.state.roles["actor"]
        assert (role.phase, role.restarts) == (("running", 0) if workload else ("restarting", 1))
        assert [order.ranks for order in job.orders(StopWorkers)] == ([] if workload else [(2, 3)])

    def test_a_script_role_goes_on_when_who_had_done_its_work_was_not_where_its_store_is(self) -> None:
        job = scripts().running().exits("actor", 2).exits("actor", 3).on(gone("n1"))
        assert (job.phases(), job.state.roles["actor"].restarts) == ({"actor": "running"}, 0)


class TestMakingRoom:
    def job(self, restarts: int = 2) -> Job:
        """Scripts that may become fewer have all of n0, and workloads n1."""
        devices = tuple(Device(str(number), "") for number in range(4))
        inventory = Inventory((Node("n0", (0,), devices), Node("n1", (0,), devices[:2])))
        job = Job(
            {"actor": 4, "critic": 2},
            restarts={"actor": restarts, "critic": 2},
            kinds={"critic": "workload"},
            primary=("actor",),
            inventory=inventory,
            least={"actor": 2},
        ).running()
        for rank in (0, 1):
            job.on(FromWorker(WorkerId("critic", rank, 0), Serving({"socket": "a"}, True)))
        return job

    def test_making_room_ends_those_who_are_in_the_way_before_others_begin(self) -> None:
        job = self.job()
        assert (places(job), places(job, "critic")) == (["n0"] * 4, ["n1"] * 2)
        job.on(gone("n1"))
        assert (places(job), places(job, "critic")) == (["n0"] * 2, ["n0"] * 2)
        assert job.phases() == {"actor": "restarting", "critic": "reforming"}
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0, 1, 2, 3), TERM, 30.0)]
        assert ranks(job) == {}, "their devices are in use"
        for rank in range(3):
            assert "critic" not in {
                o.role for o in job.exits("actor", rank, by=TERM, asked=TERM).orders(StartRole)
            }
        job.exits("actor", 3, by=TERM, asked=TERM)
        assert sorted((o.role, o.world_size) for o in job.orders(StartRole)) == [("actor", 2), ("critic", 2)]

    def test_making_room_is_told_in_words_of_its_own(self) -> None:
        told = [notice.text for notice in self.job().on(gone("n1")).told(Notice)]
        assert any(
            text.endswith("actor has room for 2 of 4 ranks; restart 1 of 2 of role actor") for text in told
        )
        assert any("restart 1 of 2: critic:0-1 elsewhere" in text for text in told)

    def test_making_room_spends_a_restart_of_who_makes_it(self) -> None:
        job = self.job().on(gone("n1"))
        assert {name: role.restarts for name, role in job.state.roles.items()} == {"actor": 1, "critic": 1}

    def test_making_room_ends_the_job_when_who_has_to_make_it_may_not_start_again(self) -> None:
        job = self.job(restarts=0).on(gone("n1"))
        assert (job.phases()["actor"], job.orders(StartRole)) == ("stopping", [])
        end = job.obey().end
        assert end is not None
        assert end[0] == 137
        assert "actor has room for 2 of 4 ranks; role actor has no restarts" in end[1]

    def test_making_room_ends_it_with_its_own_code_when_the_restarts_are_used_up(self) -> None:
        job = self.job(restarts=1).exits("actor", 0, 1)
        job.obey().all_run("actor").on(gone("n1"))
        end = job.obey().end
        assert end is not None
        assert end[0] == EXIT_BUDGET


class TestWorkloads:
    def test_workloads_that_live_on_form_the_next_generation_with_those_that_come(self) -> None:
        job = workloads()
        assert places(job) == ["n0", "n0", "n1", "n1"]
        job.on(gone("n0"))
        role = job.state.roles["actor"]
        assert (role.phase, role.generation) == (RolePhase.REFORMING, 1)
        assert job.orders(StopWorkers) == []
        assert ranks(job) == {"n3": [0, 1]}
        assert [worker.incarnation for worker in role.workers] == [1, 1, 0, 0]

    def test_workloads_of_other_roles_are_not_touched(self) -> None:
        job = workloads()
        before = job.state.roles["critic"]
        assert job.on(gone("n0")).state.roles["critic"] is before

    def test_workloads_never_become_fewer_as_their_callers_count_on_them(self) -> None:
        job = workloads(of=3, least={"actor": 2, "critic": 2})
        job.on(gone("n0")).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_PLACEMENT

    def test_workloads_are_missed_by_who_calls_them(self) -> None:
        job = workloads().on(gone("n0"))
        assert "affected: trainer:0 waits for actor:0-1" in job.records
        assert "move: actor:0-1 from n0 to n3" in job.records
        decided, moved = job.told(Notice)
        assert (decided.source, moved.source) == ("n0", "placement")
        assert "actor's other 2 ranks keep their memory" in decided.text
        assert moved.text == "actor:0-1 from n0 to n3"

    def test_workloads_are_said_to_be_missed_as_long_as_they_are(self) -> None:
        job = workloads()
        assert status_of(job.state, {}, {}).waiting == ()
        job.on(gone("n0"))
        (waits,) = status_of(job.state, {}, {}).waiting
        assert waits.startswith("trainer:0 waits for actor:0-1")
        for rank in (0, 1):
            job.on(FromWorker(WorkerId("actor", rank, 1), Serving({"socket": "a"}, True)))
        for rank in (2, 3):
            job.on(FromWorker(WorkerId("actor", rank, 0), GroupFormed(1)))
        assert job.phases()["actor"] == "running"
        assert status_of(job.state, {}, {}).waiting == ()

    def test_workloads_see_the_lost_ones_and_where_the_next_store_is(self) -> None:
        job = workloads()
        views = [view.roles[0] for view in job.on(gone("n0")).orders(View)]
        assert [worker.phase for worker in views[0].workers][:2] == ["lost", "lost"]
        assert (views[-1].endpoint, views[-1].generation) == ("n3:1", 1)

    def test_workloads_end_with_a_trainer_that_is_not_recoverable(self) -> None:
        job = workloads()
        home = job.state.roles["trainer"].workers[0].node
        job.on(gone(home)).obey()
        assert job.end is not None
        assert job.end[0] == 137
        assert "trainer:0 is not recoverable" in job.end[1]

    def test_workloads_go_on_with_one_that_is(self) -> None:
        job = workloads(recoverable=True)
        home = job.state.roles["trainer"].workers[0].node
        job.on(gone(home))
        assert job.state.roles["trainer"].workers[0].incarnation == 1
        assert job.state.roles["trainer"].workers[0].node != home

    def test_workloads_go_on_with_one_that_is_also_when_the_master_was_on_its_node(self) -> None:
        job = workloads(recoverable=True)
        home = job.state.roles["trainer"].workers[0].node
        before = job.state
        take_over(job)
        for node in set(before.nodes) - {home}:
            join(job, before, node)
        job.on(Due.REJOIN)
        assert job.state.phase is JobPhase.RUNNING
        assert job.state.roles["trainer"].workers[0].incarnation == 1

    @pytest.mark.parametrize("said", [(True, True), (True, False), (False, True), (True, None), (None, True)])
    def test_workloads_go_on_when_all_lost_ranks_of_their_trainer_have_said_that_they_are_recoverable(
        self, said: tuple[bool | None, ...]
    ) -> None:
        job = Job(
            {"trainer": 2}, restarts={"trainer": 1}, kinds={"trainer": "trainer"}, inventory=nodes(2)
        ).running()
        for rank, recoverable in enumerate(said):
            if recoverable is not None:
                job.on(FromWorker(WorkerId("trainer", rank, 0), Serving({"socket": "a"}, recoverable)))
        job.on(gone("n0"))
        assert (job.state.phase is JobPhase.RUNNING) is all(said)
        if not all(said):
            assert job.end is not None
            words = "is not recoverable" if False in said else "had not told yet whether it is recoverable"
            assert f"trainer:0-1 {words}" in job.end[1]
