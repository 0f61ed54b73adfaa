"""Idempotent calls are made again when a worker is lost."""

from __future__ import annotations

import pytest

from tests.contract.cluster import Cluster, lost_within
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import InvocationTimeout, WorkerLost


def test_an_idempotent_call_is_made_again_when_its_worker_is_back(cluster: Cluster) -> None:
    role = cluster.role(1)
    ref = role.group.again.call_async("retry")
    role[0].expect("holding retry")
    role.kill(0)
    role.restart(0)
    role[0].expect("holding retry")
    assert not ref.done()
    role[0].open("retry")
    assert ref.result(WAIT_TIMEOUT) == [(0, 1)]


def test_a_loss_that_an_idempotent_call_survived_is_raised_by_the_next_other_call(cluster: Cluster) -> None:
    """1. A worker dies during an idempotent call. 2. The successor runs it. 3. The next call that is not idempotent raises
    the loss. 4. The call after that runs."""
    role = cluster.role(1)
    role.group.echo(0)
    ref = role.group.again.call_async("retry")
    role[0].expect("holding retry")
    role.kill(0)
    role.restart(0)
    role[0].expect("holding retry")
    role[0].open("retry")
    assert ref.result(WAIT_TIMEOUT) == [(0, 1)]
    with pytest.raises(WorkerLost, match=f"{role.name}:0"):
        role.group.echo(1)
    assert role.group.echo(2) == [2]


def test_an_idempotent_group_call_is_made_again_in_all_workers(cluster: Cluster) -> None:
    """1. Rank 1 answers, rank 0 dies. 2. The successor serves after more time than an error is held back. 3. Both ranks run
    the call again."""
    role = cluster.role(2)
    # One answers at once. What it has said counts no more when the other one dies.
    ref = role.group.again_if.call_async(0, "all")
    role[0].expect("holding all")
    eventually(lambda: "1 of 2" in repr(ref), "one has answered")
    role.kill(0)
    role.begin_restart(0)
    # The second attempt takes longer than the moment for which the first one's errors are weighed.
    for _ in range(3):
        with pytest.raises(InvocationTimeout):
            ref.result(0.1)
    role.finish_restart(0)
    role[0].expect("holding all")
    role[0].open("all")
    assert ref.result(WAIT_TIMEOUT) == [(0, 1), (1, 0)]
    assert role.group[1].ran() == [0, 0], "both attempts came here"


def test_an_idempotent_call_is_repeated_at_most_retries_times(cluster: Cluster) -> None:
    role = cluster.role(1)
    ref = role.group.again_once.call_async("never")
    for _ in range(2):
        assert not ref.done()
        role[0].expect("holding never")
        role.kill(0)
        role.restart(0)
    lost_within(ref, WAIT_TIMEOUT)
    assert role.group.ran() == [[]]


def test_an_idempotent_call_without_an_answer_ends_at_its_deadline(cluster: Cluster) -> None:
    role = cluster.role(1)
    ref = role.group.again_briefly.call_async("brief")
    role[0].expect("holding brief")
    role.kill(0)
    assert isinstance(ref.exception(WAIT_TIMEOUT), InvocationTimeout)


def test_an_idempotent_group_call_that_is_refused_is_made_again(cluster: Cluster) -> None:
    role = cluster.role(2)
    role.group.echo(0)
    role[1].form(1)
    assert role[1].expect("formed") == 1
    ref = role.group.again.call_async("both")
    role.kill(0)
    role.restart(0)
    for worker in role:
        worker.expect("holding both")
    role.open("both")
    assert ref.result(WAIT_TIMEOUT) == [(0, 1), (1, 0)]
