"""Every call that was answered is counted, with what went there and what came back."""

from __future__ import annotations

import time

import pytest
import torch

from tests.contract.cluster import Cluster
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import WorkerLost
from unirun.roles import shard

MB = 1_000_000


def test_a_call_of_all_counts_each_rank(cluster: Cluster) -> None:
    role = cluster.role(3)
    began = time.monotonic()
    role.group.echo(1)
    role.group.echo(2)
    took = time.monotonic() - began
    count = cluster.counts_of(role)["echo", False]
    assert (count.calls, count.ranks, count.split) == (6, ((0, 2),), False)
    assert 0 < count.seconds <= 3 * took, "three ranks at a time"


def test_bytes_are_those_of_tensors_there_and_back(cluster: Cluster) -> None:
    role = cluster.role(2)
    role.group[1].echo(torch.zeros(MB, dtype=torch.uint8))
    count = cluster.counts_of(role)["echo", False]
    assert count.ranks == ((1, 1),)
    assert MB <= count.bytes < 1.01 * MB
    assert MB <= count.returned < 1.01 * MB


def test_a_call_with_split_arguments_is_counted_as_split(cluster: Cluster) -> None:
    role = cluster.role(2)
    role.group.echo(shard([1, 2, 3]))
    assert cluster.counts_of(role)["echo", False].split


def test_a_call_of_any_rank_is_counted_as_split(cluster: Cluster) -> None:
    role = cluster.role(2)
    for _ in range(4):
        role.group.anyone()
    count = cluster.counts_of(role)["anyone", False]
    assert (count.calls, count.ranks, count.split) == (4, ((0, 1),), True)


def test_an_asynchronous_call_is_counted_apart_when_it_is_answered(cluster: Cluster) -> None:
    role = cluster.role(2)
    ref = role.group.hold.call_async("later")
    assert cluster.counts_of(role) == {}
    role.open("later")
    ref.result()
    assert cluster.counts_of(role)["hold", True].calls == 2


def test_a_call_that_raises_is_counted(cluster: Cluster) -> None:
    role = cluster.role(1)
    with pytest.raises(ValueError, match="no"):
        role.group.fail("ValueError", "no")
    assert cluster.counts_of(role)["fail", False].calls == 1


@pytest.mark.processes
def test_a_lost_call_is_not_counted(cluster: Cluster) -> None:
    role = cluster.role(1)
    ref = role.group.hold.call_async("doomed")
    role[0].expect("holding doomed")
    role.kill(0)
    with pytest.raises(WorkerLost):
        ref.result(WAIT_TIMEOUT)
    assert cluster.counts_of(role) == {}
