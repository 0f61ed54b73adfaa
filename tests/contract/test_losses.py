"""Workers die, and come back; what the others do goes on."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from tests.contract.stage import SOON, Line, Stage, eventually
from unirun.errors import InvocationTimeout, WorkerLost
from unirun.roles import InvocationRef, wait


def lost_within(ref: InvocationRef[object], seconds: float) -> WorkerLost:
    """The loss that ends a call, which must be told in time."""
    began = time.monotonic()
    error = ref.exception(SOON)
    assert isinstance(error, WorkerLost), error
    assert time.monotonic() - began < seconds
    return error


def test_a_worker_that_dies_in_mid_call_is_told_at_once(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group[0].call_async("hold", "doomed")
    behind = cast.group[0].call_async("note", "behind it")
    cast[0].hear("holding doomed")
    cast[0].kill()
    assert lost_within(ref, 2.0).worker == f"{cast.role}:0"
    assert lost_within(behind, 2.0).worker == f"{cast.role}:0"
    assert cast.group[1].echo(1) == 1


def test_a_worker_whose_death_only_the_board_tells_is_lost_too(stage: Stage) -> None:
    """The machine is gone, and no connection says so."""
    cast = stage.role(1)
    ref = cast.group.call_async("hold", "silent")
    cast[0].hear("holding silent")
    cast.tell_gone(0)
    lost_within(ref, 2.0)
    cast[0].open("silent")


def test_a_group_call_ends_when_one_of_the_group_dies(stage: Stage) -> None:
    cast = stage.role(3)
    ref = cast.group.call_async("hold", "together")
    for player in cast:
        player.hear("holding together")
    cast[1].kill()
    assert lost_within(ref, 2.0).worker == f"{cast.role}:1"
    cast[0].open("together")
    cast[2].open("together")
    assert [cast.group[rank].echo(1) for rank in (0, 2)] == [1, 1]


def test_what_was_answered_before_a_death_has_its_result(stage: Stage) -> None:
    cast = stage.role(1)
    refs = [cast.group.call_async("echo", number) for number in range(100)]
    last = cast.group.call_async("hold", "last")
    cast[0].hear("holding last")
    wait(refs, len(refs), SOON)
    cast[0].kill()
    lost_within(last, 2.0)
    assert [ref.result(0) for ref in refs] == [[number] for number in range(100)]


@pytest.mark.processes
def test_a_method_that_ends_its_process_is_a_loss_and_not_repeated(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.call_async("die")
    lost_within(ref, 5.0)
    cast.start_again(0)
    assert cast.group.ran() == [[]]


def test_a_death_that_nobody_was_waiting_for_is_told_by_the_next_call(stage: Stage) -> None:
    cast = stage.role(2)
    assert cast.group.echo(1) == [1, 1]
    cast[0].kill()
    cast.start_again(0)
    assert cast.group[1].echo(2) == 2
    with pytest.raises(WorkerLost, match=f"{cast.role}:0"):
        cast.group.echo(3)
    assert cast.group.echo(4) == [4, 4]


def test_calls_wait_for_a_worker_that_is_on_its_way(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.call_async("hold", "first")
    cast[0].hear("holding first")
    cast[0].kill()
    lost_within(ref, 2.0)
    cast.prepare_again(0)
    refs = [cast.group.call_async("note", number) for number in range(50)]
    assert not any(ref.done() for ref in refs)
    cast.announce_again(0)
    assert [ref.result(SOON) for ref in refs] == [[number] for number in range(50)]
    assert cast.group.ran() == [list(range(50))], "in the order in which they were made"
    assert cast.group.me()[0][1] == 1


def test_a_group_call_waits_for_the_successor_while_calls_of_single_workers_go_on(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group.call_async("hold_if", 0, "gone")
    cast[0].hear("holding gone")
    cast[0].kill()
    lost_within(ref, 2.0)
    assert cast.group[1].echo("alone") == "alone"
    together = cast.group.call_async("number")
    cast.prepare_again(0)
    assert not together.done()
    cast.announce_again(0)
    assert together.result(SOON) == [0, 1]


def test_twenty_deaths_in_a_row_disturb_nobody_else(stage: Stage) -> None:
    cast = stage.role(3)
    group = cast.group
    long = [group[rank].call_async("hold", "long") for rank in (1, 2)]
    for rank in (1, 2):
        cast[rank].hear("holding long")
    queued = [group[rank].call_async("note", number) for number in range(5) for rank in (1, 2)]
    for life in range(20):
        assert group[0].me()[1] == life
        doomed = group[0].call_async("hold", "doomed")
        cast[0].hear("holding doomed")
        cast[0].kill()
        lost_within(doomed, 2.0)
        cast.start_again(0)
    assert not any(ref.done() for ref in (*long, *queued))
    cast.open("long")
    assert [ref.result(SOON) for ref in long] == ["long", "long"]
    assert [ref.result(SOON) for ref in queued] == [n for n in range(5) for _ in (1, 2)]
    assert group[1:].ran() == [["long", *range(5)]] * 2
    assert group.number() == [0, 1, 2]


def test_an_idempotent_call_is_made_again_when_its_worker_is_back(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.call_async("again", "retry")
    cast[0].hear("holding retry")
    cast[0].kill()
    cast.start_again(0)
    cast[0].hear("holding retry")
    assert not ref.done()
    cast[0].open("retry")
    assert ref.result(SOON) == [(0, 1)]


def test_an_idempotent_group_call_is_made_again_by_all(stage: Stage) -> None:
    cast = stage.role(2)
    # One answers at once. What it has said counts no more when the other one dies.
    ref = cast.group.call_async("again_if", 0, "all")
    cast[0].hear("holding all")
    eventually(lambda: "1 of 2" in repr(ref), "one has answered")
    cast[0].kill()
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


def test_an_idempotent_call_is_made_again_so_often_and_no_more(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.call_async("again_once", "never")
    for _ in range(2):
        assert not ref.done()
        cast[0].hear("holding never")
        cast[0].kill()
        cast.start_again(0)
    lost_within(ref, 2.0)
    assert cast.group.ran() == [[]]


def test_an_idempotent_call_without_an_answer_ends_at_its_deadline(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.call_async("again_briefly", "brief")
    cast[0].hear("holding brief")
    cast[0].kill()
    cast.tell_gone(0)
    assert isinstance(ref.exception(SOON), InvocationTimeout)


def test_a_worker_that_has_ended_for_good_is_lost_at_once(stage: Stage) -> None:
    cast = stage.role(2)
    cast.group.echo()
    ref = cast.group[0].call_async("hold", "over")
    cast[0].hear("holding over")
    cast[0].kill()
    cast.tell_over(0)
    lost_within(ref, 2.0)
    with pytest.raises(WorkerLost):
        cast.group[0].echo()
    with pytest.raises(WorkerLost):
        cast.group.echo()
    assert cast.group[1].echo(1) == 1


def test_any_goes_to_those_who_live(stage: Stage) -> None:
    cast = stage.role(3)
    cast.group.echo()
    cast[1].kill()
    cast.tell_gone(1)
    assert {cast.group.anyone() for _ in range(6)} == {0, 2}


def test_calls_from_many_threads_survive_deaths_of_others(stage: Stage) -> None:
    cast = stage.role(2)
    stop = threading.Event()
    wrong: list[object] = []

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                if (answer := cast.group[1].echo(number)) != number:
                    wrong.append((number, answer))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            ref = cast.group[0].call_async("hold", "x")
            cast[0].hear("holding x")
            cast[0].kill()
            lost_within(ref, 2.0)
            cast.start_again(0)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON)
    assert wrong == []


def test_a_connection_that_breaks_while_nothing_is_open_is_made_again(stage: Stage) -> None:
    cast = stage.role(1)
    for number in range(5):
        with Line(cast) as line:
            assert cast.group.echo(number) == [number]
        line.cut()
    assert cast.group.echo("at last") == ["at last"]


def test_the_first_call_waits_for_those_who_have_not_started(stage: Stage) -> None:
    cast = stage.role_to_come(2)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(cast.group.number()), daemon=True).start()
    assert cast.group.role == cast.role
    cast.enter()
    assert answers.get(timeout=SOON) == [0, 1]
