"""Workers die, and come back; what the others do goes on."""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection

import pytest

from tests.contract.cluster import Cluster, lost_within
from tests.contract.connections import CuttableConnections
from tests.effort import CHAOS
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import InvocationTimeout, WorkerLost
from unirun.roles import RoleGroup, wait


def deaths(cluster: Cluster, number: int) -> range:
    """So many deaths in a row over unix sockets, where a successor starts soonest, and three over the others in `make test`."""
    return range(number if CHAOS or cluster.kind == "socket" else 3)


def test_a_worker_that_dies_during_a_call_raises_worker_lost_at_once(cluster: Cluster) -> None:
    role = cluster.role(2)
    ref = role.group[0].hold.call_async("doomed")
    behind = role.group[0].note.call_async("behind it")
    role[0].expect("holding doomed")
    role.kill(0)
    assert lost_within(ref, WAIT_TIMEOUT).worker == f"{role.name}:0"
    assert lost_within(behind, WAIT_TIMEOUT).worker == f"{role.name}:0"
    assert role.group[1].echo(1) == 1


def test_the_death_of_a_called_worker_writes_nothing_on_stderr(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    role = cluster.role(1)
    ref = role.group.hold.call_async("doomed")
    role[0].expect("holding doomed")
    role.kill(0)
    lost_within(ref, WAIT_TIMEOUT)
    assert capfd.readouterr().err == ""


def test_a_death_that_only_the_master_reports_raises_worker_lost(cluster: Cluster) -> None:
    """The machine is gone, and no connection says so."""
    role = cluster.role(1)
    ref = role.group.hold.call_async("silent")
    role[0].expect("holding silent")
    role.report_dead(0)
    lost_within(ref, WAIT_TIMEOUT)
    role[0].open("silent")


def test_a_group_call_ends_when_one_of_the_group_dies(cluster: Cluster) -> None:
    role = cluster.role(3)
    ref = role.group.hold.call_async("together")
    for worker in role:
        worker.expect("holding together")
    role.kill(1)
    assert lost_within(ref, WAIT_TIMEOUT).worker == f"{role.name}:1"
    role[0].open("together")
    role[2].open("together")
    assert [role.group[rank].echo(1) for rank in (0, 2)] == [1, 1]


def test_what_was_answered_before_a_death_has_its_result(cluster: Cluster) -> None:
    role = cluster.role(1)
    refs = [role.group.echo.call_async(number) for number in range(100)]
    last = role.group.hold.call_async("last")
    role[0].expect("holding last")
    wait(refs, len(refs), WAIT_TIMEOUT)
    role.kill(0)
    lost_within(last, WAIT_TIMEOUT)
    assert [ref.result(0) for ref in refs] == [[number] for number in range(100)]


@pytest.mark.processes
def test_a_method_that_ends_its_process_is_a_loss_and_not_repeated(cluster: Cluster) -> None:
    role = cluster.role(1)
    ref = role.group.die.call_async()
    role[0].await_end()
    role.kill(0)
    lost_within(ref, WAIT_TIMEOUT)
    role.restart(0)
    assert role.group.ran() == [[]]


def test_a_death_without_an_open_call_is_raised_by_the_next_call(cluster: Cluster) -> None:
    role = cluster.role(2)
    assert role.group.echo(1) == [1, 1]
    role.kill(0)
    role.restart(0)
    assert role.group[1].echo(2) == 2
    with pytest.raises(WorkerLost, match=f"{role.name}:0"):
        role.group.echo(3)
    assert role.group.echo(4) == [4, 4]


def test_calls_wait_for_a_worker_that_is_starting(cluster: Cluster) -> None:
    """1. A worker dies during a call. 2. Calls are made while its successor starts. 3. The successor serves: they run in
    the order in which they were made."""
    role = cluster.role(1)
    ref = role.group.hold.call_async("first")
    role[0].expect("holding first")
    role.kill(0)
    lost_within(ref, WAIT_TIMEOUT)
    role.begin_restart(0)
    refs = [role.group.note.call_async(number) for number in range(50)]
    assert not any(ref.done() for ref in refs)
    role.finish_restart(0)
    assert [ref.result(WAIT_TIMEOUT) for ref in refs] == [[number] for number in range(50)]
    assert role.group.ran() == [list(range(50))], "in the order in which they were made"
    assert role.group.me()[0][1] == 1


def test_a_group_call_waits_for_the_successor_while_calls_of_single_workers_go_on(cluster: Cluster) -> None:
    """1. Rank 0 dies. 2. A call of rank 1 is answered. 3. A group call waits. 4. The successor serves, and the group call
    runs in both."""
    role = cluster.role(2)
    ref = role.group.hold_if.call_async(0, "gone")
    role[0].expect("holding gone")
    role.kill(0)
    lost_within(ref, WAIT_TIMEOUT)
    assert role.group[1].echo("alone") == "alone"
    together = role.group.number.call_async()
    role.begin_restart(0)
    assert not together.done()
    role.finish_restart(0)
    assert together.result(WAIT_TIMEOUT) == [0, 1]


def test_deaths_in_a_row_do_not_disturb_calls_of_other_workers(cluster: Cluster) -> None:
    """1. Ranks 1 and 2 run a long call, with others queued behind it. 2. Rank 0 dies and comes back, up to twenty times. 3. The
    long calls and the queued ones have their results."""
    role = cluster.role(3)
    group = role.group
    long = [group[rank].hold.call_async("long") for rank in (1, 2)]
    for rank in (1, 2):
        role[rank].expect("holding long")
    queued = [group[rank].note.call_async(number) for number in range(5) for rank in (1, 2)]
    for life in deaths(cluster, 20):
        assert group[0].me()[1] == life
        doomed = group[0].hold.call_async("doomed")
        role[0].expect("holding doomed")
        role.kill(0)
        lost_within(doomed, WAIT_TIMEOUT)
        role.restart(0)
    assert not any(ref.done() for ref in (*long, *queued))
    role.open("long")
    assert [ref.result(WAIT_TIMEOUT) for ref in long] == ["long", "long"]
    assert [ref.result(WAIT_TIMEOUT) for ref in queued] == [n for n in range(5) for _ in (1, 2)]
    assert group[1:].ran() == [["long", *range(5)]] * 2
    assert group.number() == [0, 1, 2]


def test_a_worker_that_has_ended_for_good_is_lost_at_once(cluster: Cluster) -> None:
    role = cluster.role(2)
    role.group.echo()
    ref = role.group[0].hold.call_async("over")
    role[0].expect("holding over")
    role[0].kill()
    role.report_over(0)
    lost_within(ref, WAIT_TIMEOUT)
    with pytest.raises(WorkerLost):
        role.group[0].echo()
    with pytest.raises(WorkerLost):
        role.group.echo()
    assert role.group[1].echo(1) == 1


def test_target_any_chooses_a_living_worker(cluster: Cluster) -> None:
    role = cluster.role(3)
    role.group.echo()
    role.kill(1)
    assert {role.group.anyone() for _ in range(6)} == {0, 2}


def test_calls_from_many_threads_survive_deaths_of_others(cluster: Cluster) -> None:
    role = cluster.role(2)
    stop = threading.Event()
    wrong: list[object] = []

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                if (answer := role.group[1].echo(number)) != number:
                    wrong.append((number, answer))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in deaths(cluster, 5):
            ref = role.group[0].hold.call_async("x")
            role[0].expect("holding x")
            role.kill(0)
            lost_within(ref, WAIT_TIMEOUT)
            role.restart(0)
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_TIMEOUT)
    assert wrong == []


def test_a_connection_that_breaks_without_open_calls_is_made_again(cluster: Cluster) -> None:
    role = cluster.role(1)
    for number in range(5):
        with CuttableConnections(role) as connections:
            assert role.group.echo(number) == [number]
        connections.cut()
    assert role.group.echo("at last") == ["at last"]


def test_the_first_call_waits_for_workers_that_have_not_started(cluster: Cluster) -> None:
    role = cluster.role_that_starts(2)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(role.group.number()), daemon=True).start()
    assert role.group.role == role.name
    role.wait_until_serving()
    assert answers.get(timeout=WAIT_TIMEOUT) == [0, 1]


def test_a_broken_connection_is_no_death(cluster: Cluster) -> None:
    """1. A worker's process ends. 2. The call goes on as long as the master has not said so. 3. The master says so: the
    call raises `WorkerLost`."""
    role = cluster.role(1)
    ref = role.group.hold.call_async("doomed")
    role[0].expect("holding doomed")
    role[0].kill()
    with pytest.raises(InvocationTimeout):
        ref.result(0.3)
    role.report_dead(0)
    lost_within(ref, WAIT_TIMEOUT)


def test_a_worker_whose_connections_are_cut_again_and_again_is_not_lost(cluster: Cluster) -> None:
    role = cluster.role(1)
    with CuttableConnections(role) as connections:
        ref = role.group.hold.call_async("through")
        role[0].expect("holding through")
    for number in range(6):
        with CuttableConnections(role) as next_line:
            connections.cut()
            assert role.group.echo_beside(number) == [number]
        connections = next_line
    role[0].open("through")
    assert ref.result(WAIT_TIMEOUT) == ["through"]
    assert role.group.echo("after") == ["after"]
    assert role.group.ran() == [["through"]], "it ran once"


def test_each_death_raises_worker_lost_once(cluster: Cluster) -> None:
    role = cluster.role(2)
    assert role.group.echo(0) == [0, 0]
    for life in deaths(cluster, 10):
        ref = role.group.hold_if.call_async(0, "doomed")
        role[0].expect("holding doomed")
        role.kill(0)
        assert lost_within(ref, WAIT_TIMEOUT).worker == f"{role.name}:0"
        role.restart(0)
        assert role.group.echo(life) == [life, life], "and not again by the next call"


def test_queued_calls_of_a_group_do_not_run_in_the_next_generation(cluster: Cluster) -> None:
    """1. Three group calls wait behind a slow one. 2. Rank 0 dies: all of them are lost. 3. The next generation is formed.
    4. Rank 1 runs none of the lost calls, only those that were made for it alone or for the new generation."""
    role = cluster.role(2)
    first = role.group.hold.call_async("slow")
    behind = [role.group.note.call_async(number) for number in range(3)]
    alone = role.group[1].note.call_async("alone")
    role[1].expect("holding slow")
    role.kill(0)
    for ref in (first, *behind):
        assert lost_within(ref, WAIT_TIMEOUT).worker == f"{role.name}:0"
    role.restart(0)
    together = role.group.note.call_async("together")
    role[1].open("slow")
    assert together.result(WAIT_TIMEOUT) == ["together", "together"]
    assert alone.result(WAIT_TIMEOUT) == "alone"
    assert role.group.ran() == [["together"], ["slow", "alone", "together"]]


def test_a_group_call_that_a_worker_refuses_is_lost_and_says_why(cluster: Cluster) -> None:
    """1. A worker is in the next generation, of which the caller has not heard. 2. It refuses its part of a call. 3. The
    caller hears who was lost, and the call raises it. 4. The next call runs."""
    role = cluster.role(2)
    assert role.group.echo(0) == [0, 0]
    role[1].form(1)
    assert role[1].expect("formed") == 1
    ref = role.group.note.call_async("early")
    assert not wait([ref], timeout=0.3)[0], "who was lost is not known yet"
    role.kill(0)
    role.restart(0)
    assert lost_within(ref, WAIT_TIMEOUT).worker == f"{role.name}:0"
    assert role.group.note("next") == ["next", "next"], "that loss was told"
    assert role.group.ran()[1] == ["next"]


def test_a_group_call_of_one_generation_is_not_sent_in_the_next(cluster: Cluster) -> None:
    """1. Rank 1 runs its part of a call. 2. Rank 0 is lost before it serves. 3. Its successor does not get its part, and the
    call is lost."""
    role = cluster.role(2)
    role.kill(0)
    role.begin_restart(0)
    ref = role.group.note.call_async("half")
    eventually(lambda: "1 of 2" in repr(ref), "one has answered")
    role.kill(0)
    role.restart(0)
    error = lost_within(ref, WAIT_TIMEOUT)
    assert error.worker == f"{role.name}:0"
    assert "its role has formed generation 2, and the call was made for 1" in str(error)
    assert role.group.note("whole") == ["whole", "whole"]
    assert role.group.ran() == [["whole"], ["half", "whole"]]


def test_a_restarted_trainer_gets_worker_lost_for_restarted_workers(cluster: Cluster) -> None:
    """1. A worker is started again. 2. The first trainer calls it without an error. 3. A restarted trainer does not know what
    its predecessor was told: its first call raises `WorkerLost`, the second one runs."""
    role = cluster.role(2)
    role.kill(0)
    role.restart(0)

    first = cluster.trainer(0, call_twice, role)
    assert (first.expect("first"), first.expect("second")) == ("", [1, 1])
    second = cluster.trainer(1, call_twice, role)
    assert second.expect("first") == f"{role.name}:0"
    assert second.expect("second") == [1, 1]


def call_twice(group: RoleGroup, control: Connection) -> None:
    """Tell who is lost at the first call, and what the second returns."""
    lost = ""
    try:
        group.echo(1)
    except WorkerLost as error:
        lost = error.worker
    control.send(("first", lost))
    control.send(("second", group.echo(1)))


def test_a_worker_that_has_ended_well_is_not_advised_to_be_called_again(cluster: Cluster) -> None:
    role = cluster.role(1)
    role[0].kill()
    role.report_over(0)
    with pytest.raises(WorkerLost, match="it has ended; it takes no calls any more"):
        role.group.echo()


def test_a_callback_may_wait_for_another_call(cluster: Cluster) -> None:
    role = cluster.role(1)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    for number in range(3):
        ref = role.group.echo.call_async(number)
        ref.add_done_callback(lambda done: answers.put((done.result(), role.group.echo("inside"))))
        assert role.group.echo("beside") == ["beside"]
    found = sorted(answers.get(timeout=WAIT_TIMEOUT) for _ in range(3))  # type: ignore[type-var]
    assert found == [([number], ["inside"]) for number in range(3)]
