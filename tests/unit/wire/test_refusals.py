"""Refused connections are counted, all of them, and told of, not too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unirun.wire.handshake import BURST, Strangers


@given(st.lists(st.floats(0, 5), max_size=200))
def test_refusals_are_told_of_at_most_as_often_as_the_limit_says(pauses: list[float]) -> None:
    now, told = 0.0, []
    strangers: Strangers[int] = Strangers(
        lambda address: False, lambda text, count: told.append((now, count)), lambda: now
    )
    for number, pause in enumerate(pauses, 1):
        now += pause
        strangers.refused("why")
        assert len(told) <= BURST + now + 1
        assert not told or told[-1][1] <= number
    if len(pauses) <= BURST:
        assert [count for _, count in told] == list(range(1, len(pauses) + 1))


def test_a_refusal_after_a_flood_has_the_number_of_all() -> None:
    now, told = 0.0, []
    strangers: Strangers[int] = Strangers(
        lambda address: False, lambda text, count: told.append((text, count)), lambda: now
    )
    for _ in range(1000):
        strangers.refused("why", "10.0.0.9")
    assert len(told) == BURST
    for number in range(6000):
        now = number / 100
        strangers.refused("why", "10.0.0.9")
    assert len(told) - BURST in (59, 60), "one a second"
    now = 61.5
    strangers.refused("why", "10.0.0.9")
    assert told[-1] == ("a connection from 10.0.0.9 was refused: why", 7001)


def test_a_refusal_without_an_address_tells_of_none() -> None:
    told: list[str] = []
    strangers: Strangers[int] = Strangers(
        lambda address: False, lambda text, count: told.append(text), lambda: 0.0
    )
    strangers.refused("why")
    assert told == ["a connection was refused: why"]
