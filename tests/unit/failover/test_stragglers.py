"""The rank for which the others wait in collectives is found, and noise is not."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.multi_node import gone, nodes
from tests.unit.failover.takeover import starts
from tests.unit.failover.workloads import serving
from unirun.failover.draft import Straggles
from unirun.failover.hangs import WINDOWS, Lateness, Windows, late_ranks
from unirun.failover.state import RolePhase
from unirun.values import WorkerId
from unirun.wire.messages import StartRole, StopWorkers

Arrivals = dict[WorkerId, dict[int, float]]


def run(
    rng: random.Random,
    *,
    ranks: int = 8,
    steps: int = 60,
    per_step: int = 1,
    noise: float = 0.1,
    slow: Mapping[int, float] | None = None,
    pauses: Mapping[int, float] | None = None,
) -> Arrivals:
    """The arrivals of ranks whose steps take 50 ms, with `noise`, in so many collectives after each. Those of `slow`
    ranks take longer by a factor, and a rank has one of the `pauses`, in seconds."""
    clock, number = 1000.0, 0
    found: Arrivals = {WorkerId("actor", rank, 0): {} for rank in range(ranks)}
    at = {rank: rng.randrange(steps) for rank in pauses or {}}
    for step in range(steps):
        for part in range(per_step):
            begun = []
            for rank in range(ranks):
                work = (
                    0.05 * (slow or {}).get(rank, 1.0) * max(rng.gauss(1.0, noise), 0.2) if not part else 0.0
                )
                work += (pauses or {}).get(rank, 0.0) if at.get(rank) == step and not part else 0.0
                begun.append(clock + work)
                found[WorkerId("actor", rank, 0)][number] = begun[-1]
            number += 1
            clock = max(begun) + 0.001
    return found


seeds = st.integers(0, 10**6).map(random.Random)


@given(seeds, st.integers(4, 32), st.integers(1, 8), st.floats(0.0, 0.3))
@examples(100)
def test_noise_is_no_straggler(rng: random.Random, ranks: int, per_step: int, noise: float) -> None:
    windows = Windows()
    for _ in range(2 * WINDOWS):
        arrivals = run(rng, ranks=ranks, per_step=per_step, noise=noise)
        windows = windows.after([*arrivals], late_ranks(arrivals))
    assert windows.stragglers == ()


@given(seeds, st.integers(1, 6), st.floats(0.0, 0.15), st.floats(1.5, 3.0), st.integers(0, 7))
@examples(100)
def test_a_slow_rank_among_eight_is_found_and_no_other(
    rng: random.Random, per_step: int, noise: float, factor: float, rank: int
) -> None:
    arrivals = run(rng, per_step=per_step, noise=noise, slow={rank: factor})
    assert [who.rank for who in late_ranks(arrivals)] == [rank]


@given(seeds, st.integers(1, 4))
@examples(50)
def test_a_pause_of_every_rank_is_none(rng: random.Random, per_step: int) -> None:
    """A garbage collection of 1 s each, and a save of 20 s of one."""
    pauses = dict.fromkeys(range(8), 1.0) | {3: 20.0}
    assert late_ranks(run(rng, per_step=per_step, pauses=pauses)) == {}


def test_several_are_found_while_most_are_well() -> None:
    late = late_ranks(run(random.Random(1), slow={1: 2.0, 5: 2.0}))
    assert [who.rank for who in late] == [1, 5]
    assert all(0.3 < each.share < 0.7 for each in late.values())


def test_little_is_not_judged() -> None:
    rng = random.Random(1)
    assert late_ranks({}) == {}
    assert late_ranks(run(rng, ranks=2, slow={1: 3.0})) == {}
    assert late_ranks(run(rng, steps=7, slow={1: 3.0})) == {}
    apart = run(rng, slow={1: 3.0})
    apart[WorkerId("actor", 0, 0)] = {
        number + 1000: at for number, at in apart[WorkerId("actor", 0, 0)].items()
    }
    assert late_ranks(apart) == {}
    # Clocks that are not the same, where collectives are short.
    quick = {
        WorkerId("a", rank, 0): {n: n * 0.001 + 0.004 * (rank == 1) for n in range(60)} for rank in range(8)
    }
    assert late_ranks(quick) == {}


def test_one_has_to_be_late_in_windows_that_follow_each_other_and_is_told_once() -> None:
    who, late = WorkerId("actor", 1, 0), Lateness(0.3, 9.0)
    windows = Windows()
    told: list[WorkerId] = []
    for found in ({who: late}, {}, *[{who: late}] * (WINDOWS + 1)):
        windows = windows.after([who], found)
        told += windows.told()
    assert told == [who]
    assert windows.stragglers == (who,)
    # Of those that cannot be judged in a window nothing changes.
    assert windows.after([], {}).stragglers == (who,)
    assert windows.after([who], {}).stragglers == ()


class TestTheMove:
    def test_it_goes_to_another_node_and_costs_no_restart(self) -> None:
        job = Job({"actor": 2}, inventory=nodes(2, 2)).running()
        (node,) = {worker.node for worker in job.state.roles["actor"].workers if worker.rank == 1}
        job.on(Straggles(WorkerId("actor", 1, 0), "actor:1 is slow"))
        assert "decision: actor:1 is slow; role actor starts again, with actor:1 elsewhere" in job.records
        assert {order.role for order in job.orders(StopWorkers)} == {"actor"}
        assert job.state.roles["actor"].restarts == 0
        assert job.state.placement.of_role("actor")[1].node != node

    def test_a_workload_goes_alone(self) -> None:
        job = serving(count=2, inventory=nodes(3, 2))
        before = job.state.roles["actor"].workers
        job.on(Straggles(WorkerId("actor", 1, 0), "actor:1 is slow"))
        assert (
            "actor:1 is slow; actor:1 moves, actor's other rank keeps its memory and forms generation 1"
            in job.records
        )
        assert [(order.role, order.ranks) for order in job.orders(StopWorkers)] == [("actor", (1,))]
        job.obey()
        after = job.state.roles["actor"].workers
        assert after[0].pid == before[0].pid
        assert (after[1].node != before[1].node, after[1].incarnation) == (True, 1)

    def test_a_workload_that_was_told_to_end_does_so_though_its_rank_comes_back(self) -> None:
        """The node to which it was to go is lost while it ends. Its successor starts when its slot is free."""
        job = serving(count=2, inventory=nodes(3, 2))
        (first, second) = job.state.roles["actor"].workers
        job.on(Straggles(WorkerId("actor", 1, 0), "actor:1 is slow"))
        job.on(gone(job.state.placement.of_role("actor")[1].node))
        assert [place.node for place in job.state.placement.of_role("actor")] == [first.node, second.node]
        assert not job.orders(StartRole)
        assert starts(job.exits("actor", 1, by=TERM, asked=TERM)) == [("actor", 1, [(1, 1)])]
        assert job.state.roles["actor"].restarts == 0

    def test_it_waits_for_the_slot_of_another_that_still_ends(self) -> None:
        job = Job({"actor": 1, "critic": 1}, inventory=nodes(3, 1)).running()
        before = job.state.roles["actor"].workers[0].node
        job.on(Straggles(WorkerId("actor", 0, 0), "actor:0 is slow"))
        job.on(Straggles(WorkerId("critic", 0, 0), "critic:0 is slow"))
        assert job.state.placement.of_role("critic")[0].node == before
        assert starts(job.exits("critic", 0, by=TERM, asked=TERM)) == []
        job.exits("actor", 0, by=TERM, asked=TERM)
        assert sorted(starts(job)) == [("actor", 1, [(0, 1)]), ("critic", 1, [(0, 1)])]

    def test_without_room_it_stays(self) -> None:
        job = Job({"actor": 2}).running().on(Straggles(WorkerId("actor", 1, 0), "actor:1 is slow"))
        assert "actor:1 is slow; no other node has room for it" in job.records
        assert job.state.roles["actor"].phase is RolePhase.RUNNING
        assert not job.orders(StopWorkers)

    def test_one_that_has_ended_changes_nothing(self) -> None:
        job = Job({"actor": 2}).running().exits("actor", 1)
        before = job.state
        assert job.on(Straggles(WorkerId("actor", 1, 0), "actor:1 is slow")).state == before
