"""What the master tells model workers, and what they answer: no tensors of data or parameters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirun.experiments.data.packing import balanced
from unirun.experiments.data.sample import SequenceSample
from unirun.values import Value

Where = Mapping[str, Sequence[tuple[int, ...]]]
"""For each key and id of a sample the model workers that have the data."""


class Trial(Value):
    """Which trial this is, how its experiment is made, and where its files are. It is the ``config:`` of the job.

    `resume`: it goes on from the last checkpoint, if there is one; otherwise those that are there are removed.
    """

    experiment: str
    trial: str
    root: str
    modules: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    folder: str = ""
    resume: bool = False


@dataclass(frozen=True)
class Order:
    """A call, for one data-parallel rank: with the sequences of `meta`, of which `where` has the data."""

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
    """Bytes that a worker got from others: `moved` have come; `needed` is the size of what it had not."""

    moved: int = 0
    needed: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.needed + other.needed)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved - other.moved, self.needed - other.needed)


@dataclass(frozen=True)
class Answer:
    """What a call has made: `meta` of new data, which is where it was made; or the `figures` of a train step. Neither
    where the rank does not speak."""

    meta: SequenceSample | None
    figures: Mapping[str, float]
    traffic: Traffic

    def __post_init__(self) -> None:
        """The master gets no tensors."""
        assert self.meta is None or self.meta.data is None


class Setup(Value):
    """What the workers of a trial have found out: the samples of the dataset."""

    samples: int


def seed_of(base: int, step: int, call: str, rank: int) -> int:
    """The seed of a call in a data-parallel rank. It follows from these alone, so a call that is made again draws the
    same numbers, in whatever process."""
    return zlib.crc32(f"{base} {step} {call} {rank}".encode())


def dispatch(sizes: Sequence[int], ranks: int, *, equal: bool) -> list[list[int]]:
    """Which data-parallel rank gets which sequences: equally many of them, or equally many tokens."""
    return balanced([1] * len(sizes) if equal else sizes, ranks)
