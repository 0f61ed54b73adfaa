"""Every call ends in time."""

from __future__ import annotations

import threading
import time

import pytest

from tests.contract.cluster import CONTINUE, STOP, Cluster
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import InvocationTimeout, WorkerLost
from unirun.roles import wait
from unirun.roles.calls.group import role_group
from unirun.roles.calls.policy import Invocation


@pytest.mark.parametrize("method", ["hold_briefly", "hold_async"])
def test_a_call_ends_at_its_deadline(cluster: Cluster, method: str) -> None:
    role = cluster.role(1)
    began = time.monotonic()
    with pytest.raises(
        InvocationTimeout, match=f"{method} was not answered within its deadline of 0.4 s"
    ) as caught:
        getattr(role.group, method)("never")
    assert 0.35 < time.monotonic() - began < WAIT_TIMEOUT
    assert caught.value.missing == (f"{role.name}:0",)
    assert caught.value.results == {}
    assert isinstance(caught.value, TimeoutError)
    role[0].open("never")
    assert role.group.echo("still there") == ["still there"]


def test_a_timeout_has_the_results_of_the_workers_that_answered(cluster: Cluster) -> None:
    role = cluster.role(3)
    with pytest.raises(InvocationTimeout) as caught:
        role.group.hold_if_briefly(1, "one")
    assert caught.value.missing == (f"{role.name}:1",)
    assert caught.value.results == {f"{role.name}:0": 0, f"{role.name}:2": 2}
    role[1].open("one")


def test_result_with_a_timeout_names_missing_workers_and_may_be_asked_again(cluster: Cluster) -> None:
    role = cluster.role(2)
    ref = role.group.hold_if.call_async(0, "early")
    role[0].expect("holding early")
    eventually(lambda: "1 of 2 answered" in repr(ref), "one has answered")
    for timeout in (0.05, 0.0, -1.0):
        with pytest.raises(InvocationTimeout) as caught:
            ref.result(timeout)
        assert caught.value.missing == (f"{role.name}:0",)
        assert caught.value.results == {f"{role.name}:1": 1}
    assert not ref.done()
    role[0].open("early")
    assert ref.result(WAIT_TIMEOUT) == [0, 1]


def test_a_worker_that_hangs_does_not_delay_calls_of_others(cluster: Cluster) -> None:
    role = cluster.role(2)
    hanging = role.group[0].hold_briefly.call_async("hang")
    role[0].expect("holding hang")
    for number in range(100):
        assert role.group[1].echo(number) == number
    assert isinstance(hanging.exception(WAIT_TIMEOUT), InvocationTimeout)
    began = time.monotonic()
    with pytest.raises(InvocationTimeout) as caught:
        role.group.hold_if_briefly(2, "")
    assert caught.value.missing == (f"{role.name}:0",), "it still hangs"
    assert time.monotonic() - began < WAIT_TIMEOUT
    role[0].open("hang")
    assert role.group.echo(1) == [1, 1]


@pytest.mark.processes
def test_a_call_of_a_stopped_process_ends_at_its_deadline_and_the_process_may_go_on(cluster: Cluster) -> None:
    role = cluster.role(2)
    role.group.note("warm")
    role[0].signal(STOP)
    try:
        with pytest.raises(InvocationTimeout) as caught:
            role.group.hold_if_briefly(7, "")
        assert caught.value.missing == (f"{role.name}:0",)
        assert role.group[1].echo(1) == 1
    finally:
        role[0].signal(CONTINUE)
    assert role.group.echo(2) == [2, 2]

    def only_the_latest_are_kept() -> bool:
        # The late answer may overtake others; each call takes along the acks of those that came before it.
        role.group.echo()
        return role.kept() == [1, 1]

    eventually(only_the_latest_are_kept, "the late result is let go")


@pytest.mark.processes
def test_a_stopped_process_runs_the_calls_that_were_sent_meanwhile(cluster: Cluster) -> None:
    role = cluster.role(1)
    role.group.note("warm")
    role[0].signal(STOP)
    try:
        refs = [role.group.note.call_async(bytes([number]) * (1 << 16)) for number in range(100)]
    finally:
        role[0].signal(CONTINUE)
    wait(refs, len(refs), WAIT_TIMEOUT)
    assert [each[0] for each in role.group[0].ran()[1:]] == list(range(100))


def test_a_call_for_a_worker_that_is_not_there_ends_at_its_deadline_too(cluster: Cluster) -> None:
    role = cluster.role(1)
    role.group.echo()
    role.kill(0)
    with pytest.raises(WorkerLost):
        role.group.hold_briefly("")
    began = time.monotonic()
    with pytest.raises(InvocationTimeout):
        role.group.hold_briefly("")
    assert time.monotonic() - began < WAIT_TIMEOUT


def test_many_deadlines_at_once_are_kept(cluster: Cluster) -> None:
    role = cluster.role(1)
    blocked = role.group.hold.call_async("dam")
    role[0].expect("holding dam")
    began = time.monotonic()
    refs = [role.group.hold_briefly.call_async("") for _ in range(300)]
    ended = threading.Event()
    refs[-1].add_done_callback(lambda _: ended.set())
    assert ended.wait(WAIT_TIMEOUT)
    assert time.monotonic() - began < WAIT_TIMEOUT
    assert all(isinstance(ref.exception(0), InvocationTimeout) for ref in refs)
    for gate in ("dam", ""):
        role[0].open(gate)
    assert blocked.result(WAIT_TIMEOUT) == ["dam"]


@pytest.mark.processes
def test_a_call_to_a_worker_that_is_stopped_and_was_never_called_ends_at_its_deadline(
    cluster: Cluster,
) -> None:
    role = cluster.role(1)
    other = cluster.role(1)
    stopped = role_group(cluster.caller, other.name, 1, cluster.caller.methods(role.name))
    other[0].signal(STOP)
    began = time.monotonic()
    ref = stopped.hold_briefly.call_async("frozen")
    assert time.monotonic() - began < WAIT_TIMEOUT, "a call that does not wait returns at once"
    with pytest.raises(InvocationTimeout, match=r"within its deadline of 0.4 s by"):
        stopped.hold_briefly("frozen")
    assert ref.exception(WAIT_TIMEOUT) is not None
    assert time.monotonic() - began < WAIT_TIMEOUT
    other[0].signal(CONTINUE)
    other[0].open("frozen")
    assert stopped.echo("back") == ["back"], "it was late, not lost"


def test_the_first_call_of_known_methods_does_not_wait_for_a_worker(cluster: Cluster) -> None:
    role = cluster.role_that_starts(1)
    group = role_group(cluster.caller, role.name, 1, {"soon": Invocation(blocking=False)})
    ref = group.soon()
    assert not ref.done()
    role.wait_until_serving()
    assert isinstance(ref.exception(WAIT_TIMEOUT), AttributeError)
