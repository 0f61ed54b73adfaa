"""Every call ends in time."""

from __future__ import annotations

import threading
import time

import pytest

from tests.contract.stage import GO_ON, SOON, STOP, Stage, eventually
from unirun.errors import InvocationTimeout, WorkerLost
from unirun.roles import wait
from unirun.roles.calls.group import role_group
from unirun.roles.calls.policy import Invocation


@pytest.mark.parametrize("method", ["hold_briefly", "hold_async"])
def test_a_call_ends_at_its_deadline(stage: Stage, method: str) -> None:
    cast = stage.role(1)
    began = time.monotonic()
    with pytest.raises(
        InvocationTimeout, match=f"{method} was not answered within its deadline of 0.4 s"
    ) as caught:
        getattr(cast.group, method)("never")
    assert 0.35 < time.monotonic() - began < SOON
    assert caught.value.missing == (f"{cast.role}:0",)
    assert caught.value.results == {}
    assert isinstance(caught.value, TimeoutError)
    cast[0].open("never")
    assert cast.group.echo("still there") == ["still there"]


def test_a_timeout_has_the_results_of_the_workers_that_answered(stage: Stage) -> None:
    cast = stage.role(3)
    with pytest.raises(InvocationTimeout) as caught:
        cast.group.hold_if_briefly(1, "one")
    assert caught.value.missing == (f"{cast.role}:1",)
    assert caught.value.results == {f"{cast.role}:0": 0, f"{cast.role}:2": 2}
    cast[1].open("one")


def test_result_with_a_timeout_names_missing_workers_and_may_be_asked_again(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group.hold_if.call_async(0, "early")
    cast[0].hear("holding early")
    eventually(lambda: "1 of 2 answered" in repr(ref), "one has answered")
    for timeout in (0.05, 0.0, -1.0):
        with pytest.raises(InvocationTimeout) as caught:
            ref.result(timeout)
        assert caught.value.missing == (f"{cast.role}:0",)
        assert caught.value.results == {f"{cast.role}:1": 1}
    assert not ref.done()
    cast[0].open("early")
    assert ref.result(SOON) == [0, 1]


def test_a_worker_that_hangs_does_not_delay_calls_of_others(stage: Stage) -> None:
    cast = stage.role(2)
    hanging = cast.group[0].hold_briefly.call_async("hang")
    cast[0].hear("holding hang")
    for number in range(100):
        assert cast.group[1].echo(number) == number
    assert isinstance(hanging.exception(SOON), InvocationTimeout)
    began = time.monotonic()
    with pytest.raises(InvocationTimeout) as caught:
        cast.group.hold_if_briefly(2, "")
    assert caught.value.missing == (f"{cast.role}:0",), "it still hangs"
    assert time.monotonic() - began < SOON
    cast[0].open("hang")
    assert cast.group.echo(1) == [1, 1]


@pytest.mark.processes
def test_a_call_of_a_stopped_process_ends_at_its_deadline_and_the_process_may_go_on(stage: Stage) -> None:
    cast = stage.role(2)
    cast.group.note("warm")
    cast[0].signal(STOP)
    try:
        with pytest.raises(InvocationTimeout) as caught:
            cast.group.hold_if_briefly(7, "")
        assert caught.value.missing == (f"{cast.role}:0",)
        assert cast.group[1].echo(1) == 1
    finally:
        cast[0].signal(GO_ON)
    assert cast.group.echo(2) == [2, 2]

    def only_the_latest_are_kept() -> bool:
        # The late answer may overtake others; each call takes along the acks of those that came before it.
        cast.group.echo()
        return cast.kept() == [1, 1]

    eventually(only_the_latest_are_kept, "the late result is let go")


@pytest.mark.processes
def test_a_stopped_process_runs_the_calls_that_were_sent_meanwhile(stage: Stage) -> None:
    cast = stage.role(1)
    cast.group.note("warm")
    cast[0].signal(STOP)
    try:
        refs = [cast.group.note.call_async(bytes([number]) * (1 << 16)) for number in range(100)]
    finally:
        cast[0].signal(GO_ON)
    wait(refs, len(refs), SOON)
    assert [each[0] for each in cast.group[0].ran()[1:]] == list(range(100))


def test_a_call_for_a_worker_that_is_not_there_ends_at_its_deadline_too(stage: Stage) -> None:
    cast = stage.role(1)
    cast.group.echo()
    cast.kill(0)
    with pytest.raises(WorkerLost):
        cast.group.hold_briefly("")
    began = time.monotonic()
    with pytest.raises(InvocationTimeout):
        cast.group.hold_briefly("")
    assert time.monotonic() - began < SOON


def test_many_deadlines_at_once_are_kept(stage: Stage) -> None:
    cast = stage.role(1)
    blocked = cast.group.hold.call_async("dam")
    cast[0].hear("holding dam")
    began = time.monotonic()
    refs = [cast.group.hold_briefly.call_async("") for _ in range(300)]
    ended = threading.Event()
    refs[-1].add_done_callback(lambda _: ended.set())
    assert ended.wait(SOON)
    assert time.monotonic() - began < SOON
    assert all(isinstance(ref.exception(0), InvocationTimeout) for ref in refs)
    for gate in ("dam", ""):
        cast[0].open(gate)
    assert blocked.result(SOON) == ["dam"]


@pytest.mark.processes
def test_a_call_to_a_worker_that_is_stopped_and_was_never_called_ends_at_its_deadline(stage: Stage) -> None:
    cast = stage.role(1)
    other = stage.role(1)
    stopped = role_group(stage.caller, other.role, 1, cast.group._role_methods.all())
    other[0].signal(STOP)
    began = time.monotonic()
    ref = stopped.hold_briefly.call_async("frozen")
    assert time.monotonic() - began < SOON, "a call that does not wait returns at once"
    with pytest.raises(InvocationTimeout, match=r"within its deadline of 0.4 s by"):
        stopped.hold_briefly("frozen")
    assert ref.exception(SOON) is not None
    assert time.monotonic() - began < SOON
    other[0].signal(GO_ON)
    other[0].open("frozen")
    assert stopped.echo("back") == ["back"], "it was late, not lost"


def test_the_first_call_of_known_methods_does_not_wait_for_a_worker(stage: Stage) -> None:
    cast = stage.role_to_come(1)
    group = role_group(stage.caller, cast.role, 1, {"soon": Invocation(blocking=False)})
    ref = group.soon()
    assert not ref.done()
    cast.enter()
    assert isinstance(ref.exception(SOON), AttributeError)
