"""The pairs of hosts that are measured at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_ROUNDS = 32
"""Of more hosts, each is measured with so many others."""


def pair_rounds(hosts: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Rounds of pairs. In a round no host is in two pairs, so that pairs do not disturb each other.

    All pairs of up to `MOST_ROUNDS` hosts, by the circle method: the first host stays, the others move on by one place
    in each round.
    """
    places: list[T | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(min(len(places) - 1, MOST_ROUNDS)):
        half = len(places) // 2
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(one, other) for one, other in opposite if one is not None and other is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
