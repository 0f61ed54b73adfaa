"""Producers and consumers over sockets, as in a job: on one host and as if on two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.unit.weights.harness import WeightsHarness, weights_harness
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import EncodingError, QueueTimeout
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import WorkerId
from unirun.weights.gate import Bound, Counts
from unirun.weights.hub import request_of
from unirun.weights.producing import Demand, Hold, Producer
from unirun.weights.queue import Consumer, Item, RemoteProducer

MANY = 1000
"""As `maxsize`: no producer waits."""


class ConnectedConsumer:
    """One consumer, its connections to all producers, and who it is."""

    def __init__(self, queue_harness: QueueHarness, rank: int, incarnation: int, bound: Bound | None) -> None:
        self.me = WorkerId("actor", rank, incarnation)
        self.consumer = Consumer("q", bound)
        self._queue_harness, self._feeds = queue_harness, list[RemoteProducer]()
        self.connect()

    def connect(self) -> None:
        """Connect to all producers, anew if it was connected."""
        self.cut()
        self._feeds = [
            RemoteProducer(
                "q",
                self.me,
                line,
                self.consumer.held(line.who),
                self.consumer.changed,
                here=not self._queue_harness.tcp,
            )
            for line in self._queue_harness.lines()
        ]

    def cut(self) -> None:
        """End the connections, as a network does."""
        for feed in self._feeds:
            feed.line.close()

    def get(self, count: int = 1, within: float = WAIT_TIMEOUT) -> list[Item]:
        """The next items."""
        return self.consumer.get(count, lambda: self._feeds, time.monotonic() + within)

    def values(self, count: int = 1) -> list[Any]:
        """The values of the next items."""
        return [item.value for item in self.get(count)]

    def done(self) -> None:
        """All were used; returns when producers know."""
        self.consumer.done(self._feeds)
        for feed in self._feeds:
            feed._tell(Hold("q", self.me, tuple(self.consumer.held(feed.line.who)))).result(WAIT_TIMEOUT)


class QueueHarness:
    """Producers, which listen, and consumers that come."""

    def __init__(self, weights_harness: WeightsHarness, *, tcp: bool) -> None:
        self._place, self.tcp = weights_harness, tcp
        self.producers: list[Producer] = []
        self._endpoints: list[tuple[WorkerId, str]] = []

    def producer(self) -> Producer:
        """Another one."""
        producer = Producer("q")

        def handle(parcel: Parcel, reply: Reply) -> None:
            request = request_of(parcel.head)
            assert isinstance(request, Demand)
            producer.handle(request, reply)

        who = WorkerId("rollout", len(self.producers), 0)
        self.producers.append(producer)
        self._endpoints.append((who, self._place.serve(who, handle, tcp=self.tcp)))
        return producer

    def lines(self) -> Iterator[Any]:
        """New connections to all producers."""
        return (self._place.line(who, endpoint, tcp=self.tcp) for who, endpoint in self._endpoints)

    def consumer(self, rank: int = 0, incarnation: int = 0, bound: Bound | None = None) -> ConnectedConsumer:
        """A consumer that is connected to all producers there are."""
        return ConnectedConsumer(self, rank, incarnation, bound)


@pytest.fixture(params=[False, True], ids=["one host", "two hosts"])
def queue_harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueueHarness]:
    with weights_harness(tmp_path) as found:
        made = QueueHarness(found, tcp=request.param)
        yield made
        for producer in made.producers:
            producer.close()


def test_items_come_in_order_exactly_as_they_were_put(queue_harness: QueueHarness) -> None:
    producer, consumer = queue_harness.producer(), queue_harness.consumer()
    values: list[Any] = [
        {"tokens": torch.arange(5), "reward": 1.5, "text": "a" * 3000},
        torch.randn(300, 7).bfloat16(),
        torch.randn(4, 6).t(),
        torch.empty(0, 3, dtype=torch.int64),
        numpy.arange(1000, dtype=numpy.float64),
        None,
    ]
    for value in values:
        producer.put(value, None, MANY, time.monotonic())
    found = consumer.values(6)
    assert found[0]["tokens"].equal(values[0]["tokens"])
    assert (found[0]["reward"], found[0]["text"]) == (1.5, "a" * 3000)
    for value, other in zip(values[1:4], found[1:4], strict=True):
        assert (other.dtype, other.shape) == (value.dtype, value.shape)
        assert other.equal(value)
    assert (found[4] == values[4]).all()
    assert found[5] is None


def test_an_item_may_be_changed_by_who_has_put_it_and_by_who_has_it(queue_harness: QueueHarness) -> None:
    producer, consumer = queue_harness.producer(), queue_harness.consumer()
    mine = torch.ones(100_000)
    producer.put(mine, None, MANY, time.monotonic())
    mine.zero_()
    (value,) = consumer.values()
    assert value.eq(1).all()
    value.zero_()
    consumer.cut()
    producer.lost(lambda who: True)
    (again,) = queue_harness.consumer(1).values()
    assert again.eq(1).all()


def test_a_full_queue_makes_its_producer_wait_until_an_item_is_taken(queue_harness: QueueHarness) -> None:
    producer, consumer = queue_harness.producer(), queue_harness.consumer()
    for value in range(3):
        producer.put(value, None, 3, time.monotonic() + WAIT_TIMEOUT)
    with pytest.raises(QueueTimeout, match="queue 'q' was full, with 3 items, until the deadline"):
        producer.put(3, None, 3, time.monotonic())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.put, 3, None, 3, time.monotonic() + WAIT_TIMEOUT)
        assert not waiting.done()
        assert consumer.values() == [0]
        waiting.result(WAIT_TIMEOUT)
    assert consumer.values(3) == [1, 2, 3]


def test_an_empty_queue_makes_its_consumer_wait_and_keeps_what_has_come(queue_harness: QueueHarness) -> None:
    producer, consumer = queue_harness.producer(), queue_harness.consumer()
    producer.put("a", None, MANY, time.monotonic())
    with pytest.raises(QueueTimeout, match="queue 'q' had . of 2 items until the deadline"):
        consumer.get(2, within=0.3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.values, 2)
        producer.put("b", None, MANY, time.monotonic())
        assert waiting.result(WAIT_TIMEOUT) == ["a", "b"]


def test_a_consumer_takes_no_more_than_it_asked_for(queue_harness: QueueHarness) -> None:
    producers, consumer = [queue_harness.producer() for _ in range(3)], queue_harness.consumer()
    for producer in producers:
        for value in range(4):
            producer.put(value, None, MANY, time.monotonic())
    consumer.get(5)
    assert sum(map(len, producers)) == 7
    assert all(len(producer) in (2, 3) for producer in producers)


def test_a_consumer_that_takes_some_does_not_wait_for_more(queue_harness: QueueHarness) -> None:
    producer, consumer = queue_harness.producer(), queue_harness.consumer()

    def some(most: int, within: float = WAIT_TIMEOUT) -> list[Any]:
        deadline = time.monotonic() + within
        return [item.value for item in consumer.consumer.get_some(most, lambda: consumer._feeds, deadline)]

    with pytest.raises(QueueTimeout, match="had 0 of 1 items"):
        some(3, within=0.1)
    for value in range(5):
        producer.put(value, None, MANY, time.monotonic())
    taken: list[Any] = []
    while len(taken) < 5:
        now = some(3)
        assert 1 <= len(now) <= 3
        taken += now
    assert taken == [*range(5)]
    consumer.done()
    assert len(producer) == 0


def test_each_of_many_items_goes_to_one_of_many_consumers(queue_harness: QueueHarness) -> None:
    producers, consumers = (
        [queue_harness.producer(), queue_harness.producer()],
        [queue_harness.consumer(rank) for rank in range(3)],
    )

    def produce(producer: Producer) -> None:
        for value in range(100):
            producer.put((id(producer), value), None, 4, time.monotonic() + WAIT_TIMEOUT)

    with ThreadPoolExecutor(5) as pool:
        made = [pool.submit(produce, producer) for producer in producers]
        got = [
            pool.submit(lambda consumer: [consumer.values()[0] for _ in range(60)], consumer)
            for consumer in consumers
        ]
        lists = [future.result(WAIT_TIMEOUT) for future in got]
        rest = consumers[0].values(20)
        for future in made:
            future.result(WAIT_TIMEOUT)
    expected = {(id(producer), value) for producer in producers for value in range(100)}
    assert sorted([*rest, *(each for some in lists for each in some)]) == sorted(expected)
    for some in lists:
        for producer in producers:
            numbers = [value for who, value in some if who == id(producer)]
            assert numbers == sorted(numbers)


class TestADeath:
    def test_what_a_dead_consumer_had_is_taken_again_first_and_has_the_same_id(
        self, queue_harness: QueueHarness
    ) -> None:
        producer, first, second = (
            queue_harness.producer(),
            queue_harness.consumer(0),
            queue_harness.consumer(1),
        )
        for value in range(5):
            producer.put(value, None, MANY, time.monotonic())
        lost = first.get(3)
        first.cut()
        producer.lost(lambda who: who != second.me)
        assert [(item.id, item.value) for item in second.get(3)] == [(i.id, i.value) for i in lost]
        assert second.values(2) == [3, 4]

    def test_what_was_done_is_not_taken_again(self, queue_harness: QueueHarness) -> None:
        producer, first, second = (
            queue_harness.producer(),
            queue_harness.consumer(0),
            queue_harness.consumer(1),
        )
        for value in range(3):
            producer.put(value, None, MANY, time.monotonic())
        first.get(2)
        first.done()
        producer.lost(lambda who: who != second.me)
        assert second.values() == [2]
        assert (producer.delivered, producer.left) == (2, 1)

    def test_a_waiting_consumer_gets_what_a_dead_one_had(self, queue_harness: QueueHarness) -> None:
        producer, first, second = (
            queue_harness.producer(),
            queue_harness.consumer(0),
            queue_harness.consumer(1),
        )
        producer.put("a", None, MANY, time.monotonic())
        first.get()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(second.values)
            producer.lost(lambda who: who != second.me)
            assert waiting.result(WAIT_TIMEOUT) == ["a"]

    def test_an_item_that_another_one_has_now_is_not_done_by_the_first(
        self, queue_harness: QueueHarness
    ) -> None:
        producer, first, second = (
            queue_harness.producer(),
            queue_harness.consumer(0),
            queue_harness.consumer(1),
        )
        producer.put("a", None, MANY, time.monotonic())
        first.get()
        producer.lost(lambda who: who != second.me)
        second.get()
        first.done()
        assert (producer.delivered, producer.left) == (0, 1)
        second.done()
        assert (producer.delivered, producer.left) == (1, 0)

    def test_a_connection_that_broke_loses_no_item_and_takes_none_twice(
        self, queue_harness: QueueHarness
    ) -> None:
        producer, consumer = queue_harness.producer(), queue_harness.consumer()
        for value in range(4):
            producer.put(value, None, MANY, time.monotonic())
        held = consumer.get()
        for feed in consumer._feeds:
            feed.ask()
            feed._asked[0].exception(WAIT_TIMEOUT)
        # An answer has come that nobody has looked at, and the connection breaks.
        consumer.connect()
        assert consumer.values(3) == [1, 2, 3]
        assert [item.value for item in held] == [0]

    def test_memory_is_given_back_however_a_consumer_ends(self, queue_harness: QueueHarness) -> None:
        producer = queue_harness.producer()
        for number in range(40):
            producer.put(torch.zeros(1000), None, MANY, time.monotonic())
            consumer = queue_harness.consumer(0, number)
            consumer.get()
            consumer.cut()
            producer.lost(lambda who: True)
            consumer = queue_harness.consumer(1, number)
            assert consumer.get()
            consumer.done()
            consumer.cut()
        assert len(producer._blocks._blocks) <= 20


class TestJoining:
    def test_join_returns_when_all_items_were_used(self, queue_harness: QueueHarness) -> None:
        producer, consumer = queue_harness.producer(), queue_harness.consumer()
        producer.put("a", None, MANY, time.monotonic())
        consumer.get()
        with pytest.raises(QueueTimeout, match="1 items of queue 'q' were not used"):
            producer.join(time.monotonic())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(producer.join, time.monotonic() + WAIT_TIMEOUT)
            consumer.done()
            waiting.result(WAIT_TIMEOUT)


class TestAge:
    def test_items_that_are_too_old_are_not_given_out(self, queue_harness: QueueHarness) -> None:
        producer, consumer = queue_harness.producer(), queue_harness.consumer(bound=Bound(2, 1))
        for version in (0, 1, 0, 2):
            producer.put(f"of {version}", version, MANY, time.monotonic())
        consumer.consumer.version = 2
        assert consumer.values(2) == ["of 1", "of 2"]
        consumer.done()
        assert (producer.dropped, producer.delivered, consumer.consumer.dropped) == (2, 2, 2)

    def test_an_item_that_is_dropped_gives_its_admission_back_and_the_others_are_used(
        self, queue_harness: QueueHarness
    ) -> None:
        producer, consumer = queue_harness.producer(), queue_harness.consumer(bound=Bound(4, 1))
        for number in range(3):
            producer.put(number, 0, MANY, time.monotonic())
        items = consumer.get(3)
        consumer.consumer.drop(items[1], consumer._feeds)
        consumer.done()
        assert (producer.dropped, producer.delivered) == (1, 2)
        assert producer.counts() == Counts(open=0, made=2, delivered=2)


class TestWhatCannotBeSent:
    def test_a_value_that_cannot_be_pickled_is_told_to_who_puts_it(self, queue_harness: QueueHarness) -> None:
        producer, consumer = queue_harness.producer(), queue_harness.consumer()
        with pytest.raises(EncodingError, match="an item of queue 'q' cannot be sent"):
            producer.put(threading.Lock(), None, MANY, time.monotonic())
        producer.put("next", None, MANY, time.monotonic())
        assert consumer.values() == ["next"]

    def test_a_value_that_cannot_be_made_again_raises_once(self, queue_harness: QueueHarness) -> None:
        producer, consumer = queue_harness.producer(), queue_harness.consumer()
        producer.put(Broken(), None, MANY, time.monotonic())
        producer.put("next", None, MANY, time.monotonic())
        with pytest.raises(ZeroDivisionError):
            consumer.get()
        assert consumer.values() == ["next"]


class Broken:
    """Pickles, and raises when it is made again."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[int, int]]:
        return divmod, (1, 0)
