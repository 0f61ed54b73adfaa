"""The state of a run that follows from the messages of all its ranks: reports are matched by their numbers.

Pure values and functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from unirun.errors import TrainingFailed
from unirun.values import Value, show_ranks


class Reported(Value, gc=True):
    """The report of a rank with this `number`, from 1 on. `pending` is the checkpoint that counts when it does. The one
    after the last has `ended`: the function has returned.

    `saves` is the number of checkpoints that the rank has saved in this attempt before it. `together`: the last of them
    needs all ranks, as it has files, or the positions of datasets. `sharded`: each rank has written a part. `outline`
    is the outline of the first one (`checkpoints.state.outline`), sent with the report that follows it.
    """

    number: int
    metrics: Mapping[str, Any] = {}
    pending: int | None = None
    ended: bool = False
    saves: int = 0
    together: bool = False
    sharded: bool = False
    outline: Mapping[str, int] = {}


Round = tuple[tuple[Mapping[str, Any], ...] | None, int | None]
"""The metrics of all ranks in rank order, None when all have finished; the checkpoint that is to be committed first."""


class Lockstep:
    """Collects what `world` ranks say, one round after the other."""

    def __init__(self, world: int) -> None:
        self._world = world
        self.dropped = ""
        """In words, the values of other ranks than 0 that checkpoints until the last round do not have."""
        self._said: dict[int, Reported] = {}
        self._lags: dict[int, int] = {}
        self._outlines: dict[int, Mapping[str, int]] = {}

    def hear(self, rank: int, report: Reported) -> Round | None:
        """Take the next message of a rank. Returns the round when it is complete.

        Raises `TrainingFailed` when some ranks have finished and others report once more, and when a checkpoint would
        not be kept, as ranks have saved unequally often: at the end, and before that if the rank that lags has not
        saved from one round to the next. Ranks that save by the clock do so on both sides of a report.
        """
        self._said[rank] = report
        finished = {rank: each.number - 1 for rank, each in self._said.items() if each.ended}
        reported = {rank: each.number for rank, each in self._said.items() if not each.ended}
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
        said = [self._with_outline(rank, said_by[rank]) for rank in range(self._world)]
        lags = _lags(said)
        wrong = lags if finished else {rank: lags[rank] for rank, _ in lags.items() & self._lags.items()}
        self._lags = lags
        if wrong:
            raise _unequal(said, sorted(wrong))
        if not lags and (apart := _apart(said)):
            raise TrainingFailed(
                f"rank{'s' * (len(apart) > 1)} {show_ranks(apart)} and rank 0 have not saved alike: with a dataset or "
                "with files=, and without",
                "every rank passes files= to save_checkpoint, [] where it has none, and reads the datasets",
            )
        self.dropped = dropped(said)
        return None if finished else tuple(each.metrics for each in said), said[0].pending

    def _with_outline(self, rank: int, said: Reported) -> Reported:
        """`said` with the outline that the rank has reported, now or before; outlines of other ranks may
        come later."""
        if said.outline:
            self._outlines[rank] = said.outline
        return replace(said, outline=self._outlines.get(rank, {}))


def _lags(said: Sequence[Reported]) -> dict[int, int]:
    """The ranks that have saved more or less often than rank 0, each with the smaller one of the two numbers.
    A checkpoint counts if rank 0 saves it; without datasets rank 0 may save alone.
    """
    own = said[0]
    return {
        rank: min(each.saves, own.saves)
        for rank, each in enumerate(said)
        if each.saves > own.saves or (own.together and each.saves < own.saves)
    }


def _apart(said: Sequence[Reported]) -> list[int]:
    """The ranks whose last checkpoint needs all ranks, and that of rank 0 does not, or the other way round."""
    own = said[0]
    return [
        rank for rank, each in enumerate(said) if each.saves == own.saves and each.together != own.together
    ]


def _unequal(said: Sequence[Reported], wrong: Sequence[int]) -> TrainingFailed:
    """The error of the ranks `wrong`, which have not saved as often as rank 0."""
    count = said[wrong[0]].saves
    ranks = [rank for rank in wrong if said[rank].saves == count]
    return TrainingFailed(
        f"the ranks have saved unequally often: rank 0 {_checkpoints(said[0].saves)}, rank{'s' * (len(ranks) > 1)} "
        f"{show_ranks(ranks)} {_checkpoints(count)}",
        "every rank calls save_checkpoint, equally often: without rank 0 none is kept",
    )


def _checkpoints(count: int) -> str:
    return f"{count or 'no'} checkpoint{'s' * (count != 1)}"


def dropped(said: Sequence[Reported]) -> str:
    """Values that ranks have saved and the checkpoint does not have, in words; empty if there are none."""
    own = said[0]
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(said):
        for name, mark in each.outline.items():
            # A name that only other ranks have is kept in a sharded checkpoint.
            if mark != own.outline.get(name, mark if own.sharded else None):
                found.setdefault(name, []).append(rank)
    if not own.outline or not found:
        return ""
    names = ", ".join(f"{name!r} of rank{'s' * (len(r) > 1)} {show_ranks(r)}" for name, r in found.items())
    kept = "one rank, as it is no part of a DTensor" if own.sharded else "rank 0, as none of it is a DTensor"
    return f"{names} differs from the value of rank 0: the checkpoint has that of {kept}"
