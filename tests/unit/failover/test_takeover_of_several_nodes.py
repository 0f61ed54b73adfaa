"""A master that comes in another's place waits for all nodes; and what holds wherever the other has died."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.random_walk import RandomWalk
from tests.unit.failover.takeover import TWO, Who, end, join, kinds, starts, take_over
from unirun.errors import EXIT_RENDEZVOUS
from unirun.failover.draft import Due
from unirun.failover.state import JOB_ENDS, ROLE_ENDS, ROLE_WORKS, JobPhase, WorkerPhase
from unirun.wire.messages import StartRole, Stop, StopWorkers, View
from unirun.wire.reports import Join


class TestANodeOfSeveral:
    @pytest.fixture
    def job(self) -> Job:
        return Job({"actor": 4}, nodes=TWO, restarts={"actor": 1}).running()

    def test_one_node_of_several_that_is_back_first_is_told_nothing_until_all_are(self, job: Job) -> None:
        before = job.state
        take_over(job)
        join(job, before, "n0", lost=[("actor", 0, 0)])
        assert kinds(job) == []
        join(job, before, "n1", lost=[("actor", 3, 0)])
        assert kinds(job, "n1") == [View, StartRole]
        assert kinds(job, "n0") == [View, StartRole]
        assert starts(job) == [("actor", 0, [(0, 0)]), ("actor", 0, [(3, 0)])]

    def test_one_node_of_several_may_tell_of_a_failure_before_the_others_are_back(self, job: Job) -> None:
        before = job.state
        take_over(job)
        join(job, before, "n0", ended=[end("actor", 0, 1)])
        assert job.phases() == {"actor": "restarting"}
        join(job, before, "n1")
        assert StopWorkers("actor", (1, 3), TERM, 30.0) in job.orders(StopWorkers)
        for rank in (1, 2, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert [ranks for _, _, ranks in starts(job)] == [[(0, 1), (2, 1)], [(1, 1), (3, 1)]]

    def test_one_node_of_several_that_does_not_come_back_ends_the_job(self, job: Job) -> None:
        before = job.state
        take_over(job)
        join(job, before, "n0")
        job.on(Due.REJOIN)
        assert job.orders(StopWorkers) == [StopWorkers("actor", (0, 2), TERM, 30.0)]
        job.obey()
        assert job.state.phase is JobPhase.FAILED
        assert job.finish is not None
        assert "n1 is gone: it did not join the new master in time" in job.finish.verdict.report

    def test_one_node_of_several_that_does_not_come_back_to_a_job_that_ends_is_part_of_that(
        self, job: Job
    ) -> None:
        before = job.on(Stop(TERM, "enough")).state
        take_over(job)
        join(job, before, "n0")
        job.obey()
        assert job.end is None
        assert job.on(Due.REJOIN).end == (143, "enough")

    def test_one_node_of_several_that_never_had_joined_may_fail_the_launch(self) -> None:
        job = Job({"actor": 2}, nodes=TWO).on(Join("n0", 1, "n0", {"actor": "h:1"}))
        take_over(job)
        job.on(Join("n0", 1, "n0", {"actor": "h:1"}), Due.JOIN)
        assert job.end == (EXIT_RENDEZVOUS, "n1 did not join within 60 s")

    def test_one_node_of_several_is_not_awaited_any_more_when_all_are_back(self, job: Job) -> None:
        before = job.state
        take_over(job)
        for node in TWO:
            join(job, before, node)
        assert job.on(Due.REJOIN).commands == []


@examples(40)
@given(st.integers(0, 2**32), st.integers(3, 80), st.booleans())
def test_wherever_a_master_dies_what_was_decided_stands_and_nothing_is_done_twice(
    seed: int, length: int, some_orders_are_lost: bool
) -> None:
    walk = RandomWalk(seed)
    before = walk.states(length)[-1]
    assume(before.phase not in JOB_ENDS)
    job = walk.job
    live = [(r.name, w.rank, w.incarnation) for r in before.roles.values() for w in r.live]
    fresh = [
        (r.name, w.rank, w.incarnation)
        for r in before.roles.values()
        for w in r.live
        if w.phase is WorkerPhase.STARTING
    ]
    lost = fresh if some_orders_are_lost else []
    take_over(job)
    ordered: list[Who] = []
    for node in sorted(before.agents):
        join(job, before, node, lost=lost)
        ordered += [(o.role, m.rank, m.incarnation) for o in job.orders(StartRole) for m in o.members]
    assert len(set(ordered)) == len(ordered)
    assert not set(ordered) & (set(live) - set(lost)), "one that lives is started again"
    works = {role.name for role in before.roles.values() if role.phase in ROLE_WORKS}
    away = [role.name for role in before.roles.values() if role.generation > role.opened]
    assert {who for who in lost if who[0] in works and who[0] not in away} <= set(ordered), "one is forgotten"
    for role in job.state.roles.values():
        old = before.roles[role.name]
        if old.phase in ROLE_ENDS:
            assert role.phase is old.phase
        if not lost:
            assert (role.generation, role.opened, role.restarts) == (old.generation, old.opened, old.restarts)
            assert [w.exit for w in role.workers] == [w.exit for w in old.workers]
    assert len(job.state.failures) == len(before.failures)
