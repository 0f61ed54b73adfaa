"""The failures that a run survives: fewer than its budget, and none that comes again and again without progress."""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import TrainingFailed, UnirunError, UsageError, WorkerLost
from unirun.train.callbacks import Callbacks
from unirun.train.checkpoints import CheckpointStrategy, Info
from unirun.train.losses import LIMIT
from unirun.train.running import TrainingIterator
from unirun.train.task import RunTask

WORLD = 4


class Failure(NamedTuple):
    """The end of an attempt: a rank is lost, `outside` of its process or by itself, or an exception is raised that counts as
    a loss. `progress` since the failure before: a report, a checkpoint that one has mentioned, or one that none has."""

    loss: bool
    outside: bool
    rank: int
    code: int
    progress: str
    resized: bool

    @property
    def what(self) -> str:
        if not self.loss:
            return f"wrong {self.code}" if self.outside else f"ValueError({self.code})"
        return (
            f"w:{self.rank} was lost" if self.outside else f"w:{self.rank} ended with exit code {self.code}"
        )

    def error(self) -> Exception:
        if self.loss:
            return WorkerLost(self.what, worker=f"w:{self.rank}")
        return UsageError(self.what, "mend it") if self.outside else ValueError(self.code)

    @property
    def kind(self) -> str:
        """Equal for failures with one cause: the same code in another rank has the same one."""
        inside = self.loss and not self.outside
        return f"exit code {self.code}" if inside else self.what


failures = st.builds(
    Failure,
    loss=st.booleans(),
    outside=st.booleans(),
    rank=st.integers(0, 1),
    code=st.integers(1, 2),
    progress=st.sampled_from(["", "", "", "", "report", "checkpoint", "silent checkpoint", "unknown"]),
    resized=st.sampled_from([False, False, False, True]),
)
rows = st.lists(st.tuples(failures, st.integers(0, LIMIT)), max_size=5).map(
    lambda found: [each for one, more in found for each in (one, *[one._replace(progress="")] * more)]
)
"""Failures of which some come again, without progress between them."""


class Workers:
    """The workers of a run, of which rank 0 is asked for checkpoints."""

    name = "w"

    def __init__(self) -> None:
        self.workers, self.world_size = self, WORLD
        self.saved: list[Info] = []
        self.answers = True

    def wait_until_whole(self, timeout: float) -> None: ...

    def loss(self, error: WorkerLost) -> str:
        return error.problem

    def ready(self) -> Any:
        if not self.answers:
            raise UnirunError("it cannot be learned")
        return Group([self])

    def clear(self, url: str) -> None: ...

    def checkpoints(self, url: str, below: int | None) -> tuple[list[Info], int]:
        return self.saved, len(self.saved) + 1


class Group(list[Workers]):
    def verify(self, url: str, number: int) -> None: ...


def run(workers: Workers, most: int, *, elastic: bool) -> TrainingIterator:
    attempts: Any = workers

    def function() -> None: ...

    return TrainingIterator(
        attempts,
        RunTask(function, [], False, {}, {}, "", CheckpointStrategy()),
        Callbacks(()),
        lambda data: data,
        checkpoint=None,
        logdir="",
        max_failures=most,
        retry=(ValueError,),
        elastic=elastic,
        grow_every=60.0,
    )


@given(rows, st.sampled_from([-1, -1, 0, 1, 2, 4]), st.booleans())
def test_a_run_ends_with_one_failure_too_many_or_the_third_like_it_without_progress(
    found: list[Failure], most: int, elastic: bool
) -> None:
    workers = Workers()
    iterator = run(workers, most, elastic=elastic)
    count, row, before, known, reached = 0, 0, "", 0, (0, 0)
    for each in found:
        if each.progress == "report":
            iterator._iteration += 1
        elif each.progress:
            workers.saved = [*workers.saved, Info(len(workers.saved) + 1, "")]
            if each.progress == "checkpoint":
                iterator.checkpoints, known = workers.saved, len(workers.saved)
        workers.answers = each.progress != "unknown"
        workers.world_size = WORLD + each.resized
        cause, said, raised = each.error(), io.StringIO(), None
        with contextlib.redirect_stderr(said):
            try:
                iterator._count(cause, WORLD)
            except (ValueError, UnirunError) as error:
                raised = error
        if each.resized and each.loss and elastic:
            # The role has started again as a whole.
            assert said.getvalue() == f"unirun: {WORLD + 1} ranks go on, {WORLD} were there before\n"
            assert raised is None
            continue
        count += 1
        row = row + 1 if each.kind == before and reached == (iterator._iteration, known) else 1
        reached, before = (iterator._iteration, known), each.kind
        if row == LIMIT and workers.answers:
            known = len(workers.saved)
            row = row if reached[1] == known else 1
            reached = (iterator._iteration, known)
        if 0 <= most < count:
            problem = f"that is failure {count}, and max_failures is {most}"
        elif row == LIMIT:
            problem = f"{LIMIT} times in a row in function, without a report or a checkpoint between"
        else:
            limit = f" of {most}" if most >= 0 else ""
            assert said.getvalue() == f"unirun: failure {count}{limit}: {each.what}; the run goes on\n"
            assert raised is None
            continue
        if each.loss:
            assert isinstance(raised, TrainingFailed)
            assert raised.problem == f"{each.what}; {problem}"
            more = "" if row == LIMIT else ", or allow more"
            assert raised.remedy == f"see unirun logs w for their output{more}"
            assert raised.__cause__ is cause
        else:
            assert raised is cause
            assert cause.__notes__ == [f"unirun: {problem}"]
        assert said.getvalue() == ""
        return


def test_a_run_that_is_closed_counts_nothing() -> None:
    iterator = run(Workers(), -1, elastic=True)
    iterator._closed = True
    with pytest.raises(TrainingFailed, match="the run was closed"):
        iterator._count(ValueError(1), WORLD)
