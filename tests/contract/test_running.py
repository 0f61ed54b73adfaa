"""Calls that run: their order, their number, and those that run beside each other."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from tests.contract.cluster import Cluster, Role
from tests.contract.connections import CuttableConnections
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.roles import RoleGroup, wait

T = TypeVar("T")


def test_every_worker_answers_in_rank_order(shared_role: Role) -> None:
    assert shared_role.group.number() == [0, 1, 2]
    assert shared_role.group[1:].number() == [1, 2]
    assert shared_role.group[2].number() == 2
    assert shared_role.group.first() == 0


def test_calls_run_in_the_main_thread_of_their_own_process(cluster: Cluster, shared_role: Role) -> None:
    answers = shared_role.group.me()
    assert [answer[:3] for answer in answers] == [
        (f"{shared_role.name}:{rank}", 0, shared_role[rank].pid) for rank in range(3)
    ]
    assert all(main for *_, main in answers) or cluster.kind == "inproc"


def test_calls_run_in_the_order_in_which_they_were_made(cluster: Cluster) -> None:
    role = cluster.role(2)
    refs = [role.group[number % 2].note.call_async(number) for number in range(600)]
    refs += [role.group.note.call_async(number) for number in range(600, 700)]
    assert [ref.result(WAIT_TIMEOUT) for ref in refs[:600]] == list(range(600))
    evens, odds = role.group.ran()
    assert evens == [*range(0, 600, 2), *range(600, 700)]
    assert odds == [*range(1, 600, 2), *range(600, 700)]


def test_large_and_small_calls_keep_their_order_too(cluster: Cluster) -> None:
    role = cluster.role(1)
    refs = [
        role.group.note.call_async(torch.full((1 << (n % 3) * 9,), n, dtype=torch.int32)) for n in range(60)
    ]
    wait(refs, len(refs), WAIT_TIMEOUT)
    assert [int(tensor[0]) for tensor in role.group[0].ran()] == list(range(60))


def test_calls_of_several_threads_each_keep_their_order(cluster: Cluster) -> None:
    role = cluster.role(1)

    def make(name: str) -> None:
        refs = [role.group.note.call_async((name, number)) for number in range(150)]
        wait(refs, len(refs), WAIT_TIMEOUT)

    threads = [threading.Thread(target=make, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_TIMEOUT)
    ran = role.group[0].ran()
    assert len(ran) == 600
    for name in "abcd":
        assert [number for who, number in ran if who == name] == list(range(150))


def test_a_thousand_calls_are_in_flight_at_once(cluster: Cluster) -> None:
    role = cluster.role(2)
    gates = role.group.hold.call_async("flood")
    for worker in role:
        worker.expect("holding flood")
    refs = [role.group[number % 2].echo.call_async(number) for number in range(1000)]
    assert not any(ref.done() for ref in refs)
    role.open("flood")
    assert [ref.result(WAIT_TIMEOUT) for ref in refs] == list(range(1000))
    assert gates.result() == ["flood"] * 2


def test_a_call_runs_once_when_the_connection_breaks_while_it_runs(cluster: Cluster) -> None:
    role = cluster.role(1)
    with CuttableConnections(role) as connections:
        assert role.group.note("before") == ["before"]
    ref = role.group.hold.call_async("midway")
    queued = [role.group.note.call_async(number) for number in range(20)]
    role[0].expect("holding midway")
    connections.cut()
    role[0].open("midway")
    assert ref.result(WAIT_TIMEOUT) == ["midway"]
    assert [each.result(WAIT_TIMEOUT) for each in queued] == [[number] for number in range(20)]
    assert role.group[0].ran() == ["before", "midway", *range(20)]


def test_every_call_runs_once_however_often_the_connection_breaks(cluster: Cluster) -> None:
    role = cluster.role(1)
    refs = []
    for round_number in range(12):
        with CuttableConnections(role) as connections:
            assert role.group.echo(round_number) == [round_number]
        refs += [role.group.note.call_async((round_number, number)) for number in range(25)]
        wait(refs[-25:], 1 + round_number, WAIT_TIMEOUT)
        connections.cut()
        eventually(refs[-1].done, "the last answer comes, over whatever connection")
    assert [ref.result(WAIT_TIMEOUT)[0] for ref in refs] == role.group[0].ran()
    assert set(Counter(role.group[0].ran()).values()) == {1}


def test_target_any_chooses_the_worker_with_the_fewest_open_calls(shared_role: Role) -> None:
    assert Counter(shared_role.group.anyone() for _ in range(9)) == {0: 3, 1: 3, 2: 3}
    busy = shared_role.group[1].hold.call_async("spread")
    shared_role[1].expect("holding spread")
    assert Counter(shared_role.group.anyone() for _ in range(8)) == {0: 4, 2: 4}
    shared_role.open("spread")
    assert busy.result(WAIT_TIMEOUT) == "spread"


def test_open_calls_of_target_any_are_counted(shared_role: Role) -> None:
    refs = [shared_role.group.anyone_holds.call_async("shared") for _ in range(6)]
    shared_role.open("shared")
    assert sorted(ref.result(WAIT_TIMEOUT) for ref in refs) == [0, 0, 1, 1, 2, 2]


def test_map_calls_one_worker_per_item_and_keeps_the_order_of_results(shared_role: Role) -> None:
    assert shared_role.group.echo.map(range(50)) == list(range(50))
    assert set(shared_role.group.number.map([])) == set()


def test_map_gives_fewer_items_to_a_slow_worker(cluster: Cluster) -> None:
    role = cluster.role(2)
    done = threading.Event()
    results: list[int] = []

    def work() -> None:
        results.extend(role.group.hold_if.map([0] * 40, "slow"))
        done.set()

    threading.Thread(target=work, daemon=True).start()
    role[0].expect("holding slow")
    eventually(lambda: len(role.group[1].ran()) >= 36, "the other worker does what it can")
    assert not done.is_set()
    role.open("slow")
    assert done.wait(WAIT_TIMEOUT)
    assert Counter(results)[1] >= 36


def test_concurrent_and_async_methods_run_during_a_long_call(cluster: Cluster) -> None:
    role = cluster.role(1)
    long = role.group.hold.call_async("long")
    role[0].expect("holding long")
    refs = [
        getattr(role.group, method).call_async(f"{method}{n}")
        for method in ("beside", "meanwhile")
        for n in range(2)
    ]
    for method in ("beside", "meanwhile"):
        for number in range(2):
            role[0].expect(f"holding {method}{number}")
    third = role.group.beside.call_async("third")
    assert not third.done()
    for gate in ("beside1", "meanwhile1", "meanwhile0", "beside0", "third"):
        role[0].open(gate)
    assert [ref.result(WAIT_TIMEOUT) for ref in refs] == [
        ["beside0"],
        ["beside1"],
        ["meanwhile0"],
        ["meanwhile1"],
    ]
    assert third.result(WAIT_TIMEOUT) == ["third"]
    assert not long.done()
    role[0].open("long")
    assert long.result(WAIT_TIMEOUT) == ["long"]


def test_calls_of_other_threads_are_answered_while_one_waits(cluster: Cluster) -> None:
    role = cluster.role(1)
    waiting = in_thread(lambda: role.group[0].hold("patience"))
    role[0].expect("holding patience")
    others = [in_thread(partial(role.group[0].echo_beside, n)) for n in range(8)]
    assert [other.get(timeout=WAIT_TIMEOUT) for other in others] == list(range(8))
    refs = [role.group[0].echo_beside.call_async(bytes(1 << 20)) for n in range(30)]
    assert [len(ref.result(WAIT_TIMEOUT)) for ref in refs] == [1 << 20] * 30
    refs = [role.group[0].echo_beside.call_async(n) for n in range(300)]
    assert [ref.result(WAIT_TIMEOUT) for ref in refs] == list(range(300))
    assert waiting.empty()
    role[0].open("patience")
    assert waiting.get(timeout=WAIT_TIMEOUT) == "patience"


def test_many_threads_wait_at_once(cluster: Cluster) -> None:
    role = cluster.role(2)

    def work(name: int) -> bool:
        return all(role.group[(name + n) % 2].echo((name, n)) == (name, n) for n in range(100))

    answers = [in_thread(partial(work, name)) for name in range(8)]
    assert all(answer.get(timeout=WAIT_TIMEOUT) for answer in answers)


def in_thread(action: Callable[[], T]) -> queue.SimpleQueue[T]:
    """The queue that will have the result of `action`."""
    answer: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(action()), daemon=True).start()
    return answer


def test_workers_keep_no_results_that_were_acked(cluster: Cluster) -> None:
    role = cluster.role(2)
    for number in range(50):
        role.group.echo(number)
    # What was answered last is acked with the next call.
    assert max(role.kept()) <= 1
    refs = [role.group.echo.call_async(number) for number in range(200)]
    wait(refs, len(refs), WAIT_TIMEOUT)
    role.group.echo()
    assert max(role.kept()) <= 1


def test_large_results_are_acked_at_once(cluster: Cluster) -> None:
    role = cluster.role(1)
    role.group.echo()
    assert role.group[0].echo(torch.ones(1 << 19)).numel() == 1 << 19
    eventually(lambda: role[0].ask("kept") == 0, "the worker keeps nothing")


def test_results_after_the_deadline_are_acked_too(cluster: Cluster) -> None:
    role = cluster.role(1)
    ref = role.group.hold_briefly.call_async("late")
    assert isinstance(ref.exception(WAIT_TIMEOUT), TimeoutError)
    role[0].open("late")

    def only_the_latest_is_kept() -> bool:
        # Answers may overtake each other; each call takes along the acks of those that came before it.
        role.group.echo()
        return role.kept() == [1]

    eventually(only_the_latest_is_kept, "the late result is let go")


def test_a_worker_serves_several_callers_at_once(cluster: Cluster) -> None:
    role = cluster.role(1)
    other = cluster.trainer(0, call_many, role)
    assert [role.group[0].echo.call(number) for number in range(200)] == list(range(200))
    other.expect("all answered")


def call_many(group: RoleGroup, control: Connection) -> None:
    """The other caller's part."""
    if [group[0].echo(number) for number in range(200)] == list(range(200)):
        control.send("all answered")
