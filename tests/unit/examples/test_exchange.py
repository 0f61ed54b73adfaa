"""The division of the environments of the PPO example among rollouts and among actors."""

from __future__ import annotations

from exchange import overlap, share
from hypothesis import given
from hypothesis import strategies as st

totals = st.integers(0, 60)
counts = st.integers(1, 12)


@given(total=totals, parts=counts)
def test_the_shares_are_the_whole_in_order_and_differ_by_at_most_one(total: int, parts: int) -> None:
    shares = [share(total, parts, index) for index in range(parts)]
    assert [number for part in shares for number in part] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(a=st.tuples(totals, totals), b=st.tuples(totals, totals))
def test_an_overlap_holds_exactly_the_numbers_in_both(a: tuple[int, int], b: tuple[int, int]) -> None:
    first, second = range(*sorted(a)), range(*sorted(b))
    assert set(overlap(first, second)) == set(first) & set(second)


@given(total=totals, rollouts=counts, actors=counts)
def test_every_environment_goes_from_one_rollout_to_one_actor_whatever_their_counts(
    total: int, rollouts: int, actors: int
) -> None:
    sent = [
        env
        for rollout in range(rollouts)
        for actor in range(actors)
        for env in overlap(share(total, rollouts, rollout), share(total, actors, actor))
    ]
    assert sent == list(range(total))
