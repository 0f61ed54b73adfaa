"""A consumer in an event loop, which goes on while connections to producers are made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.weights.job import Job
from tests.unit.weights.queues.test_histories import End
from unirun.errors import QueueEnded


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
