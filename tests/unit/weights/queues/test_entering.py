"""The way of a producer to the gate: threads and tasks that wait, connections that end, gates that are others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import PeerLost, QueueTimeout
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.weights.admitting import Entrance, Gate
from unirun.weights.gate import Bound, Enter
from unirun.weights.producing import Producer

ME = WorkerId("rollout", 0, 0)


class FakeConnection:
    """A connection to a gate in this process. `holds` keeps answers back until it is cut."""

    def __init__(self, gate: Gate, *, holds: bool = False) -> None:
        self.lost = False
        self._gate, self._holds = gate, holds
        self._open: list[Future[Parcel]] = []

    def ask(self, request: Enter) -> Future[Parcel]:
        answer: Future[Parcel] = Future()
        if self.lost:
            raise PeerLost("it is gone", "try again", worker="actor:0")
        self._open.append(answer)
        self._gate.handle(request, lambda parcel: self._answer(answer, parcel))
        return answer

    def _answer(self, answer: Future[Parcel], parcel: Parcel) -> None:
        if answer in self._open and not self._holds:
            self._open.remove(answer)
            answer.set_result(parcel)

    def cut(self) -> None:
        self.lost = True
        answers, self._open = self._open, []
        for answer in answers:
            answer.set_exception(PeerLost("it is gone", "try again", worker="actor:0"))


@pytest.fixture(autouse=True)
def producers_close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Items that were put are given back."""
    made: list[Rollouts] = []
    monkeypatch.setattr(Rollouts, "made", made, raising=False)
    yield
    for each in made:
        each.producer.close()


class Rollouts:
    """A producer, its entrance, and the gate that it reaches."""

    made: list[Rollouts]

    def __init__(self, bound: Bound) -> None:
        self.gate = Gate(lambda who: False)
        self.gate.open(bound, 0, frozenset)
        self.producer = Producer("q")
        self.line: Any = FakeConnection(self.gate)
        self.entrance = Entrance(
            "q", ME, self.producer.admissions, self.producer.counts, lambda known, connect: self.line, "actor"
        )
        self.producer.counted = self.entrance.changed
        self.made.append(self)

    def admit(self, seconds: float = WAIT_TIMEOUT) -> Any:
        return self.entrance.admit(time.monotonic() + seconds)

    async def admit_async(self, seconds: float = WAIT_TIMEOUT) -> Any:
        return await self.entrance.admit_async(time.monotonic() + seconds)

    def put(self) -> None:
        self.producer.put("an item", 0, 10_000, time.monotonic())

    @property
    def open(self) -> int:
        return self.producer.counts().open

    @property
    def counted(self) -> int:
        """The admissions that the gate counts."""
        return self.gate._state.open


def test_thousands_of_episodes_are_open_in_one_thread_and_no_more_than_may_be() -> None:
    rollouts = Rollouts(Bound(10_000, 0, 1000))
    threads, most = threading.active_count(), 0

    async def episode(number: int) -> None:
        nonlocal most
        with await rollouts.admit_async():
            most = max(most, rollouts.open)
            await asyncio.sleep(0.001)
            if number % 3:
                await rollouts.producer.put_async(number, 0, 10_000, time.monotonic())

    async def episodes() -> int:
        running = asyncio.gather(*map(episode, range(5000)))
        await asyncio.sleep(0)
        used = threading.active_count()
        await running
        return used

    assert asyncio.run(episodes()) <= threads + 1, "one thread connects"
    assert most == 1000
    assert (rollouts.counted, rollouts.gate._state.begun) == (0, 3333)


def test_those_that_wait_are_admitted_in_their_order() -> None:
    rollouts = Rollouts(Bound(1, 0))

    async def waits() -> list[int]:
        order = []

        async def one(number: int) -> None:
            await rollouts.admit_async()
            order.append(number)
            rollouts.put()

        waiting = [asyncio.create_task(one(number)) for number in range(5)]
        await asyncio.sleep(0)
        for version in range(5):
            rollouts.gate.advance(version)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await waiting.pop(0)
        return order

    assert asyncio.run(waits()) == [0, 1, 2, 3, 4]


def test_an_item_uses_the_admission_of_its_own_thread_though_another_one_has_an_older_one() -> None:
    rollouts = Rollouts(Bound(2, 0, None))
    older = rollouts.admit()

    def admits_and_puts() -> Any:
        own = rollouts.admit()
        rollouts.put()
        return own

    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(admits_and_puts).result(WAIT_TIMEOUT)
    used.reject()
    assert rollouts.open == 1, "it was used already"
    older.reject()
    assert rollouts.open == 0


def test_a_task_that_is_cancelled_leaves_its_place_to_others() -> None:
    rollouts = Rollouts(Bound(1, 0))

    async def waits() -> None:
        admission = await rollouts.admit_async()
        first, second = (asyncio.create_task(rollouts.admit_async()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        admission.reject()
        await second
        # Admitted, and cancelled before it could run.
        third, fourth = (asyncio.create_task(rollouts.admit_async()) for _ in range(2))
        await asyncio.sleep(0)
        second.result().reject()
        third.cancel()
        await fourth

    asyncio.run(waits())
    assert (rollouts.open, rollouts.counted) == (1, 1)


def test_who_gives_up_is_told_why_and_leaves_nothing_behind() -> None:
    rollouts = Rollouts(Bound(1, 0))
    with rollouts.admit():
        with pytest.raises(QueueTimeout, match="1 admissions for which it has put nothing"):
            rollouts.admit(0.01)
        with pytest.raises(QueueTimeout):
            asyncio.run(rollouts.admit_async(0.01))
    assert (rollouts.open, rollouts.counted) == (0, 0)
    rollouts.gate.advance(9)
    assert rollouts.counted == 0, "nobody waits"


def test_an_item_that_is_put_lets_the_next_one_be_made_at_once() -> None:
    rollouts = Rollouts(Bound(9, 0, 1))
    rollouts.admit()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollouts.admit)
        eventually(lambda: rollouts.gate._state.waiting, "it waits")
        rollouts.put()
        waiting.result(WAIT_TIMEOUT)


def test_answers_that_were_lost_with_their_connection_admit_nobody() -> None:
    rollouts = Rollouts(Bound(2, 0))
    rollouts.line = holding = FakeConnection(rollouts.gate, holds=True)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(rollouts.admit) for _ in range(2)]
        eventually(lambda: rollouts.counted, "the gate has admitted them")
        rollouts.line = FakeConnection(rollouts.gate)
        holding.cut()
        for each in waiting:
            each.result(WAIT_TIMEOUT)
    assert (rollouts.open, rollouts.counted) == (2, 2)


def test_a_gate_that_cannot_be_reached_is_asked_when_it_can() -> None:
    rollouts = Rollouts(Bound(1, 0))
    line, rollouts.line = rollouts.line, None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollouts.admit)
        eventually(lambda: rollouts.entrance._waiters, "it waits")
        rollouts.line = line
        rollouts.entrance.wake()
        waiting.result(WAIT_TIMEOUT)


def test_a_gate_that_has_ended_for_good_is_told_to_all_that_wait() -> None:
    rollouts = Rollouts(Bound(1, 0))
    rollouts.admit()

    def ended(known: Any, connect: bool) -> None:
        raise PeerLost("it has ended", "ask before", worker="actor:0")

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(rollouts.admit) for _ in range(3)]
        eventually(lambda: len(rollouts.entrance._waiters) == 3, "they wait")
        rollouts.entrance._reach = ended
        rollouts.line.cut()
        for each in waiting:
            with pytest.raises(PeerLost):
                each.result(WAIT_TIMEOUT)


def test_an_event_loop_goes_on_while_one_thread_connects_for_all_tasks_that_wait() -> None:
    rollouts = Rollouts(Bound(100, 0))
    line, reached, threads = rollouts.line, threading.Event(), set[int]()

    def reach(known: Any, connect: bool) -> Any:
        if not connect:
            return line if reached.is_set() else None
        threads.add(threading.get_ident())
        assert reached.wait(WAIT_TIMEOUT)
        return line

    rollouts.entrance._reach = reach

    async def tasks() -> None:
        waiting = asyncio.gather(*(rollouts.admit_async() for _ in range(100)))
        while not threads:
            await asyncio.sleep(0.001)
        reached.set()
        await waiting

    asyncio.run(tasks())
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert rollouts.open == 100


def test_puts_that_wait_for_room_are_awaited_too() -> None:
    producer = Producer("q")

    async def puts() -> None:
        await producer.put_async(0, None, 1, time.monotonic())
        with pytest.raises(QueueTimeout, match="queue 'q' was full, with 1 items"):
            await producer.put_async(1, None, 1, time.monotonic())
        first, second = (
            asyncio.create_task(producer.put_async(number, None, 1, time.monotonic() + WAIT_TIMEOUT))
            for number in (1, 2)
        )
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        producer._take(WorkerId("actor", 0, 0), here=False)
        await second

    asyncio.run(puts())
    assert (len(producer), producer.left) == (1, 2)
    producer.close()
