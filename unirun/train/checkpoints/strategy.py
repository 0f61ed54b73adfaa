"""The choice of the checkpoints that are kept, and of the best: pure functions of their numbers and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unirun.errors import UsageError
from unirun.values import Value

ORDERS = ("max", "min")


class Info(Value):
    """A checkpoint that is whole: its `number`, its `path` or URL, and its `score`, None without a finite one."""

    number: int
    path: str
    score: float | None = None


class CheckpointStrategy:
    """The checkpoints that a run keeps.

    ::

        CheckpointStrategy(num_to_keep=3, checkpoint_score_attribute="accuracy")

    It keeps the best `num_to_keep` (None: all), and always the latest, from which a run goes on. The score is the
    metric `checkpoint_score_attribute` of rank 0 in the report that follows the checkpoint, or a number of that name in
    its state; without an attribute the latest is the best. `checkpoint_score_order` is ``"max"`` or ``"min"``. One
    whose score is not finite, as that of a run that has diverged, is worse than all others, and is deleted first.
    """

    def __init__(
        self,
        num_to_keep: int | None = None,
        checkpoint_score_attribute: str | None = None,
        checkpoint_score_order: str = "max",
    ) -> None:
        """Raises `UsageError`."""
        whole = isinstance(num_to_keep, int) and not isinstance(num_to_keep, bool)
        if num_to_keep is not None and (not whole or num_to_keep < 1):
            raise UsageError(f"num_to_keep={num_to_keep!r}", "give a number from 1 on, or None for all")
        if checkpoint_score_attribute is not None and not isinstance(checkpoint_score_attribute, str):
            raise UsageError(
                f"checkpoint_score_attribute={checkpoint_score_attribute!r}", "give the name of a metric"
            )
        if checkpoint_score_order not in ORDERS:
            raise UsageError(f"checkpoint_score_order={checkpoint_score_order!r}", "it is 'max' or 'min'")
        self.num_to_keep = num_to_keep
        self.checkpoint_score_attribute = checkpoint_score_attribute
        self.checkpoint_score_order = checkpoint_score_order

    def score(self, *found: Mapping[str, Any]) -> float | None:
        """The score, from the first of these mappings that has it; None when that is not finite. Raises `UsageError`
        when none has it, or when it is no number."""
        name = self.checkpoint_score_attribute
        if name is None:
            return None
        for values in found:
            if name in values:
                try:
                    score = float(values[name])
                except (TypeError, ValueError, OverflowError) as error:
                    raise UsageError(
                        f"the score {name!r} of a checkpoint is {values[name]!r}",
                        "report a number, or choose another checkpoint_score_attribute",
                    ) from error
                return score if math.isfinite(score) else None
        raise UsageError(
            f"neither the report after a checkpoint nor its state has the score {name!r}",
            "report it, or choose another checkpoint_score_attribute",
        )

    def is_scored(self, *found: Mapping[str, Any]) -> bool:
        """Return True if one of these mappings has the score, or none is asked for."""
        name = self.checkpoint_score_attribute
        return name is None or any(name in values for values in found)

    def best(self, infos: Sequence[Info]) -> Info | None:
        """The best of `infos`, which are in ascending order; of equal ones the latest."""
        return max(infos, key=self._rank, default=None)

    def surplus(self, infos: Sequence[Info]) -> list[Info]:
        """Those that are not kept."""
        if self.num_to_keep is None or len(infos) <= self.num_to_keep:
            return []
        ranked = sorted(infos, key=self._rank, reverse=True)
        kept = {info.number for info in ranked[: self.num_to_keep]}
        if infos[-1].number not in kept:
            # The worst of the kept ones makes room for the latest.
            kept = {info.number for info in ranked[: self.num_to_keep - 1]} | {infos[-1].number}
        return [info for info in infos if info.number not in kept]

    def _rank(self, info: Info) -> tuple[float, int]:
        score = info.score if info.score is not None else -math.inf
        return (score if self.checkpoint_score_order == "max" or info.score is None else -score, info.number)
