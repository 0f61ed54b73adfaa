"""The checkpoint from which an attempt resumes, and the error of a run that cannot be sent to its workers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import CheckpointDamaged, EncodingError
from unirun.train.callbacks import Callbacks
from unirun.train.checkpoints import CheckpointStrategy, Info
from unirun.train.running import TrainingIterator
from unirun.train.task import Attempt, RunTask

URL = "memory://beginnings/checkpoints"
START = "/elsewhere/checkpoints/000007/"


def run(attempts: Any, checkpoint: Any = None, **task: Any) -> TrainingIterator:
    whole: dict[str, Any] = {"function": print, "config": {}, "datasets": {}, **task}
    return TrainingIterator(
        attempts,
        RunTask(cell=[], takes_config=False, url=URL, strategy=CheckpointStrategy(), **whole),
        Callbacks(()),
        lambda data: data,
        checkpoint=checkpoint,
        logdir="",
        max_failures=0,
        retry=(),
        elastic=False,
        grow_every=60.0,
    )


class Group:
    """Workers in whose folder there are checkpoints, of which some are damaged. The first one clears it before it looks."""

    workers = None

    def __init__(self, damaged: list[bool]) -> None:
        self._damaged = damaged
        self.verified: list[tuple[str, int]] = []
        self.clean = False

    def __getitem__(self, rank: int) -> Group:
        assert rank == 0
        return self

    def clear(self, url: str) -> None:
        assert url == URL
        self.clean = True

    def checkpoints(self, url: str, below: int | None) -> tuple[list[Info], int]:
        assert (url, self.clean) == (URL, True)
        count = len(self._damaged)
        there = range(1, count + 1 if below is None else below)
        return [Info(number, f"{url}/{number:06}") for number in there], count + 1

    def verify(self, url: str, number: int) -> None:
        self.verified.append((url, number))
        if url == URL and self._damaged[number - 1]:
            raise CheckpointDamaged(f"checkpoint {number} is damaged")


@given(st.lists(st.booleans(), max_size=5), st.sampled_from([None, {"epoch": 1}, START]))
def test_an_attempt_goes_on_from_the_last_checkpoint_of_the_run_that_is_whole_and_else_from_its_start(
    damaged: list[bool], start: Any
) -> None:
    group = Group(damaged)
    workers: Any = group
    iterator = run(group, start)
    whole = [number for number, bad in enumerate(damaged, 1) if not bad]
    looked = [(URL, number) for number in range(len(damaged), max(whole, default=1) - 1, -1)]
    for attempt in range(2):
        group.verified.clear()
        resume, number = iterator._where(workers)
        assert number == len(damaged) + 1, "numbers are used once, also those of damaged ones"
        assert [info.number for info in iterator.checkpoints] == [*range(1, max(whole, default=0) + 1)]
        if whole:
            assert resume == whole[-1]
        elif start == START:
            assert resume == ("/elsewhere/checkpoints", 7)
        else:
            assert resume is start
        # It does not change while the run goes on.
        first = not whole and start == START and not attempt
        assert group.verified == [*looked, *[("/elsewhere/checkpoints", 7)] * first]


class Sender(Group):
    """Workers, and the attempts in them, to which nothing can be sent."""

    interrupted = False

    def __init__(self) -> None:
        super().__init__([])
        self.workers = self  # type: ignore[assignment]
        self.run, self.error = self, ""

    def __len__(self) -> int:
        return 1

    def ready(self) -> Sender:
        return self

    def next(self) -> Attempt:
        return Attempt(1, 0, 0)

    def end(self, turn: Attempt, reason: str) -> None:
        self.interrupted = True

    def call_async(self, turn: Attempt, order: RunTask) -> None:
        raise EncodingError("it cannot be sent")


LOCK = threading.Lock()


def holding(value: Any) -> Any:
    def holder() -> Any:
        return value

    return holder


@pytest.mark.parametrize(
    ("task", "checkpoint", "name"),
    [
        ({"config": {"lock": LOCK}}, None, r"config\['lock'\]"),
        ({"datasets": {None: [LOCK]}}, None, r"dataset\[0\]"),
        ({"datasets": {"train": [LOCK]}}, None, r"dataset\['train'\]\[0\]"),
        ({}, {"lock": LOCK}, r"checkpoint\['lock'\]"),
        ({"function": holding(LOCK)}, None, "the function holder"),
    ],
)
def test_the_part_of_a_run_that_cannot_be_sent_is_named_and_no_rank_is_told_of_it(
    task: dict[str, Any], checkpoint: Any, name: str
) -> None:
    sender = Sender()
    with pytest.raises(EncodingError, match=f"({name}).* cannot be sent: TypeError: cannot pickle"):
        next(run(sender, checkpoint, **task))
    assert not sender.interrupted
