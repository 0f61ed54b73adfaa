"""The two ends of a queue: what each role may do, whom the gate waits for, and the figures that each tells."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from msgspec.json import encode

from tests.unit.weights.job import Job, Worker
from tests.unit.weights.queues.test_histories import AHEAD, End
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import QueueEnded, QueueTimeout, UsageError
from unirun.roles.transport.protocol import Parcel
from unirun.weights.hub import MAX_WAIT_SECONDS
from unirun.weights.messages import WEIGHTS
from unirun.weights.producing import Take
from unirun.weights.queue import QUEUE_REPORT_INTERVAL, Item, Queue
from unirun.wire.progress import IDLE, page

FIRST = 2 * (AHEAD + 1)
"""The items that producers may begin before the first batch of two is trained."""


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(rollout=2, actor=2, critic=1)
    yield made
    made.close()


@pytest.fixture
def rollout(job: Job) -> End:
    return End(job.starts("rollout", 0, "a"))


@pytest.fixture
def actor(job: Job) -> End:
    return End(job.starts("actor", 0, "a"))


def begun(end: End) -> int:
    """Let items begin as long as that is possible at once."""
    for number in range(100):
        try:
            end.queue.admit(timeout=0.1)
        except QueueTimeout:
            return number
    raise AssertionError("nothing bounds the items")


def opened(end: End) -> None:
    """A consumer has asked once, and there was nothing."""
    with pytest.raises(QueueTimeout):
        end.queue.get(timeout=0.1)


ITEM = Item("rollout:0/0/1", "a value", 0)


@pytest.mark.parametrize(
    ("role", "method", "args", "what"),
    [
        ("actor", "put", ("a value",), "put"),
        ("actor", "put_async", ("a value",), "put"),
        ("actor", "admit", (), "admit"),
        ("actor", "admit_async", (), "admit"),
        ("actor", "join", (), "join"),
        ("rollout", "get", (), "get"),
        ("rollout", "get_batch", (2,), "get"),
        ("rollout", "get_some", (2,), "get"),
        ("rollout", "get_async", (), "get"),
        ("rollout", "get_batch_async", (2,), "get"),
        ("rollout", "drop", (ITEM,), "drop"),
        ("rollout", "keep", (1,), "keep"),
        ("rollout", "advance", (1,), "advance"),
    ],
)
def test_an_end_does_only_what_its_role_does(
    rollout: End, actor: End, role: str, method: str, args: tuple[Any, ...], what: str
) -> None:
    ends = {"rollout": rollout, "actor": actor}
    (other,) = ends.keys() - {role}

    async def does() -> None:
        found = getattr(ends[role].queue, method)(*args)
        if asyncio.iscoroutine(found):
            await found

    with pytest.raises(UsageError) as caught:
        asyncio.run(does())
    assert (caught.value.problem, caught.value.remedy) == (
        f"{role} cannot {what} in queue 'q'",
        f"{other} can",
    )


@pytest.mark.parametrize(
    ("role", "options", "says"),
    [
        ("critic", {}, "critic has no part in queue 'q'"),
        ("rollout", {"consumer": "rollout"}, "rollout has no part in queue 'q'"),
        ("rollout", {"maxsize": 0}, "maxsize is 0"),
        ("rollout", {"batch": 1}, "batch and max_head_offpolicyness belong together"),
        ("actor", {"max_head_offpolicyness": 0}, "batch and max_head_offpolicyness belong together"),
        ("actor", {"batch": 0, "max_head_offpolicyness": 1}, "batch is 0, max_head_offpolicyness 1"),
        ("actor", {"batch": 1, "max_head_offpolicyness": -1}, "batch is 1, max_head_offpolicyness -1"),
        ("actor", {"max_concurrent_rollouts": 1}, "max_concurrent_rollouts is 1"),
        (
            "actor",
            {"batch": 1, "max_head_offpolicyness": 0, "max_concurrent_rollouts": 0},
            "max_concurrent_rollouts is 0",
        ),
        ("actor", {"consumer": "reward"}, "no role .reward."),
    ],
)
def test_numbers_and_roles_that_do_not_fit_are_errors(
    job: Job, role: str, options: dict[str, Any], says: str
) -> None:
    worker = job.starts(role, 0, "a")
    with pytest.raises(UsageError, match=says):
        worker.makes(Queue, "q", **{"producer": "rollout", "consumer": "actor"} | options)


def least(worker: Worker) -> Any:
    return worker.makes(
        Queue,
        "q",
        producer="rollout",
        consumer="actor",
        maxsize=1,
        batch=1,
        max_head_offpolicyness=0,
        max_concurrent_rollouts=1,
    )


def test_the_least_numbers_that_fit_let_one_item_through_at_a_time(job: Job) -> None:
    producer, consumer = (least(job.starts(role, 0, "a")) for role in ("rollout", "actor"))
    for version in range(2):
        with pytest.raises(QueueTimeout):
            consumer.get(timeout=0.1)
        with producer.admit(timeout=0.1):
            with pytest.raises(QueueTimeout):
                producer.admit(timeout=0.1)
            producer.put("a value", version=version, timeout=0.1)
        with pytest.raises(QueueTimeout):
            producer.put("too many", version=version, timeout=0.1)
        assert consumer.get(timeout=0.1).version == version
        consumer.advance(version + 1)


@pytest.mark.parametrize("awaited", [False, True])
def test_an_item_has_the_version_that_it_was_put_with_and_needs_one(
    rollout: End, actor: End, awaited: bool
) -> None:
    def put(**options: Any) -> None:
        if awaited:
            asyncio.run(rollout.queue.put_async("a value", **options))
        else:
            rollout.queue.put("a value", **options)

    with pytest.raises(UsageError, match="this one has no version"):
        put()
    put(version=3)
    found = actor.queue.get(timeout=0.1)
    assert (found.value, found.version) == ("a value", 3)


def test_some_items_are_those_that_have_come_and_no_more_than_wanted(rollout: End, actor: End) -> None:
    for number in range(3):
        rollout.queue.put(number, version=0)
    assert [item.value for item in actor.queue.get_some(2, timeout=0.1)] == [0, 1]
    assert [item.value for item in actor.queue.get_some(2, timeout=0.1)] == [2]
    began = actor.worker.job.now
    with pytest.raises(QueueTimeout):
        actor.queue.get_some(2, timeout=0.5)
    assert actor.worker.job.now == pytest.approx(began + 0.5)


@pytest.mark.parametrize(
    ("method", "count"), [("get_batch", -1), ("get_batch_async", -1), ("get_some", 0), ("get_some", -1)]
)
def test_a_number_of_items_that_there_cannot_be_is_an_error(
    rollout: End, actor: End, method: str, count: int
) -> None:
    for number in range(3):
        rollout.queue.put(number, version=0)
    with pytest.raises(QueueTimeout):
        actor.queue.get_batch(4, timeout=0.1)

    async def gets() -> None:
        found = getattr(actor.queue, method)(count, timeout=0.1)
        if asyncio.iscoroutine(found):
            await found

    with pytest.raises(UsageError, match=f"{count} items of queue 'q'"):
        asyncio.run(gets())
    assert actor.queue.get_batch(0, timeout=0.1) == []
    assert [item.value for item in actor.queue.get_batch(3, timeout=0.1)] == [0, 1, 2]


def test_an_item_that_is_put_after_hours_goes_to_the_consumer_that_waits(rollout: End, actor: End) -> None:
    with pytest.raises(QueueTimeout):
        actor.queue.get(timeout=10_000.0)
    rollout.queue.put("an item", version=0)
    assert actor.queue.get(timeout=0.1).value == "an item"


def test_an_item_that_a_dead_consumer_has_asked_for_is_there_for_others(
    job: Job, rollout: End, actor: End
) -> None:
    """Its request comes after the news of its end."""
    other = End(job.starts("actor", 1, "a"))
    rollout.queue.put("an item", version=0)
    job.dies(actor.worker)
    asked = Parcel(encode(Take("q", actor.worker.who, here=False)))
    rollout.worker.sockets.handlers[WEIGHTS](asked, lambda answer: None)
    assert other.queue.get(timeout=0.1).value == "an item"


def test_items_that_were_not_given_out_are_there_for_others_when_a_consumer_closes(
    job: Job, rollout: End, actor: End
) -> None:
    other = End(job.starts("actor", 1, "a"))
    for number in range(3):
        rollout.queue.put(number, version=0)
    with pytest.raises(QueueTimeout):
        actor.queue.get_batch(4, timeout=0.1)
    actor.queue.close()
    assert [item.value for item in other.queue.get_batch(3, timeout=0.1)] == [0, 1, 2]


def test_a_queue_that_a_producer_has_closed_and_made_again_has_items_for_a_consumer_that_waits(
    rollout: End, actor: End
) -> None:
    opened(actor)
    rollout.queue.close()
    End(rollout.worker).queue.put("an item", version=0)
    assert actor.queue.get(timeout=0.1).value == "an item"


@pytest.mark.parametrize("some", [False, True])
def test_items_that_are_here_are_given_out_though_all_producers_have_ended(
    job: Job, rollout: End, actor: End, some: bool
) -> None:
    other = End(job.starts("rollout", 1, "a"))
    for number in range(2):
        rollout.queue.put(number, version=0)
    with pytest.raises(QueueTimeout):
        actor.queue.get_batch(3, timeout=0.1)
    for end in (rollout, other):
        end.worker.phase = "ended"
    job.tells()
    with pytest.raises(QueueEnded):
        actor.queue.get_batch(3, timeout=0.1)
    found = actor.queue.get_some(3, timeout=0.1) if some else actor.queue.get_batch(2, timeout=0.1)
    assert [item.value for item in found] == [0, 1]
    with pytest.raises(QueueEnded):
        actor.queue.get_some(3, timeout=0.1)


def test_an_item_may_have_a_version_of_numpy(rollout: End, actor: End) -> None:
    rollout.queue.put("a value", version=numpy.int64(0))  # type: ignore[arg-type]
    actor.queue.advance(numpy.int64(1))  # type: ignore[arg-type]
    assert actor.queue.get(timeout=1.0).version == 0


def test_a_producer_that_waits_until_its_items_are_used_is_idle(rollout: End) -> None:
    rollout.queue.put("a value", version=0)

    def looks() -> None:
        try:
            eventually(lambda: page().fields[IDLE] == 1, "it is idle")
        finally:
            rollout.queue.close()

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(looks)
        rollout.queue.join(timeout=2 * WAIT_TIMEOUT)
    looking.result(WAIT_TIMEOUT)


class TestTheGate:
    def test_rank_0_of_the_consumer_has_it_and_no_other(self, job: Job, rollout: End, actor: End) -> None:
        other = End(job.starts("actor", 1, "a"))
        for end in (actor, other):
            opened(end)
            end.queue.keep(0)
            end.queue.advance(0)
        assert [[*end.worker.own_hub()._gates] for end in (rollout, actor, other)] == [[], ["q"], []]

    def test_kept_items_take_places_and_dropped_and_trained_ones_leave_theirs(
        self, rollout: End, actor: End
    ) -> None:
        opened(actor)
        actor.queue.keep(3)
        assert begun(rollout) == FIRST - 3
        actor.queue.keep(-1)
        assert begun(rollout) == 1
        actor.queue.advance(1)
        assert begun(rollout) == 2
        rollout.queue.put("a value", version=1)
        actor.queue.drop(actor.queue.get(timeout=0.1))
        assert begun(rollout) == 1

    def test_a_producer_that_has_not_told_its_counts_is_waited_for_as_long_as_it_lives(
        self, job: Job, rollout: End, actor: End
    ) -> None:
        other = End(job.starts("rollout", 1, "a"))
        assert other.queue.producer == "rollout"
        job.stalled.add(other.worker)
        opened(actor)
        assert begun(rollout) == 0
        job.dies(other.worker)
        assert begun(rollout) == FIRST

    def test_a_producer_that_asks_for_nothing_tells_its_counts_all_the_same(
        self, job: Job, rollout: End, actor: End
    ) -> None:
        other = End(job.starts("rollout", 1, "a"))
        other.queue.put("a value", version=0)
        with pytest.raises(QueueTimeout):
            actor.queue.get_batch(2, timeout=0.1)
        assert begun(rollout) == FIRST - 1

    @pytest.mark.parametrize("phase", ["ended", "lost"])
    def test_a_producer_that_does_not_listen_or_has_ended_is_not_waited_for(
        self, job: Job, rollout: End, actor: End, phase: str
    ) -> None:
        silent = job.starts("rollout", 1, "a")
        job.stalled.add(silent)
        if phase == "ended":
            End(silent)
            silent.phase = phase
            job.tells()
        opened(actor)
        assert begun(rollout) == FIRST

    @pytest.mark.parametrize("restarted", [False, True])
    def test_a_producer_that_asks_no_more_tells_what_has_become_of_its_items(
        self, job: Job, rollout: End, actor: End, restarted: bool
    ) -> None:
        other = End(job.starts("rollout", 1, "a"))
        opened(actor)
        admission = rollout.queue.admit(timeout=0.1)
        if restarted:
            job.dies(actor.worker)
            opened(End(job.starts("actor", 0, "a")))
        else:
            job.breaks(rollout.worker, actor.worker)
        admission.reject()
        assert begun(other) == FIRST

    def test_a_producer_begins_items_of_a_queue_that_it_makes_again(self, rollout: End, actor: End) -> None:
        opened(actor)
        assert begun(rollout) == FIRST
        rollout.queue.close()
        assert begun(End(rollout.worker)) == FIRST

    def test_a_producer_that_can_start_no_thread_tells_it_later(
        self, job: Job, rollout: End, actor: End, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(**_: object) -> None:
            raise RuntimeError("can't start new thread")

        other = End(job.starts("rollout", 1, "a"))
        opened(actor)
        admission = rollout.queue.admit(timeout=0.1)
        job.breaks(rollout.worker, actor.worker)
        with monkeypatch.context() as limited:
            thread = SimpleNamespace(start=start)
            limited.setattr("unirun.weights.admitting.threading.Thread", lambda **_: thread)
            admission.reject()
        job.tells()
        assert begun(other) == FIRST

    def test_who_is_held_back_waits_as_long_as_it_said(self, rollout: End, actor: End) -> None:
        opened(actor)
        assert begun(rollout) == FIRST
        began = rollout.worker.job.now
        with pytest.raises(QueueTimeout):
            rollout.queue.admit(timeout=0.7)
        assert rollout.worker.job.now == pytest.approx(began + 0.7)


@pytest.mark.parametrize("timeout", [None, 2.0, float("inf")])
def test_a_wait_is_as_long_as_it_says_or_as_a_call(rollout: End, actor: End, timeout: float | None) -> None:
    job, peers = actor.worker.job, actor.worker.peers
    peers.welcome = SimpleNamespace(call_timeout=7.0, roles=())  # type: ignore[assignment]
    opened(actor)
    began, expected = job.now, {None: 7.0, 2.0: 2.0}.get(timeout, MAX_WAIT_SECONDS)
    with pytest.raises(QueueTimeout):
        actor.queue.get(timeout=timeout)
    assert job.now - began == pytest.approx(expected)


def test_each_end_tells_what_it_has_and_how_long_it_has_waited(rollout: End, actor: End) -> None:
    """At most once in so many seconds."""
    job = rollout.worker.job
    opened(actor)
    assert begun(rollout) == FIRST
    rollout.queue.put("old", version=0)
    rollout.queue.put("new", version=AHEAD + 1)
    job.later(QUEUE_REPORT_INTERVAL)
    with pytest.raises(QueueTimeout):
        rollout.queue.admit(timeout=2 * QUEUE_REPORT_INTERVAL)
    job.later(QUEUE_REPORT_INTERVAL)
    rollout.queue.put("new", version=AHEAD + 1)
    waited = 2 * QUEUE_REPORT_INTERVAL
    assert rollout.worker.told == {
        "q/items": 2.0,
        "q/admitted": FIRST - 2.0,
        "q/held_back_s": pytest.approx(waited + 0.1),
        "q/full_s": 0.0,
    }
    actor.queue.advance(AHEAD + 1)
    assert actor.queue.get(timeout=0.1).value == "new"
    assert actor.worker.told["q/too_old"] == 0.0, "it was told before"
    job.later(QUEUE_REPORT_INTERVAL)
    with pytest.raises(QueueTimeout):
        actor.queue.get_batch(9, timeout=2 * QUEUE_REPORT_INTERVAL)
    assert actor.worker.told == {"q/too_old": 1.0, "q/empty_s": pytest.approx(waited + 0.1)}
