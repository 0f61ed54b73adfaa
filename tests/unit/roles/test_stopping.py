"""The agreement of ranks on the step at which they stop."""

from __future__ import annotations

import random

import pytest
from torch._C._distributed_c10d import HashStore

from tests.effort import seeds
from unirun.roles.stopping import AHEAD_SECONDS, Agreement


class Rank:
    """A rank, whose steps take `seconds`."""

    def __init__(self, store: HashStore, seconds: float = 1.0) -> None:
        self.now, self.seconds = 0.0, seconds
        self.agreement = Agreement(store, lambda: self.now)
        self.step = 0
        self.told = self.stopped = False

    def runs(self) -> None:
        """Ask before a step, and run it."""
        self.stopped = self.agreement.reached(self.step, told=self.told)
        if not self.stopped:
            self.step += 1
            self.now += self.seconds


class TestAgreement:
    def test_a_rank_that_is_told_stops_the_others_after_the_furthest_step_that_has_begun(self) -> None:
        store = HashStore()
        first, second = Rank(store), Rank(store)
        for _ in range(3):
            first.runs()
        second.runs()
        second.told = True
        while not (first.stopped and second.stopped):
            second.runs()
            first.runs()
        assert first.step == second.step == 3

    def test_a_rank_that_is_told_before_its_first_step_runs_none(self) -> None:
        store = HashStore()
        first, second = Rank(store), Rank(store)
        first.told = True
        first.runs()
        second.runs()
        assert (first.stopped, first.step, second.stopped, second.step) == (True, 0, True, 0)

    def test_short_steps_seldom_look_at_the_store(self) -> None:
        class Counted(HashStore):
            looks = 0

            def compare_set(self, *args: str) -> bytes:
                self.looks += 1
                return super().compare_set(*args)

        store = Counted()
        rank = Rank(store, 0.001)
        for _ in range(1000):
            rank.runs()
        assert store.looks <= 1000 * 0.001 / AHEAD_SECONDS + 3

    @pytest.mark.parametrize("seed", seeds(50))
    def test_all_ranks_stop_at_one_step_whoever_is_told_and_whenever(self, seed: int) -> None:
        rng = random.Random(seed)
        store = HashStore()
        ranks = [Rank(store, rng.choice((0.001, 0.03, 1.0))) for _ in range(4)]
        told = rng.sample(ranks, rng.randint(1, 4))
        begin = rng.randint(0, 200)
        for turn in range(100_000):
            if turn >= begin:
                for rank in told:
                    rank.told = rank.told or rng.random() < 0.05
            # With collectives, no rank is two steps ahead.
            slowest = min(rank.step for rank in ranks)
            rng.choice([rank for rank in ranks if rank.step == slowest or rng.random() < 0.5]).runs()
            if all(rank.stopped for rank in ranks):
                break
        assert len({rank.step for rank in ranks}) == 1
