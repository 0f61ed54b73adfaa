"""Every pair has its turn, and no host is in two pairs of a round."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from unirun.launcher.doctor.judge import MOST_ROUNDS, pair_rounds


@given(st.integers(0, MOST_ROUNDS))
def test_every_pair_has_one_turn(count: int) -> None:
    met = Counter(frozenset(pair) for pairs in pair_rounds(range(count)) for pair in pairs)
    assert met == Counter(frozenset(pair) for pair in combinations(range(count), 2))


@given(st.integers(0, 200))
def test_in_a_round_no_host_is_in_two_pairs(count: int) -> None:
    for pairs in pair_rounds(range(count)):
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))


@given(st.integers(MOST_ROUNDS + 1, 200))
def test_of_many_hosts_each_meets_as_many_others(count: int) -> None:
    rounds = pair_rounds(range(count))
    assert len(rounds) == MOST_ROUNDS
    met = Counter(host for pairs in rounds for pair in pairs for host in pair)
    assert set(met.values()) <= {MOST_ROUNDS, MOST_ROUNDS - 1}
    assert len(met) == count
