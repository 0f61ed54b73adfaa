"""Errors keep their type, their message, their traceback and the name of who raised them."""

from __future__ import annotations

import sys
import time

import pytest

from tests.contract.cluster import Cluster, Role
from tests.contract.workload import ErrorWithLock, Refused, UnprintableError
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import RemoteError, RemoteTraceback, WorkerLost


def test_an_error_comes_with_all_that_is_known_of_it(shared_role: Role) -> None:
    with pytest.raises(ValueError, match="schöne Größe 大きさ") as caught:
        shared_role.group[2].fail("value", "schöne Größe 大きさ")
    cause = caught.value.__cause__
    assert str(caught.value) == "schöne Größe 大きさ"
    assert isinstance(cause, RemoteTraceback)
    assert cause.worker == f"{shared_role.name}:2"
    assert "in fail" in cause.traceback
    assert "raise ValueError(text)" in cause.traceback
    assert f"raised in {shared_role.name}:2" in caught.value.__notes__


def test_an_exception_whose_constructor_wants_other_arguments_is_rebuilt(shared_role: Role) -> None:
    with pytest.raises(Refused, match="refused with 7 in the office") as caught:
        shared_role.group[0].fail("refused")
    assert (caught.value.code, caught.value.where) == (7, "the office")


def test_an_exception_with_something_that_does_not_pickle_keeps_its_type(shared_role: Role) -> None:
    with pytest.raises(ErrorWithLock, match="tight"):
        shared_role.group[0].fail("sealed", "tight")


def test_an_exception_that_cannot_be_sent_at_all_is_told_of(shared_role: Role) -> None:
    with pytest.raises(RemoteError, match=f"{shared_role.name}:0 raised .*Hidden: behind a lock") as caught:
        shared_role.group[0].fail("hidden")
    assert caught.value.worker == f"{shared_role.name}:0"
    assert "raise Hidden" in caught.value.traceback


def test_an_exception_that_can_neither_be_shown_nor_pickled_is_told_of(shared_role: Role) -> None:
    with pytest.raises(UnprintableError) as caught:
        shared_role.group[0].fail("spiteful")
    assert "raise UnprintableError" in str(caught.value.__cause__)


def test_an_exception_whose_arguments_cannot_be_sent_keeps_its_type_and_text(shared_role: Role) -> None:
    with pytest.raises(ValueError, match="locked.*lock object") as caught:
        shared_role.group[0].fail("locked", "locked")
    assert isinstance(caught.value.__cause__, RemoteTraceback)


def test_an_exception_that_holds_an_object_without_a_text_keeps_its_type(shared_role: Role) -> None:
    with pytest.raises(ValueError, match="Plain object at 0x") as caught:
        shared_role.group[0].fail("plain")
    assert type(caught.value.args[0]).__name__ == "Plain"


def test_an_exception_of_a_local_class_is_caught_as_what_it_derives_from(shared_role: Role) -> None:
    with pytest.raises(ValueError, match="from within"):
        shared_role.group[0].fail("local", "from within")


def test_errors_of_the_system_keep_their_numbers(shared_role: Role) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        shared_role.group[0].fail("file")
    assert caught.value.filename == "/nonexistent/file"


def test_what_caused_an_error_stands_in_its_traceback(shared_role: Role) -> None:
    with pytest.raises(KeyError) as caught:
        shared_role.group[0].fail("cause", "the root")
    assert "ValueError: the root" in str(caught.value.__cause__)


def test_an_exception_that_holds_a_tensor_keeps_its_type(shared_role: Role) -> None:
    with pytest.raises(ValueError, match="look at") as caught:
        shared_role.group[0].fail("tensor", "look at")
    assert caught.value.args[1].sum() == 1000


def test_an_exception_that_python_treats_specially_arrives(shared_role: Role) -> None:
    with pytest.raises(StopIteration):
        shared_role.group[0].fail("stop", "here")


def test_the_first_error_of_a_group_call_ends_it_soon(cluster: Cluster) -> None:
    role = cluster.role(2)
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"{role.name}:1 fails"):
        role.group.fail_if(1)
    assert time.monotonic() - began < WAIT_TIMEOUT
    assert role.group.echo(1) == [1, 1]


def test_one_who_fails_does_not_wait_for_those_who_go_on(cluster: Cluster) -> None:
    role = cluster.role(2)
    ref = role.group.hold_or_fail.call_async(0, "slowly")
    role[0].expect("holding slowly")
    with pytest.raises(ValueError, match=f"{role.name}:1 fails"):
        ref.result(WAIT_TIMEOUT)
    role[0].open("slowly")
    assert role.group.echo(1) == [1, 1]


def test_an_unknown_method_is_told_with_those_there_are(shared_role: Role) -> None:
    with pytest.raises(
        AttributeError, match=r"no method 'ecko'; did you mean 'echo'\? its methods are: .*echo, "
    ):
        shared_role.group.ecko()
    assert not hasattr(shared_role.group, "ecko")
    assert {"echo", "hold"} <= set(dir(shared_role.group))


def test_wrong_arguments_are_an_error_of_the_worker(shared_role: Role) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'loudly'"):
        shared_role.group.echo(1, loudly=True)


def test_a_coroutine_that_gives_up_answers_all_the_same(cluster: Cluster) -> None:
    role = cluster.role(1)
    with pytest.raises(RemoteError, match="CancelledError: given up"):
        role.group.give_up()
    ref = role.group.meanwhile.call_async("after")
    role[0].open("after")
    assert ref.result(WAIT_TIMEOUT) == ["after"]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["leave", "leave_thread", "leave_loop"])
def test_a_worker_whose_method_ends_the_program_is_lost(cluster: Cluster, method: str) -> None:
    role = cluster.role(1)
    ref = getattr(role.group, method).call_async()
    role[0].await_end()
    role.kill(0)
    with pytest.raises(WorkerLost, match=f"{role.name}:0 was lost"):
        ref.result(WAIT_TIMEOUT)
    assert sys.exc_info() == (None, None, None)
