"""Scripts whose ranks are in a function that survives the loss of a peer: those that live on keep their memory."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import KILL, Job
from unirun.values import WorkerId
from unirun.wire.messages import StartRole, StopWorkers
from unirun.wire.reports import (
    FromWorker,
    GroupFormed,
    OpenStore,
    Resilient,
    StoreEnded,
    StoreOpened,
    WorkerRunning,
)


def script(count: int = 4, restarts: int = 3) -> Job:
    """A role of a script, whose ranks run."""
    return Job({"actor": count}, restarts={"actor": restarts}).running()


def said(job: Job, *ranks: int, inside: bool = True) -> Job:
    """These ranks say that they are inside the function, or have left it."""
    for rank in ranks:
        worker = job.state.roles["actor"].workers[rank]
        job.on(FromWorker(WorkerId("actor", rank, worker.incarnation), Resilient(inside)))
    return job


def restarted(job: Job) -> list[tuple[int, int]]:
    """The ranks and incarnations that the last event has started."""
    return [(each.rank, each.incarnation) for order in job.orders(StartRole) for each in order.members]


class TestADeath:
    def test_a_death_among_ranks_inside_starts_that_rank_again_and_no_other(self) -> None:
        job = said(script(), 0, 1, 2, 3).exits("actor", 2, by=KILL)
        assert restarted(job) == [(2, 1)]
        assert job.orders(StopWorkers) == []
        assert job.phases() == {"actor": "reforming"}
        assert (
            "decision: actor:2 was killed by SIGKILL; restart 1 of 3: actor:2 alone, actor's other 3 ranks keep "
            "their memory and form generation 1"
        ) in job.records

    def test_a_death_while_others_have_yet_to_enter_spares_them(self) -> None:
        assert restarted(said(script(), 0).exits("actor", 2, by=KILL)) == [(2, 1)]

    @pytest.mark.parametrize("left", [False, True])
    def test_a_death_before_the_function_or_after_it_stops_all_ranks(self, left: bool) -> None:
        job = script()
        if left:
            said(job, 0, 1, 2, 3)
            said(job, 0, inside=False)
        job.exits("actor", 2, by=KILL)
        assert sorted(rank for order in job.orders(StopWorkers) for rank in order.ranks) == [0, 1, 3]
        assert job.phases() == {"actor": "restarting"}

    def test_the_only_rank_starts_again(self) -> None:
        assert restarted(said(script(1), 0).exits("actor", 0, by=KILL)) == [(0, 1)]

    def test_a_second_death_is_handled_like_the_first(self) -> None:
        job = said(script(), 0, 1, 2, 3).exits("actor", 2, by=KILL).exits("actor", 3, by=KILL)
        assert restarted(job) == [(3, 1)]
        assert job.state.roles["actor"].restarts == 2

    def test_the_death_of_the_last_one_inside_stops_those_that_have_yet_to_enter(self) -> None:
        job = said(script(2), 0, 1).exits("actor", 1, by=KILL).exits("actor", 0, by=KILL)
        assert [order.ranks for order in job.orders(StopWorkers)] == [(1,)]
        assert job.phases() == {"actor": "restarting"}

    def test_ranks_that_are_told_to_end_do_so_before_the_next_generation_though_a_store_for_one_opens(
        self,
    ) -> None:
        """Rank 1 dies, and rank 0, the last one inside, dies before the store for the next generation is there."""
        job = said(script(3), 0, 1)
        job.stores_open = False
        job.exits("actor", 1, by=KILL).exits("actor", 0, by=KILL)
        assert [order.ranks for order in job.orders(StopWorkers)] == [(2,)]
        orders = job.orders(StopWorkers)
        job.on(StoreOpened("actor", 1))
        assert restarted(job) == []
        job.exits("actor", 2, by=orders[0].signal, asked=orders[0].signal)
        assert [order.generation for order in job.orders(OpenStore)] == [2]
        job.on(StoreOpened("actor", 2))
        assert restarted(job) == [(0, 1), (1, 1), (2, 1)]

    def test_a_rank_that_was_forming_a_generation_which_has_ended_costs_nothing(self) -> None:
        """
        1. Rank 2 dies, and starts again.
        2. Rank 3 dies while 2 has yet to enter the function, so 2 cannot form its group.
        3. Rank 2 ends for that, and starts again at no cost.
        """
        job = said(script(), 0, 1, 2, 3).exits("actor", 2, by=KILL)
        job.on(WorkerRunning(WorkerId("actor", 2, 1), 1))
        job.exits("actor", 3, by=KILL)
        job.exits("actor", 2, 1, incarnation=1)
        assert restarted(job) == [(2, 2)]
        assert job.state.roles["actor"].restarts == 2

    def test_the_role_runs_when_the_survivors_have_formed_the_next_generation(self) -> None:
        job = said(script(), 0, 1, 2, 3).exits("actor", 2, by=KILL)
        job.on(WorkerRunning(WorkerId("actor", 2, 1), 1))
        assert job.phases() == {"actor": "reforming"}
        job.on(*(FromWorker(WorkerId("actor", rank, 0), GroupFormed(1)) for rank in (0, 1, 3)))
        assert job.phases() == {"actor": "running"}


class TestTheEndOfItsStore:
    def test_all_ranks_keep_their_memory_and_meet_in_another_one(self) -> None:
        job = said(script(), 0, 1, 2, 3).on(StoreEnded("actor", 0, 1.0, "killed"))
        assert job.phases() == {"actor": "reforming"}
        assert restarted(job) == []
        assert job.state.roles["actor"].restarts == 0
