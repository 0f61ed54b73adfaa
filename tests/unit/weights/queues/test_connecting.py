"""A consumer in an event loop, which goes on while connections to producers are made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.weights.job import Job
from tests.unit.weights.queues.test_histories import End
from unirun.errors import QueueEnded, QueueTimeout
from unirun.roles.transport.protocol import Parcel
from unirun.weights.messages import WEIGHTS


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(rollout=2, actor=1)
    yield made
    made.close()


def test_connections_are_made_once_and_beside_the_loop(job: Job) -> None:
    producers = [End(job.starts("rollout", rank, "a")) for rank in range(2)]
    consumer = End(job.starts("actor", 0, "b"))
    sockets: Any = consumer.worker.sockets
    connect, threads = sockets.connect, list[int]()

    def connects(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return connect(*args)

    sockets.connect = connects

    async def take() -> list[Any]:
        found = await asyncio.gather(*(consumer.queue.get_async(timeout=1.0) for _ in producers))
        return sorted(item.value for item in found)

    for values in ([0, 1], [2, 3]):
        for end, value in zip(producers, values, strict=True):
            end.queue.put(value, version=0)
        assert asyncio.run(take()) == values
    assert len(threads) == len(producers)
    assert threading.get_ident() not in threads


def test_an_event_loop_hears_that_all_producers_have_ended(job: Job) -> None:
    ends = [End(job.starts("rollout", rank, "a")) for rank in range(2)]
    consumer = End(job.starts("actor", 0, "b"))
    for end in ends:
        end.worker.phase = "ended"
    job.tells()
    with pytest.raises(QueueEnded):
        asyncio.run(consumer.queue.get_async(timeout=1.0))


@pytest.mark.parametrize("phase", ["ended", "lost"])
def test_items_that_a_consumer_takes_with_it_are_there_for_others(phase: str) -> None:
    job = Job(rollout=1, actor=2)
    producer = End(job.starts("rollout", 0, "a"))
    first, second = (End(job.starts("actor", rank, "a")) for rank in range(2))
    producer.queue.put("item", version=0)
    assert first.queue.get(timeout=1.0).value == "item"
    with pytest.raises(QueueTimeout):
        second.queue.get(timeout=1.0)
    first.worker.phase = phase
    job.tells()
    assert second.queue.get(timeout=1.0).value == "item"
    job.close()


class Fragile:
    """A value that can be pickled, and cannot be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_an_item_that_cannot_be_read_is_dropped_and_the_next_one_comes(job: Job) -> None:
    producer = End(job.starts("rollout", 0, "a"))
    consumer = End(job.starts("actor", 0, "b"))
    for value in (Fragile(), "item"):
        producer.queue.put(value, version=0)
    with pytest.raises(ValueError, match="no number"):
        consumer.queue.get(timeout=1.0)
    assert consumer.queue.get(timeout=1.0).value == "item"
    consumer.queue.done()
    assert (producer.queue._items.left, producer.queue._items.dropped) == (0, 1)


def test_a_request_that_cannot_be_read_is_answered(job: Job) -> None:
    """Its sender does not wait for its deadline."""
    worker, answers = End(job.starts("rollout", 0, "a")).worker, list[Parcel]()
    for head in (b"", b"{}", b"no JSON"):
        worker.sockets.handlers[WEIGHTS](Parcel(head), answers.append)
    assert answers == [Parcel(b"")] * 3
