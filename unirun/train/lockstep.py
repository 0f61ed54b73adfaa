"""What follows from what the ranks of a run say: reports are matched by their numbers. Pure values and functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirun.errors import TrainingFailed
from unirun.graph import show_ranks
from unirun.values import Value


class Reported(Value):
    """The report of a rank with this `number`, from 1 on. `pending` is the checkpoint that counts when it does."""

    number: int
    metrics: Mapping[str, Any]
    pending: int | None = None


class Finished(Value):
    """The function has returned in a rank, after `count` reports. `pending` is as in `Reported`."""

    count: int
    pending: int | None = None


class Round(Value):
    """What all ranks have said: their metrics in rank order, or None when all have finished; and the checkpoint that is
    to be committed first."""

    results: tuple[Mapping[str, Any], ...] | None
    pending: int | None


class Lockstep:
    """Collects what `world` ranks say, one round after the other."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._said: dict[int, Reported | Finished] = {}

    def hear(self, rank: int, said: Reported | Finished) -> Round | None:
        """Take the next word of a rank. Returns the round when it is complete.

        Raises `TrainingFailed` when some ranks have finished and others report once more.
        """
        self._said[rank] = said
        finished = {rank: each.count for rank, each in self._said.items() if isinstance(each, Finished)}
        reported = {rank: each.number for rank, each in self._said.items() if isinstance(each, Reported)}
        if finished and reported:
            raise TrainingFailed(
                f"the ranks have reported unequally often: rank{'s' * (len(finished) > 1)} "
                f"{show_ranks(sorted(finished))} {next(iter(finished.values()))} times, "
                f"rank{'s' * (len(reported) > 1)} {show_ranks(sorted(reported))} at least "
                f"{next(iter(reported.values()))} times",
                "every rank calls report equally often",
            )
        if len(self._said) < self._world:
            return None
        said_by, self._said = self._said, {}
        pending = said_by[0].pending
        if finished:
            return Round(None, pending)
        return Round(tuple(said_by[rank].metrics for rank in range(self._world)), pending)  # type: ignore[union-attr]
