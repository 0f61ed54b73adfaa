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


def test_a_worker_that_dies_during_a_call_raises_worker_lost_at_once(stage: Stage) -> None:
    cast = stage.role(2)
    ref = cast.group[0].hold.call_async("doomed")
    behind = cast.group[0].note.call_async("behind it")
    cast[0].hear("holding doomed")
    cast.kill(0)
    assert lost_within(ref, SOON).worker == f"{cast.role}:0"
    assert lost_within(behind, SOON).worker == f"{cast.role}:0"
    assert cast.group[1].echo(1) == 1


def test_the_death_of_a_called_worker_writes_nothing_on_stderr(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    cast = stage.role(1)
    ref = cast.group.hold.call_async("doomed")
    cast[0].hear("holding doomed")
    cast.kill(0)
    lost_within(ref, SOON)
    assert capfd.readouterr().err == ""


def test_a_death_that_only_the_master_reports_raises_worker_lost(stage: Stage) -> None:
    """The machine is gone, and no connection says so."""
    cast = stage.role(1)
    ref = cast.group.hold.call_async("silent")
    cast[0].hear("holding silent")
    cast.tell_gone(0)
    lost_within(ref, SOON)
    cast[0].open("silent")


def test_a_group_call_ends_when_one_of_the_group_dies(stage: Stage) -> None:
    cast = stage.role(3)
    ref = cast.group.hold.call_async("together")
    for player in cast:
        player.hear("holding together")
    cast.kill(1)
    assert lost_within(ref, SOON).worker == f"{cast.role}:1"
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
    lost_within(last, SOON)
    assert [ref.result(0) for ref in refs] == [[number] for number in range(100)]


@pytest.mark.processes
def test_a_method_that_ends_its_process_is_a_loss_and_not_repeated(stage: Stage) -> None:
    cast = stage.role(1)
    ref = cast.group.die.call_async()
    cast[0].await_end()
    cast.kill(0)
    lost_within(ref, SOON)
    cast.start_again(0)
    assert cast.group.ran() == [[]]


def test_a_death_without_an_open_call_is_raised_by_the_next_call(stage: Stage) -> None:
    cast = stage.role(2)
    assert cast.group.echo(1) == [1, 1]
    cast.kill(0)
    cast.start_again(0)
    assert cast.group[1].echo(2) == 2
    with pytest.raises(WorkerLost, match=f"{cast.role}:0"):
        cast.group.echo(3)
    assert cast.group.echo(4) == [4, 4]


def test_calls_wait_for_a_worker_that_is_starting(stage: Stage) -> None:
    """1. A worker dies during a call. 2. Calls are made while its successor starts. 3. The successor serves: they run in
    the order in which they were made."""
    cast = stage.role(1)
    ref = cast.group.hold.call_async("first")
    cast[0].hear("holding first")
    cast.kill(0)
    lost_within(ref, SOON)
    cast.prepare_again(0)
    refs = [cast.group.note.call_async(number) for number in range(50)]
    assert not any(ref.done() for ref in refs)
    cast.announce_again(0)
    assert [ref.result(SOON) for ref in refs] == [[number] for number in range(50)]
    assert cast.group.ran() == [list(range(50))], "in the order in which they were made"
    assert cast.group.me()[0][1] == 1


def test_a_group_call_waits_for_the_successor_while_calls_of_single_workers_go_on(stage: Stage) -> None:
    """1. Rank 0 dies. 2. A call of rank 1 is answered. 3. A group call waits. 4. The successor serves, and the group call
    runs in both."""
    cast = stage.role(2)
    ref = cast.group.hold_if.call_async(0, "gone")
    cast[0].hear("holding gone")
    cast.kill(0)
    lost_within(ref, SOON)
    assert cast.group[1].echo("alone") == "alone"
    together = cast.group.number.call_async()
    cast.prepare_again(0)
    assert not together.done()
    cast.announce_again(0)
    assert together.result(SOON) == [0, 1]


def test_twenty_deaths_in_a_row_do_not_disturb_calls_of_other_workers(stage: Stage) -> None:
    """1. Ranks 1 and 2 run a long call, with others queued behind it. 2. Rank 0 dies and comes back, twenty times. 3. The
    long calls and the queued ones have their results."""
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
        lost_within(doomed, SOON)
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
    lost_within(ref, SOON)
    with pytest.raises(WorkerLost):
        cast.group[0].echo()
    with pytest.raises(WorkerLost):
        cast.group.echo()
    assert cast.group[1].echo(1) == 1


def test_target_any_chooses_a_living_worker(stage: Stage) -> None:
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
            lost_within(ref, SOON)
            cast.start_again(0)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON)
    assert wrong == []


def test_a_connection_that_breaks_without_open_calls_is_made_again(stage: Stage) -> None:
    cast = stage.role(1)
    for number in range(5):
        with Line(cast) as line:
            assert cast.group.echo(number) == [number]
        line.cut()
    assert cast.group.echo("at last") == ["at last"]


def test_the_first_call_waits_for_workers_that_have_not_started(stage: Stage) -> None:
    cast = stage.role_to_come(2)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(cast.group.number()), daemon=True).start()
    assert cast.group.role == cast.role
    cast.enter()
    assert answers.get(timeout=SOON) == [0, 1]


def test_a_broken_connection_is_no_death(stage: Stage) -> None:
    """1. A worker's process ends. 2. The call goes on as long as the master has not said so. 3. The master says so: the
    call raises `WorkerLost`."""
    cast = stage.role(1)
    ref = cast.group.hold.call_async("doomed")
    cast[0].hear("holding doomed")
    cast[0].kill()
    with pytest.raises(InvocationTimeout):
        ref.result(0.3)
    cast.tell_gone(0)
    lost_within(ref, SOON)


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


def test_each_death_raises_worker_lost_once(stage: Stage) -> None:
    cast = stage.role(2)
    assert cast.group.echo(0) == [0, 0]
    for life in range(10):
        ref = cast.group.hold_if.call_async(0, "doomed")
        cast[0].hear("holding doomed")
        cast.kill(0)
        assert lost_within(ref, SOON).worker == f"{cast.role}:0"
        cast.start_again(0)
        assert cast.group.echo(life) == [life, life], "and not again by the next call"


def test_queued_calls_of_a_group_do_not_run_in_the_next_generation(stage: Stage) -> None:
    """1. Three group calls wait behind a slow one. 2. Rank 0 dies: all of them are lost. 3. The next generation is formed.
    4. Rank 1 runs none of the lost calls, only those that were made for it alone or for the new generation."""
    cast = stage.role(2)
    first = cast.group.hold.call_async("slow")
    behind = [cast.group.note.call_async(number) for number in range(3)]
    alone = cast.group[1].note.call_async("alone")
    cast[1].hear("holding slow")
    cast.kill(0)
    for ref in (first, *behind):
        assert lost_within(ref, SOON).worker == f"{cast.role}:0"
    cast.start_again(0)
    together = cast.group.note.call_async("together")
    cast[1].open("slow")
    assert together.result(SOON) == ["together", "together"]
    assert alone.result(SOON) == "alone"
    assert cast.group.ran() == [["together"], ["slow", "alone", "together"]]


def test_a_group_call_that_a_worker_refuses_is_lost_and_says_why(stage: Stage) -> None:
    """1. A worker is in the next generation, of which the caller has not heard. 2. It refuses its part of a call. 3. The
    caller hears who was lost, and the call raises it. 4. The next call runs."""
    cast = stage.role(2)
    assert cast.group.echo(0) == [0, 0]
    cast[1].form(1)
    assert cast[1].hear("formed") == 1
    ref = cast.group.note.call_async("early")
    assert not wait([ref], timeout=0.3)[0], "who was lost is not known yet"
    cast.kill(0)
    cast.start_again(0)
    assert lost_within(ref, SOON).worker == f"{cast.role}:0"
    assert cast.group.note("next") == ["next", "next"], "that loss was told"
    assert cast.group.ran()[1] == ["next"]


def test_a_group_call_of_one_generation_is_not_sent_in_the_next(stage: Stage) -> None:
    """1. Rank 1 runs its part of a call. 2. Rank 0 is lost before it serves. 3. Its successor does not get its part, and the
    call is lost."""
    cast = stage.role(2)
    cast.kill(0)
    cast.prepare_again(0)
    ref = cast.group.note.call_async("half")
    eventually(lambda: "1 of 2" in repr(ref), "one has answered")
    cast.kill(0)
    cast.start_again(0)
    error = lost_within(ref, SOON)
    assert error.worker == f"{cast.role}:0"
    assert "its role has formed generation 2, and the call was made for 1" in str(error)
    assert cast.group.note("whole") == ["whole", "whole"]
    assert cast.group.ran() == [["whole"], ["half", "whole"]]


def test_a_restarted_trainer_gets_worker_lost_for_restarted_workers(stage: Stage) -> None:
    """1. A worker is started again. 2. The first trainer calls it without an error. 3. A restarted trainer does not know what
    its predecessor was told: its first call raises `WorkerLost`, the second one runs."""
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
