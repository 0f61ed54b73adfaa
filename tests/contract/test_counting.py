"""Every call that was answered is counted, with what went there and what came back."""

from __future__ import annotations

import time

import pytest
import torch

from tests.contract.stage import SOON, Stage
from unirun.errors import WorkerLost
from unirun.roles import shard
from unirun.wire.reports import RankRange

MB = 1_000_000


def test_a_call_of_all_counts_each_rank(stage: Stage) -> None:
    cast = stage.role(3)
    began = time.monotonic()
    cast.group.echo(1)
    cast.group.echo(2)
    took = time.monotonic() - began
    count = stage.counted(cast)["echo", False]
    assert (count.calls, count.ranks, count.split) == (6, (RankRange(0, 2),), False)
    assert 0 < count.seconds <= 3 * took, "three ranks at a time"


def test_bytes_are_those_of_tensors_there_and_back(stage: Stage) -> None:
    cast = stage.role(2)
    cast.group[1].echo(torch.zeros(MB, dtype=torch.uint8))
    count = stage.counted(cast)["echo", False]
    assert count.ranks == (RankRange(1, 1),)
    assert MB <= count.bytes < 1.01 * MB
    assert MB <= count.returned < 1.01 * MB


def test_a_call_with_split_arguments_is_counted_as_split(stage: Stage) -> None:
    cast = stage.role(2)
    cast.group.echo(shard([1, 2, 3]))
    assert stage.counted(cast)["echo", False].split


def test_a_call_of_any_rank_is_counted_as_split(stage: Stage) -> None:
    cast = stage.role(2)
    for _ in range(4):
        cast.group.anyone()
    count = stage.counted(cast)["anyone", False]
    assert (count.calls, count.ranks, count.split) == (4, (RankRange(0, 1),), True)


def test_an_asynchronous_call_is_counted_apart_when_it_is_answered(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group.hold.call_async("later")
    assert stage.counted(cast) == {}
    cast.open("later")
    ref.result()
    assert stage.counted(cast)["hold", True].calls == 2


def test_a_call_that_raises_is_counted(stage: Stage) -> None:
    cast = stage.role(1)
    with pytest.raises(ValueError, match="no"):
        cast.group.fail("ValueError", "no")
    assert stage.counted(cast)["fail", False].calls == 1


@pytest.mark.processes
def test_a_lost_call_is_not_counted(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.hold.call_async("doomed")
    cast[0].hear("holding doomed")
    cast.kill(0)
    with pytest.raises(WorkerLost):
        ref.result(SOON)
    assert stage.counted(cast) == {}
