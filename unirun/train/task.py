"""`RunTask` and `Attempt`: what the driver sends to the ranks of a `Trainer` with a function. It needs no torch.

`Result` is the outcome of the run, as ``trainer.result`` has it.
"""

from __future__ import annotations

import importlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirun.errors import UsageError
from unirun.train.checkpoints import CheckpointStrategy, Info
from unirun.values import Value

Program = Callable[..., Any]


# The source of a function that is in no file, as in a cell of a notebook: so that tracebacks of workers show it.


def cell_of(function: Program) -> list[str]:
    """The lines of the cell in which a function is defined; none for one in a file, and when they are not known."""
    code = getattr(function, "__code__", None)
    if code is None or Path(code.co_filename).exists():
        return []
    return linecache.getlines(code.co_filename)


def show_cell(function: Program, lines: list[str]) -> None:
    """Have tracebacks of this process show these lines of the cell of a function."""
    if lines:
        file = function.__code__.co_filename
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)


class Attempt(Value):
    """One attempt: a function that all ranks call. Attempts of one trainer have ascending numbers.

    `failed_attempts` counts the attempts that have failed in this `generation` of the process group, so that the group
    has to be formed again after each.
    """

    attempt: int
    generation: int
    failed_attempts: int


class RunTask(Value, gc=True):
    """The function that a run calls, and the lines of its `cell`, as every rank gets them. Checkpoints go to `url`, in
    an attempt from `number` on; `kept` are there already. `resume` is the number of the one there to go on from,
    another folder and a number, or a state."""

    function: Program
    cell: list[str]
    takes_config: bool
    config: Mapping[str, Any]
    datasets: Mapping[str | None, Any]
    url: str
    strategy: CheckpointStrategy
    number: int = 1
    kept: list[Info] = []  # noqa: RUF012 (msgspec gives each value its own)
    resume: int | tuple[str, int] | dict[str, Any] | None = None


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
