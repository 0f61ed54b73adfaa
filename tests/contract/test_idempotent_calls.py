"""Idempotent calls are made again when a worker is lost."""

from __future__ import annotations

import pytest

from tests.contract.stage import SOON, Stage, eventually, lost_within
from unirun.errors import InvocationTimeout, WorkerLost


def test_an_idempotent_call_is_made_again_when_its_worker_is_back(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.again.call_async("retry")
    cast[0].hear("holding retry")
    cast.kill(0)
    cast.start_again(0)
    cast[0].hear("holding retry")
    assert not ref.done()
    cast[0].open("retry")
    assert ref.result(SOON) == [(0, 1)]


def test_a_loss_that_an_idempotent_call_survived_is_raised_by_the_next_other_call(stage: Stage) -> None:
    """1. A worker dies during an idempotent call. 2. The successor runs it. 3. The next call that is not idempotent raises
    the loss. 4. The call after that runs."""
    cast = stage.role(1)
    cast.group.echo(0)
    ref = cast.group.again.call_async("retry")
    cast[0].hear("holding retry")
    cast.kill(0)
    cast.start_again(0)
    cast[0].hear("holding retry")
    cast[0].open("retry")
    assert ref.result(SOON) == [(0, 1)]
    with pytest.raises(WorkerLost, match=f"{cast.role}:0"):
        cast.group.echo(1)
    assert cast.group.echo(2) == [2]


def test_an_idempotent_group_call_is_made_again_in_all_workers(stage: Stage) -> None:
    """1. Rank 1 answers, rank 0 dies. 2. The successor serves after more time than an error is held back. 3. Both ranks run
    the call again."""
    cast = stage.role(2)
    # One answers at once. What it has said counts no more when the other one dies.
    ref = cast.group.again_if.call_async(0, "all")
    cast[0].hear("holding all")
    eventually(lambda: "1 of 2" in repr(ref), "one has answered")
    cast.kill(0)
    cast.prepare_again(0)
    # The second attempt takes longer than the moment for which the first one's errors are weighed.
    for _ in range(3):
        with pytest.raises(InvocationTimeout):
            ref.result(0.1)
    cast.announce_again(0)
    cast[0].hear("holding all")
    cast[0].open("all")
    assert ref.result(SOON) == [(0, 1), (1, 0)]
    assert cast.group[1].ran() == [0, 0], "both attempts came here"


def test_an_idempotent_call_is_repeated_at_most_retries_times(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.again_once.call_async("never")
    for _ in range(2):
        assert not ref.done()
        cast[0].hear("holding never")
        cast.kill(0)
        cast.start_again(0)
    lost_within(ref, SOON)
    assert cast.group.ran() == [[]]


def test_an_idempotent_call_without_an_answer_ends_at_its_deadline(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.again_briefly.call_async("brief")
    cast[0].hear("holding brief")
    cast.kill(0)
    assert isinstance(ref.exception(SOON), InvocationTimeout)


def test_an_idempotent_group_call_that_is_refused_is_made_again(stage: Stage) -> None:
    cast = stage.role(2)
    cast.group.echo(0)
    cast[1].form(1)
    assert cast[1].hear("formed") == 1
    ref = cast.group.again.call_async("both")
    cast.kill(0)
    cast.start_again(0)
    for player in cast:
        player.hear("holding both")
    cast.open("both")
    assert ref.result(SOON) == [(0, 1), (1, 0)]
