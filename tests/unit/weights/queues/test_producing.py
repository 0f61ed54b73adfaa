"""A producer's end without transports: what consumers ask comes as values, and answers are collected."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import QueueTimeout
from unirun.roles.calls.codec import load
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.weights.gate import Counts
from unirun.weights.producing import AwaitItem, Done, Hold, Producer, Take, offered
from unirun.weights.publishing import Blocks

MOST = 4
RANKS = st.integers(0, 2)


class Items(RuleBasedStateMachine):
    """Consumers take, use, forget and die in any order; a list says what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.producer = Producer("q", lambda: 0.0)
        self.put = 0
        self.there: list[int] = []
        self.held: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.incarnation = [0, 0, 0]
        self.used: list[int] = []
        self.dropped = 0
        self.waiting: list[Parcel] = []
        self.expected_wakes = 0

    def who(self, rank: int) -> WorkerId:
        return WorkerId("actor", rank, self.incarnation[rank])

    @precondition(lambda self: len(self.there) < MOST)
    @rule()
    def puts(self) -> None:
        self.producer.put(self.put + 1, None, MOST, 0.0)
        self.put += 1
        self.there.append(self.put)

    @rule(rank=RANKS, here=st.booleans())
    def takes(self, rank: int, here: bool) -> None:
        answers: list[Parcel] = []
        self.producer.handle(Take("q", self.who(rank), here), answers.append)
        (parcel,) = answers
        said = offered(parcel.head)
        if not self.there:
            assert said.number == 0
            return
        assert said.number == self.there[0]
        if parcel.lent is not None:
            parcel.lent.released()
        else:
            assert load(parcel.buffers[0][: said.sizes[0]], ()) == said.number
        self.held[rank].append(self.there.pop(0))

    @rule(rank=RANKS, count=st.integers(1, 3), dropped=st.booleans())
    def uses(self, rank: int, count: int, dropped: bool) -> None:
        used, self.held[rank] = self.held[rank][:count], self.held[rank][count:]
        self.producer.handle(Done("q", self.who(rank), tuple(used), dropped), lambda _: None)
        self.used += used
        self.dropped += len(used) * dropped

    @rule(rank=RANKS, count=st.integers(0, 3))
    def connects_anew(self, rank: int, count: int) -> None:
        """Some answers were lost."""
        self.held[rank], lost = self.held[rank][:count], self.held[rank][count:]
        self.producer.handle(Hold("q", self.who(rank), tuple(self.held[rank])), lambda _: None)
        self.there = sorted([*lost, *self.there])

    @rule(rank=RANKS)
    def dies(self, rank: int) -> None:
        self.incarnation[rank] += 1
        alive = {self.who(each) for each in range(3)}
        self.producer.lost(lambda who: who not in alive)
        lost, self.held[rank] = self.held[rank], []
        self.there = sorted([*lost, *self.there])

    @rule()
    def waits(self) -> None:
        self.producer.handle(AwaitItem("q"), self.waiting.append)
        self.expected_wakes += 1

    @invariant()
    def no_item_is_lost_or_there_twice(self) -> None:
        held = [number for some in self.held.values() for number in some]
        assert sorted([*self.there, *held, *self.used]) == list(range(1, self.put + 1))
        assert (len(self.producer), self.producer.left) == (len(self.there), len(self.there) + len(held))

    @invariant()
    def the_gate_is_told_what_was_put_and_what_became_of_it(self) -> None:
        delivered = len(self.used) - self.dropped
        assert self.producer.counts() == Counts(0, self.put - self.dropped, delivered)

    @invariant()
    def who_waits_is_woken_as_soon_as_there_is_an_item(self) -> None:
        if self.there:
            assert len(self.waiting) == self.expected_wakes

    def teardown(self) -> None:
        """Items that consumers have count as used; all others are gone."""
        self.producer.close()
        delivered = len(self.used) - self.dropped + sum(map(len, self.held.values()))
        assert self.producer.counts() == Counts(0, delivered, delivered)
        assert self.producer.left == 0


TestItems = Items.TestCase


def free(parcel: Parcel) -> None:
    """The memory of an item is not mapped any more."""
    assert parcel.lent is not None
    parcel.lent.released()


@given(
    st.lists(st.sampled_from(["puts", "puts in vain", "takes", "gives up", "goes on"]), max_size=40),
    st.data(),
)
def test_items_wait_for_room_in_their_order_and_leave_it_to_the_next_when_they_give_up(
    actions: list[str], data: st.DataObject
) -> None:
    async def happens(producer: Producer) -> None:
        waiting: list[asyncio.Task[None]] = []
        there = 0
        for action in [*actions, "goes on"]:
            if action == "puts":
                waiting.append(asyncio.create_task(producer.put_async("an item", None, 2, inf)))
                await asyncio.sleep(0)
            elif action == "puts in vain" and not producer.has_room(2):
                with pytest.raises(QueueTimeout):
                    producer.put("an item", None, 2, -inf)
            elif action == "takes" and len(producer):
                producer.handle(Take("q", WorkerId("actor", 0, 0), True), free)
                there -= 1
            elif action == "gives up" and waiting:
                # The room for it may have come meanwhile.
                task = data.draw(st.sampled_from(waiting))
                if task.cancel():
                    waiting.remove(task)
            elif action == "goes on":
                for _ in range(9):
                    await asyncio.sleep(0)
                room = 2 - there
                assert [task.done() for task in waiting] == [n < room for n in range(len(waiting))]
                there, waiting = min(2, there + len(waiting)), waiting[room:]
                assert len(producer) == there
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert len(producer) == there

    with closing(Producer("q")) as producer:
        asyncio.run(happens(producer))


def test_room_that_was_given_and_is_given_up_goes_to_the_next_that_waits() -> None:
    producer = Producer("q")
    producer.put(1, None, 1, 0.0)
    first, second = producer._reserved(1), producer._reserved(1)
    producer.handle(Take("q", WorkerId("actor", 0, 0), False), lambda parcel: None)
    assert (first.done(), second.done()) == (True, False)
    producer._give_up(first)
    assert second.done()
    producer.close()


@pytest.mark.parametrize("awaited", [False, True])
def test_an_item_that_finds_no_memory_takes_no_room(awaited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def put() -> None:
        if awaited:
            asyncio.run(producer.put_async("an item", None, 1, -inf))
        else:
            producer.put("an item", None, 1, -inf)

    def fails(*_: object) -> None:
        raise MemoryError

    with closing(Producer("q")) as producer:
        with monkeypatch.context() as patch:
            patch.setattr(Blocks, "take", fails)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    put()
        put()
        assert producer.left == 1


@pytest.mark.parametrize("how", ["closed", "given up"])
def test_who_waits_for_the_last_item_hears_that_it_will_not_come(how: str) -> None:
    producer = Producer("q")
    waits = threading.Event()

    class Changed(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    producer._changed = Changed(producer._changed._lock)  # type: ignore[attr-defined]
    if how == "closed":
        producer.put("an item", None, 1, inf)
    else:
        room = producer._reserved(1)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(producer.join, time.monotonic() + 2 * WAIT_TIMEOUT)
        assert waits.wait(WAIT_TIMEOUT)
        if how == "closed":
            producer.close()
        else:
            producer._give_up(room)
        joined.result(WAIT_TIMEOUT)
    producer.close()


def test_an_item_that_waits_for_room_is_put_when_the_queue_is_closed() -> None:
    producer = Producer("q")
    producer.put("one", None, 1, inf)
    with ThreadPoolExecutor(1) as pool, closing(producer):
        waiting = pool.submit(producer.put, "two", None, 1, time.monotonic() + WAIT_TIMEOUT)
        eventually(lambda: bool(producer._full), "it waits")
        producer.close()
        waiting.result(WAIT_TIMEOUT / 2)
        assert len(producer) == 1


def test_an_item_whose_coroutine_is_closed_takes_no_room() -> None:
    producer = Producer("q")
    producer.put("one", None, 1, inf)

    async def story() -> None:
        put = producer.put_async("two", None, 1, time.monotonic() + WAIT_TIMEOUT)
        put.send(None)
        put.close()

    with closing(producer):
        asyncio.run(story())
        producer.handle(Take("q", WorkerId("actor", 0, 0), True), lambda _: None)
        assert producer.has_room(1)
