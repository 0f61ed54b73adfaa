"""Workers die, and come back; what the others do goes on."""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection

import pytest

from tests.contract.line import Line
from tests.contract.stage import SOON, Stage, eventually, lost_within
from unirun.errors import InvocationTimeout, WorkerLost
from unirun.roles import RoleGroup, wait


def test_a_worker_that_dies_in_mid_call_is_told_at_once(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group[0].hold.call_async("doomed")
    behind = cast.group[0].note.call_async("behind it")
    cast[0].hear("holding doomed")
    cast.kill(0)
    assert lost_within(ref, 2.0).worker == f"{cast.role}:0"
    assert lost_within(behind, 2.0).worker == f"{cast.role}:0"
    assert cast.group[1].echo(1) == 1


def test_the_death_of_a_called_worker_writes_nothing_on_stderr(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    cast = stage.role(1)
    ref = cast.group.hold.call_async("doomed")
    cast[0].hear("holding doomed")
    cast.kill(0)
    lost_within(ref, 2.0)
    assert capfd.readouterr().err == ""


def test_a_worker_whose_death_only_the_board_tells_is_lost_too(stage: Stage) -> None:
    """The machine is gone, and no connection says so."""
    cast = stage.role(1)
    ref = cast.group.hold.call_async("silent")
    cast[0].hear("holding silent")
    cast.tell_gone(0)
    lost_within(ref, 2.0)
    cast[0].open("silent")


def test_a_group_call_ends_when_one_of_the_group_dies(stage: Stage) -> None:
    cast = stage.role(3)
    ref = cast.group.hold.call_async("together")
    for player in cast:
        player.hear("holding together")
    cast.kill(1)
    assert lost_within(ref, 2.0).worker == f"{cast.role}:1"
    cast[0].open("together")
    cast[2].open("together")
    assert [cast.group[rank].echo(1) for rank in (0, 2)] == [1, 1]


def test_what_was_answered_before_a_death_has_its_result(stage: Stage) -> None:
    cast = stage.role(1)
    refs = [cast.group.echo.call_async(number) for number in range(100)]
    last = cast.group.hold.call_async("last")
    cast[0].hear("holding last")
    wait(refs, len(refs), SOON)
    cast.kill(0)
    lost_within(last, 2.0)
    assert [ref.result(0) for ref in refs] == [[number] for number in range(100)]


@pytest.mark.processes
def test_a_method_that_ends_its_process_is_a_loss_and_not_repeated(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.die.call_async()
    cast[0].await_end()
    cast.kill(0)
    lost_within(ref, 5.0)
    cast.start_again(0)
    assert cast.group.ran() == [[]]


def test_a_death_that_nobody_was_waiting_for_is_told_by_the_next_call(stage: Stage) -> None:
    cast = stage.role(2)
    assert cast.group.echo(1) == [1, 1]
    cast.kill(0)
    cast.start_again(0)
    assert cast.group[1].echo(2) == 2
    with pytest.raises(WorkerLost, match=f"{cast.role}:0"):
        cast.group.echo(3)
    assert cast.group.echo(4) == [4, 4]


def test_calls_wait_for_a_worker_that_is_on_its_way(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.hold.call_async("first")
    cast[0].hear("holding first")
    cast.kill(0)
    lost_within(ref, 2.0)
    cast.prepare_again(0)
    refs = [cast.group.note.call_async(number) for number in range(50)]
    assert not any(ref.done() for ref in refs)
    cast.announce_again(0)
    assert [ref.result(SOON) for ref in refs] == [[number] for number in range(50)]
    assert cast.group.ran() == [list(range(50))], "in the order in which they were made"
    assert cast.group.me()[0][1] == 1


def test_a_group_call_waits_for_the_successor_while_calls_of_single_workers_go_on(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group.hold_if.call_async(0, "gone")
    cast[0].hear("holding gone")
    cast.kill(0)
    lost_within(ref, 2.0)
    assert cast.group[1].echo("alone") == "alone"
    together = cast.group.number.call_async()
    cast.prepare_again(0)
    assert not together.done()
    cast.announce_again(0)
    assert together.result(SOON) == [0, 1]


def test_twenty_deaths_in_a_row_disturb_nobody_else(stage: Stage) -> None:
    cast = stage.role(3)
    group = cast.group
    long = [group[rank].hold.call_async("long") for rank in (1, 2)]
    for rank in (1, 2):
        cast[rank].hear("holding long")
    queued = [group[rank].note.call_async(number) for number in range(5) for rank in (1, 2)]
    for life in range(20):
        assert group[0].me()[1] == life
        doomed = group[0].hold.call_async("doomed")
        cast[0].hear("holding doomed")
        cast.kill(0)
        lost_within(doomed, 2.0)
        cast.start_again(0)
    assert not any(ref.done() for ref in (*long, *queued))
    cast.open("long")
    assert [ref.result(SOON) for ref in long] == ["long", "long"]
    assert [ref.result(SOON) for ref in queued] == [n for n in range(5) for _ in (1, 2)]
    assert group[1:].ran() == [["long", *range(5)]] * 2
    assert group.number() == [0, 1, 2]


def test_a_worker_that_has_ended_for_good_is_lost_at_once(stage: Stage) -> None:
    cast = stage.role(2)
    cast.group.echo()
    ref = cast.group[0].hold.call_async("over")
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
    cast.kill(1)
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
            ref = cast.group[0].hold.call_async("x")
            cast[0].hear("holding x")
            cast.kill(0)
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


def test_only_the_board_says_that_a_worker_is_dead(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.hold.call_async("doomed")
    cast[0].hear("holding doomed")
    cast[0].kill()
    with pytest.raises(InvocationTimeout):
        ref.result(0.3)
    cast.tell_gone(0)
    lost_within(ref, 2.0)


def test_a_worker_whose_connections_are_cut_again_and_again_is_not_lost(stage: Stage) -> None:
    cast = stage.role(1)
    with Line(cast) as line:
        ref = cast.group.hold.call_async("through")
        cast[0].hear("holding through")
    for number in range(6):
        with Line(cast) as next_line:
            line.cut()
            assert cast.group.echo_beside(number) == [number]
        line = next_line
    cast[0].open("through")
    assert ref.result(SOON) == ["through"]
    assert cast.group.echo("after") == ["after"]
    assert cast.group.ran() == [["through"]], "it ran once"


def test_each_death_is_told_once(stage: Stage) -> None:
    cast = stage.role(2)
    assert cast.group.echo(0) == [0, 0]
    for life in range(10):
        ref = cast.group.hold_if.call_async(0, "doomed")
        cast[0].hear("holding doomed")
        cast.kill(0)
        assert lost_within(ref, 2.0).worker == f"{cast.role}:0"
        cast.start_again(0)
        assert cast.group.echo(life) == [life, life], "and not again by the next call"


def test_queued_calls_of_a_group_do_not_run_in_the_next_generation(stage: Stage) -> None:
    cast = stage.role(2)
    first = cast.group.hold.call_async("slow")
    behind = [cast.group.note.call_async(number) for number in range(3)]
    alone = cast.group[1].note.call_async("alone")
    cast[1].hear("holding slow")
    cast.kill(0)
    for ref in (first, *behind):
        assert lost_within(ref, 2.0).worker == f"{cast.role}:0"
    cast.start_again(0)
    together = cast.group.note.call_async("together")
    cast[1].open("slow")
    assert together.result(SOON) == ["together", "together"]
    assert alone.result(SOON) == "alone"
    assert cast.group.ran() == [["together"], ["slow", "alone", "together"]]


def test_a_group_call_that_a_worker_refuses_is_lost_and_says_why(stage: Stage) -> None:
    """A worker is in the next generation already, and the caller has not heard of it."""
    cast = stage.role(2)
    assert cast.group.echo(0) == [0, 0]
    cast[1].form(1)
    assert cast[1].hear("formed") == 1
    ref = cast.group.note.call_async("early")
    assert not wait([ref], timeout=0.3)[0], "who was lost is not known yet"
    cast.kill(0)
    cast.start_again(0)
    assert lost_within(ref, 2.0).worker == f"{cast.role}:0"
    assert cast.group.note("next") == ["next", "next"], "that loss was told"
    assert cast.group.ran()[1] == ["next"]


def test_a_group_call_that_was_begun_for_one_generation_is_not_ended_in_the_next(stage: Stage) -> None:
    """A worker has its part, and the other one is lost before it serves: its successor gets nothing of this call."""
    cast = stage.role(2)
    cast.kill(0)
    cast.prepare_again(0)
    ref = cast.group.note.call_async("half")
    eventually(lambda: "1 of 2" in repr(ref), "one has answered")
    cast.kill(0)
    cast.start_again(0)
    error = lost_within(ref, 2.0)
    assert error.worker == f"{cast.role}:0"
    assert "its role has formed generation 2, and the call was made for 1" in str(error)
    assert cast.group.note("whole") == ["whole", "whole"]
    assert cast.group.ran() == [["whole"], ["half", "whole"]]


def test_a_trainer_that_was_started_again_is_told_of_those_who_were(stage: Stage) -> None:
    """What its predecessor was told is not known."""
    cast = stage.role(2)
    cast.kill(0)
    cast.start_again(0)

    first = stage.trainer(0, call_twice, cast)
    assert (first.hear("first"), first.hear("second")) == ("", [1, 1])
    second = stage.trainer(1, call_twice, cast)
    assert second.hear("first") == f"{cast.role}:0"
    assert second.hear("second") == [1, 1]


def call_twice(group: RoleGroup, control: Connection) -> None:
    """Tell who is lost at the first call, and what the second returns."""
    lost = ""
    try:
        group.echo(1)
    except WorkerLost as error:
        lost = error.worker
    control.send(("first", lost))
    control.send(("second", group.echo(1)))


def test_a_worker_that_has_ended_well_is_not_advised_to_be_called_again(stage: Stage) -> None:
    cast = stage.role(1)
    cast[0].kill()
    cast.tell_over(0)
    with pytest.raises(WorkerLost, match="it has ended; it takes no calls any more"):
        cast.group.echo()


def test_a_callback_may_wait_for_another_call(stage: Stage) -> None:
    cast = stage.role(1)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    for number in range(3):
        ref = cast.group.echo.call_async(number)
        ref.add_done_callback(lambda done: answers.put((done.result(), cast.group.echo("inside"))))
        assert cast.group.echo("beside") == ["beside"]
    found = sorted(answers.get(timeout=SOON) for _ in range(3))  # type: ignore[type-var]
    assert found == [([number], ["inside"]) for number in range(3)]
