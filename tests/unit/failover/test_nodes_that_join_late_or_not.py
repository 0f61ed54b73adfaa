"""The nodes that are given up, the times of that, and the nodes that are waited for."""

from __future__ import annotations

import pytest

from tests.unit.failover.context.states import kept
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.multi_node import gone, nodes, places, ranks, scripts
from tests.unit.failover.takeover import join, take_over
from unirun.errors import EXIT_PLACEMENT, EXIT_RENDEZVOUS, Refused
from unirun.failover.context import decode, encode
from unirun.failover.draft import Due
from unirun.failover.state import JobPhase
from unirun.values import WorkerId
from unirun.wire.messages import StartRole, Stop, View
from unirun.wire.reports import FromWorker, Notice, Serving, WorkerExited


class TestANode:
    def test_a_node_that_is_held_back_may_join_whenever_it_likes(self) -> None:
        job = scripts(spares=1)
        job.on(job.join("n0"), job.join("n1"))
        assert job.state.phase is JobPhase.RUNNING
        job.on(job.join("n2"))
        assert "n2" in job.state.agents
        assert job.orders(StartRole) == []
        assert len(job.orders(View)) == 1, "the others know all of it"

    def test_a_node_that_has_not_joined_gets_nobody(self) -> None:
        job = scripts(spares=1)
        job.on(job.join("n0"), job.join("n1"))
        job.on(gone("n1")).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_PLACEMENT

    def test_a_node_that_nobody_uses_is_given_up_and_that_is_all(self) -> None:
        job = scripts(spares=1).running()
        before = job.state.roles
        job.on(gone("n2"))
        assert (job.state.roles, job.state.placement.lost) == (before, ("n2",))
        assert job.state.placement.spares == ()
        assert "the job goes on without it" in job.told(Notice)[0].text

    def test_a_node_that_was_given_up_does_not_come_back(self) -> None:
        job = scripts().running().on(gone("n1"))
        assert job.state.given_up("n1")
        with pytest.raises(Refused, match="has no place in this job"):
            job.on(job.join("n1"))
        before = job.state
        assert job.on(gone("n1")).state == before

    def test_a_node_whose_agent_leaves_is_waited_for(self) -> None:
        """Its workers have a moment to end, and must not have successors before."""
        job = scripts().running()
        before = job.state
        job.on(WorkerExited(WorkerId("actor", 2, 0), 5.0, 0, None, "leaving", TERM))
        assert kept(job.state) == kept(before)
        job.on(gone("n1"))
        assert job.phases() == {"actor": "restarting"}

    def test_a_node_whose_agent_leaves_is_waited_for_whoever_comes_meanwhile(self) -> None:
        job = scripts(spares=1)
        job.on(job.join("n0"), job.join("n1"))
        job.all_run("actor").on(WorkerExited(WorkerId("actor", 2, 0), 5.0, 0, None, "leaving", TERM))
        job.on(job.join("n2"), gone("n1"))
        assert places(job) == ["n0", "n0", "n2", "n2"]
        assert job.phases() == {"actor": "restarting"}

    def test_a_node_that_is_held_back_and_never_comes_is_given_up(self) -> None:
        job = scripts(spares=1)
        job.on(job.join("n0"), job.join("n1"), Due.JOIN)
        assert (job.state.placement.lost, job.state.placement.spares) == (("n2",), ())
        assert "agent_lost: n2: it did not join within 60 s" in job.records

    def test_a_node_that_is_gone_before_the_start_is_planned_around(self) -> None:
        job = scripts()
        job.on(job.join("n0"), gone("n1"))
        assert job.state.phase is JobPhase.LAUNCHING
        assert places(job) == ["n0", "n0", "n2", "n2"]
        job.on(job.join("n2"))
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}
        assert job.state.roles["actor"].restarts == 0

    def test_a_node_that_does_not_join_in_time_is_planned_around(self) -> None:
        job = scripts()
        job.on(job.join("n0"), job.join("n2"))
        assert job.state.phase is JobPhase.LAUNCHING
        job.on(Due.JOIN)
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}
        assert job.state.placement.lost == ("n1",)

    def test_a_node_that_does_not_join_in_time_ends_the_job_where_it_is_needed(self) -> None:
        job = scripts(of=2)
        job.on(job.join("n0"), Due.JOIN)
        assert job.end == (EXIT_RENDEZVOUS, "n1 did not join within 60 s")

    @pytest.mark.parametrize("restarting", ["all have ended", "some are still ending"])
    def test_a_node_ends_the_job_when_ranks_that_had_ended_well_there_are_to_start_again_and_fit_nowhere(
        self, restarting: str
    ) -> None:
        """Their role forms another generation, which needs every rank."""
        job = scripts(of=2, stores_open=False).running().exits("actor", 2).exits("actor", 3)
        job.exits("actor", 0, 1)
        if restarting == "all have ended":
            job.obey()
        assert job.phases() == {"actor": "restarting"}
        job.on(gone("n1")).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_PLACEMENT

    def test_a_node_is_one_of_several_that_do_not_find_the_next_master(self) -> None:
        job = scripts(of=4).running()
        take_over(job)
        for node in ("n0", "n3"):
            job.on(job.join(node))
        job.on(Due.REJOIN)
        assert job.state.placement.lost == ("n1", "n2")
        assert places(job) == ["n0", "n0", "n3", "n3"]
        assert job.state.roles["actor"].restarts == 1

    def test_a_node_is_one_of_many_that_are_given_up_together_at_the_cost_of_one(self) -> None:
        job = Job(
            {"actor": 40},
            restarts={"actor": 1},
            kinds={"actor": "workload"},
            inventory=nodes(40),
        ).running()
        for rank in range(40):
            job.on(FromWorker(WorkerId("actor", rank, 0), Serving({"socket": "a"}, True)))
        before = job.state
        take_over(job)
        for node in before.nodes[20:]:
            job.on(job.join(node))
        join(job, before, "n0")
        job.on(Due.REJOIN)
        assert len(job.state.placement.lost) == 19
        assert job.state.roles["actor"].restarts == 1
        assert {w.node for w in job.state.roles["actor"].workers}.isdisjoint(job.state.placement.lost)

    def test_a_node_that_is_held_back_and_does_not_come_is_given_up_with_all_others(self) -> None:
        job = Job({"actor": 1}, inventory=nodes(13), spares=12)
        for node in job.state.placement.nodes:
            job.on(job.join(node))
        assert job.state.phase is JobPhase.RUNNING
        job.on(Due.JOIN)
        assert len(job.state.placement.lost) == 12

    def test_a_node_that_is_lost_while_the_job_stops_is_part_of_that(self) -> None:
        job = scripts().running().on(Stop(TERM, "enough"), gone("n1"))
        job.exits("actor", 0, by=TERM, asked=TERM).exits("actor", 1, by=TERM, asked=TERM)
        assert job.end == (143, "enough")

    def test_a_node_is_lost_for_the_next_master_too(self) -> None:
        job = scripts().running().on(gone("n1"))
        found = decode(encode(job.state))
        assert found == kept(job.state)
        assert found.placement.lost == ("n1",)
        assert found.inventory.names == ("n0", "n1", "n2")
