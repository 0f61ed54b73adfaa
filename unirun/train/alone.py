"""`Alone`: what a training function finds in plain python, where no trainer says when a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unirun.train.checkpoints import encode, is_sharded, plain_state
from unirun.train.data import Shard
from unirun.train.session import Place, Session, check_names
from unirun.wire.reporting import report


class Alone(Session):
    """The session of rank 0 of 1. A function that is called again finds nothing of the call before."""

    def __init__(self) -> None:
        super().__init__(Place())

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Print `metrics`."""
        check_names(metrics)
        report("report: " + ", ".join(f"{name}={value}" for name, value in metrics.items()))

    def save(self, state: Mapping[str, Any]) -> None:
        """Only check that it can be saved: there is no run that would go on from it."""
        whole = plain_state(state)
        if not is_sharded(whole):
            encode(whole)
        super().save(state)

    def begin_seeds(self, reseed: Callable[[int], None]) -> None:
        """The same, from the numbers of the first call on."""
        self._saves = 0
        super().begin_seeds(reseed)

    def shard(self, name: str | None, *, otherwise: Any = None, **options: Any) -> Shard:
        """All of a dataset, from its beginning."""
        self._shards.clear()
        return super().shard(name, otherwise=otherwise, **options)
