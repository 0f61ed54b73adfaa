"""The messages between the master and model workers. They contain no tensors of data or parameters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirun.experiments.data.packing import balanced
from unirun.experiments.data.sample import SequenceSample
from unirun.values import Value

Where = Mapping[str, Sequence[tuple[int, ...]]]
"""For each key and id of a sample the model workers that have the data."""


@dataclass(frozen=True)
class Order:
    """A call for one data-parallel rank. `meta` describes its sequences; `where` says which workers have their data."""

    attempt: int
    step: int
    call: str
    meta: SequenceSample
    where: Where
    seed: int

    def __post_init__(self) -> None:
        """The master has no tensors."""
        assert self.meta.data is None


class Traffic(Value):
    """Bytes that a worker got from others: `moved` were received; `needed` is the size of what it lacked."""

    moved: int = 0
    needed: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.needed + other.needed)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved - other.moved, self.needed - other.needed)


@dataclass(frozen=True)
class Answer:
    """The result of a call: `meta` of new data, which stays on its worker; or the `figures` of a train step. Only ranks
    with `Place.speaks` send them; other ranks send their traffic only."""

    meta: SequenceSample | None
    figures: Mapping[str, float]
    traffic: Traffic

    def __post_init__(self) -> None:
        """The master gets no tensors."""
        assert self.meta is None or self.meta.data is None


class Setup(Value):
    """The answer of a worker at the start: the number of samples of the dataset, and its content (`content_of`)."""

    samples: int
    content: str = ""


def seed_of(base: int, step: int, call: str, rank: int) -> int:
    """The seed of a call in a data-parallel rank. It follows from these alone, so a call that is made again draws the
    same numbers, in whatever process."""
    return zlib.crc32(f"{base} {step} {call} {rank}".encode())


def dispatch(sizes: Sequence[int], ranks: int, *, equal: bool) -> list[list[int]]:
    """The sequences that each data-parallel rank gets: equally many of them, or equally many tokens."""
    return balanced([1] * len(sizes) if equal else sizes, ranks)
