"""Few of many agents start a candidate, in an order that differs between terms; a live candidate is waited for."""

from __future__ import annotations

import math
from random import Random
from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from unirun.launcher.standby import (
    CANDIDATE_START_TIMEOUT,
    DELAY,
    MAX_DELAY,
    PER_NODE_DELAY,
    TURN_DELAY,
    CandidateAttempts,
    start_at,
    turns,
)

COUNTS = st.integers(1, 60)
EPOCHS = st.integers(0, 1000)


def names(count: int) -> list[str]:
    return [f"node{number}" for number in range(count)]


class TestATurn:
    def test_the_turn_of_the_only_node_comes_at_once(self) -> None:
        assert turns(names(1), 7) == {"node0": 0.0}

    @given(COUNTS, EPOCHS)
    def test_each_node_has_a_turn_and_one_has_it_at_once(self, count: int, epoch: int) -> None:
        nodes = names(count)
        waits = sorted(turns(nodes, epoch).values())
        assert waits[0] == 0.0
        assert waits == [TURN_DELAY * math.log2(place + 1) for place in range(count)]

    def test_the_turns_of_a_thousand_nodes_come_within_a_few_seconds(self) -> None:
        nodes = names(1000)
        assert max(turns(nodes, 1).values()) < 5.0

    def test_the_order_of_turns_differs_between_terms(self) -> None:
        nodes = names(40)
        first = {min(nodes, key=turns(nodes, epoch).__getitem__) for epoch in range(30)}
        assert len(first) > 10, "a node that cannot start a master does not hold up every term"


class TestTheStart:
    @given(st.floats(0, 100), st.floats(0, 5), COUNTS)
    def test_a_first_candidate_starts_in_its_turn(self, vacant: float, wait: float, nodes: int) -> None:
        assert start_at(vacant, wait, CandidateAttempts(), nodes) == vacant + wait

    def test_another_candidate_waits_while_one_comes_up(self) -> None:
        attempts = CandidateAttempts(1, started=10.0, coming_up=True)
        assert start_at(9.0, 0.0, attempts, 1) == 10.0 + CANDIDATE_START_TIMEOUT

    def test_further_candidates_start_with_growing_delays(self) -> None:
        starts = [
            start_at(0.0, 0.0, CandidateAttempts(number, started=10.0), 1) - 10.0 for number in range(1, 6)
        ]
        assert starts == [DELAY, 2 * DELAY, MAX_DELAY, MAX_DELAY, MAX_DELAY]

    def test_candidates_start_for_as_long_as_it_takes(self) -> None:
        assert start_at(0.0, 0.0, CandidateAttempts(5000, started=10.0), 1) == 10.0 + MAX_DELAY

    def test_another_candidate_waits_longer_in_a_job_of_many_nodes(self) -> None:
        assert start_at(0.0, 0.0, CandidateAttempts(9, started=10.0), 1000) == 10.0 + PER_NODE_DELAY * 1000

    def test_a_candidate_long_after_the_last_starts_in_its_turn(self) -> None:
        assert start_at(100.0, 0.5, CandidateAttempts(3, started=10.0), 4) == 100.5


class TestAThousandAgents:
    """All agents see the end of the leader, and the next leader, within some milliseconds."""

    @staticmethod
    def started(rng: Random, epoch: int, alive: float = 1.0) -> tuple[int, float]:
        """The number of candidates, and the seconds until one leads."""
        nodes = names(1000)
        wait = turns(nodes, epoch)
        there = [node for node in nodes if rng.random() < alive]
        starts = sorted(
            start_at(rng.uniform(0, 0.01), wait[node], CandidateAttempts(), len(nodes)) for node in there
        )
        leads = min(at + rng.uniform(0.3, 0.8) for at in starts[:20])
        heard = (leads + rng.uniform(0, 0.01) for _ in starts)
        return sum(at < news for at, news in zip(starts, heard, strict=True)), leads

    def test_a_thousand_agents_start_few_candidates(self) -> None:
        rng = Random(1)
        found = [self.started(rng, epoch) for epoch in range(40)]
        assert mean(count for count, _ in found) <= 3
        assert max(leads for _, leads in found) < 0.9

    def test_a_thousand_agents_of_which_half_are_gone_have_a_master_soon(self) -> None:
        rng = Random(2)
        found = [self.started(rng, epoch, alive=0.5) for epoch in range(40)]
        assert mean(count for count, _ in found) <= 3
        assert max(leads for _, leads in found) < 3.0
