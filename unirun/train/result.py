"""`Result`: the outcome of a run, as ``trainer.result`` has it after `Trainer.run`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from unirun.errors import UsageError
from unirun.train.checkpoints import Info


class Result:
    """The outcome of a run: also of one that has failed, or still goes on."""

    def __init__(
        self,
        path: str,
        metrics: Mapping[str, Any],
        history: Sequence[Mapping[str, float]],
        checkpoints: Sequence[Info],
        best: str | None,
        error: BaseException | None,
    ) -> None:
        self.path = path
        """The directory of the run: what callbacks write, and ``checkpoints``. With a URL as `logdir` a URL."""
        self.metrics = dict(metrics)
        """The last report of rank 0; empty without one."""
        self.history = [dict(each) for each in history]
        """The numbers in each report of rank 0, in order."""
        self.checkpoint = checkpoints[-1].path if checkpoints else None
        """The path or URL of the last checkpoint; None without one."""
        self.best_checkpoint = best
        """The path or URL of the best checkpoint; None without one."""
        self.best_checkpoints = [(each.path, each.score) for each in checkpoints]
        """The paths or URLs of all checkpoints that are kept, in the order in which they were saved, with their
        scores."""
        self.error = error
        """The exception that has ended the run; None without one."""

    @property
    def metrics_dataframe(self) -> Any:
        """`history` as a data frame of pandas. Raises `UsageError` without pandas."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UsageError(f"no data frame: {error}", "run pip install pandas, or use history") from error
        return pandas.DataFrame(self.history)

    def __repr__(self) -> str:
        return f"Result(path={self.path!r}, metrics={self.metrics!r}, checkpoint={self.checkpoint!r})"
