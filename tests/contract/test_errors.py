"""Errors keep their type, their message, their traceback and the name of who raised them."""

from __future__ import annotations

import sys
import time

import pytest

from tests.contract.desk import Refused, Sealed, Spiteful
from tests.contract.stage import SOON, Cast, Stage
from unirun.errors import RemoteError, RemoteTraceback, WorkerLost


def test_an_error_comes_with_all_that_is_known_of_it(troupe: Cast) -> None:
    with pytest.raises(ValueError, match="schöne Größe 大きさ") as caught:
        troupe.group[2].fail("value", "schöne Größe 大きさ")
    cause = caught.value.__cause__
    assert str(caught.value) == "schöne Größe 大きさ"
    assert isinstance(cause, RemoteTraceback)
    assert cause.worker == f"{troupe.role}:2"
    assert "in fail" in cause.traceback
    assert "raise ValueError(text)" in cause.traceback
    assert f"raised in {troupe.role}:2" in caught.value.__notes__


def test_an_exception_whose_constructor_wants_other_arguments_is_rebuilt(troupe: Cast) -> None:
    with pytest.raises(Refused, match="refused with 7 in the office") as caught:
        troupe.group[0].fail("refused")
    assert (caught.value.code, caught.value.where) == (7, "the office")


def test_an_exception_with_something_that_does_not_pickle_keeps_its_type(troupe: Cast) -> None:
    with pytest.raises(Sealed, match="tight"):
        troupe.group[0].fail("sealed", "tight")


def test_an_exception_that_cannot_be_sent_at_all_is_told_of(troupe: Cast) -> None:
    with pytest.raises(RemoteError, match=f"{troupe.role}:0 raised .*Hidden: behind a lock") as caught:
        troupe.group[0].fail("hidden")
    assert caught.value.worker == f"{troupe.role}:0"
    assert "raise Hidden" in caught.value.traceback


def test_an_exception_that_can_neither_be_shown_nor_pickled_is_told_of(troupe: Cast) -> None:
    with pytest.raises(Spiteful) as caught:
        troupe.group[0].fail("spiteful")
    assert "raise Spiteful" in str(caught.value.__cause__)


def test_an_exception_whose_arguments_cannot_be_sent_keeps_its_type_and_text(troupe: Cast) -> None:
    with pytest.raises(ValueError, match="locked.*lock object") as caught:
        troupe.group[0].fail("locked", "locked")
    assert isinstance(caught.value.__cause__, RemoteTraceback)


def test_an_exception_that_holds_an_object_without_a_text_keeps_its_type(troupe: Cast) -> None:
    with pytest.raises(ValueError, match="Plain object at 0x") as caught:
        troupe.group[0].fail("plain")
    assert type(caught.value.args[0]).__name__ == "Plain"


def test_an_exception_of_a_local_class_is_caught_as_what_it_derives_from(troupe: Cast) -> None:
    with pytest.raises(ValueError, match="from within"):
        troupe.group[0].fail("local", "from within")


def test_errors_of_the_system_keep_their_numbers(troupe: Cast) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        troupe.group[0].fail("file")
    assert caught.value.filename == "/nonexistent/file"


def test_what_caused_an_error_stands_in_its_traceback(troupe: Cast) -> None:
    with pytest.raises(KeyError) as caught:
        troupe.group[0].fail("cause", "the root")
    assert "ValueError: the root" in str(caught.value.__cause__)


def test_an_exception_that_holds_a_tensor_keeps_its_type(troupe: Cast) -> None:
    with pytest.raises(ValueError, match="look at") as caught:
        troupe.group[0].fail("tensor", "look at")
    assert caught.value.args[1].sum() == 1000


def test_an_exception_that_python_treats_specially_arrives(troupe: Cast) -> None:
    with pytest.raises(StopIteration):
        troupe.group[0].fail("stop", "here")


def test_the_first_error_of_a_group_call_ends_it_soon(stage: Stage) -> None:
    cast = stage.role(2)
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"{cast.role}:1 fails"):
        cast.group.fail_if(1)
    assert time.monotonic() - began < SOON
    assert cast.group.echo(1) == [1, 1]


def test_one_who_fails_does_not_wait_for_those_who_go_on(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group.hold_or_fail.call_async(0, "slowly")
    cast[0].hear("holding slowly")
    with pytest.raises(ValueError, match=f"{cast.role}:1 fails"):
        ref.result(SOON)
    cast[0].open("slowly")
    assert cast.group.echo(1) == [1, 1]


def test_an_unknown_method_is_told_with_those_there_are(troupe: Cast) -> None:
    with pytest.raises(
        AttributeError, match=r"no method 'ecko'; did you mean 'echo'\? its methods are: .*echo, "
    ):
        troupe.group.ecko()
    assert not hasattr(troupe.group, "ecko")
    assert {"echo", "hold"} <= set(dir(troupe.group))


def test_wrong_arguments_are_an_error_of_the_worker(troupe: Cast) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'loudly'"):
        troupe.group.echo(1, loudly=True)


def test_a_coroutine_that_gives_up_answers_all_the_same(stage: Stage) -> None:
    cast = stage.role(1)
    with pytest.raises(RemoteError, match="CancelledError: given up"):
        cast.group.give_up()
    ref = cast.group.meanwhile.call_async("after")
    cast[0].open("after")
    assert ref.result(SOON) == ["after"]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["leave", "leave_thread", "leave_loop"])
def test_a_worker_whose_method_ends_the_program_is_lost(stage: Stage, method: str) -> None:
    cast = stage.role(1)
    ref = getattr(cast.group, method).call_async()
    cast[0].await_end()
    cast.kill(0)
    with pytest.raises(WorkerLost, match=f"{cast.role}:0 was lost"):
        ref.result(SOON)
    assert sys.exc_info() == (None, None, None)
