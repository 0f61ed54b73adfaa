"""A queue in any history: two producers, two consumers, connections that end, answers that are lost, and deaths.

The reference knows who has which item. An item is given out again only when its consumer has died, or could not say that
it has used it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.weights.job import Job, Worker
from unirun.errors import QueueTimeout
from unirun.weights.producing import KEPT, Producer
from unirun.weights.queue import QUEUE_REPORT_INTERVAL, Queue

RANK = st.integers(0, 1)
AHEAD = 1
MOST = 6
NODES = ("a", "b")
"""Those of consumers; producers are on the first one."""

GET_TIMEOUT = 0.6 * QUEUE_REPORT_INTERVAL
"""Some waits end between two reports."""

RARELY = st.integers(0, 3).map(lambda number: number == 0)
MOMENTS = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from(["put", "break", "consumer dies", "producer dies"]), RANK),
    max_size=2,
)
"""Things that happen, each after so many moments in which nothing does."""


class End:
    """One end of the queue."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.queue: Queue = worker.makes(
            Queue,
            "q",
            producer="rollout",
            consumer="actor",
            maxsize=MOST,
            batch=2,
            max_head_offpolicyness=AHEAD,
        )
        self.given: list[int] = []
        """The items that a consumer has got last."""
        self.wanted = 0
        """The number of items that it has asked for and not got."""
        self.waited = self.said = self.said_at = 0.0
        """The seconds that it has waited for items; what it has told of them last, and when."""

    def has_waited(self, began: float) -> None:
        """It has waited from `began` until now. It tells that before and after, at most once a second."""
        now = self.worker.job.now
        for moment in (began, now):
            self.waited += moment - began
            if moment >= self.said_at + QUEUE_REPORT_INTERVAL:
                self.said, self.said_at = self.waited, moment
        assert self.worker.told.get("q/empty_s", 0.0) == self.said


class Items(RuleBasedStateMachine):
    """The job, and who has which item."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Job(rollout=2, actor=2)
        self.version, self.number = 0, 0
        self.made: dict[int, tuple[int, int, Worker]] = {}
        """Of each item the number that its producer gives it, its version, and the producer."""
        self.out: set[int] = set()
        """Items that were given out, and may not be given out again."""
        self.producers: dict[int, End] = {}
        self.consumers: dict[int, End] = {}

    @initialize()
    def begins(self) -> None:
        for rank in range(2):
            self.producers[rank] = End(self.job.starts("rollout", rank, NODES[0]))
        for rank in range(2):
            self.start_consumer(rank)

    def start_consumer(self, rank: int) -> None:
        self.consumers[rank] = End(self.job.starts("actor", rank, NODES[rank]))
        self.consumers[rank].queue.advance(self.version)

    def put(self, rank: int, old: int = 0) -> None:
        end = self.producers[rank]
        if self.items(end).has_room(MOST):
            self.number += 1
            version = max(self.version - old, 0)
            end.queue.put(self.number, version=version, timeout=0.0)
            self.made[self.number] = self.items(end)._number, version, end.worker

    @staticmethod
    def items(end: End) -> Producer:
        return end.queue._items

    @rule(rank=RANK, old=st.sampled_from([0, 0, 1, 2]))
    def puts(self, rank: int, old: int) -> None:
        self.put(rank, old)

    @rule()
    def all_advance(self) -> None:
        self.version += 1
        for end in self.consumers.values():
            end.queue.advance(self.version)

    @rule(rank=RANK, count=st.integers(1, 3))
    def gets(self, rank: int, count: int) -> None:
        self.get(rank, count, ())

    @rule(rank=RANK, count=st.integers(1, 3), moments=MOMENTS)
    def gets_while_things_happen(
        self, rank: int, count: int, moments: Sequence[tuple[int, str, int]]
    ) -> None:
        self.get(rank, count, moments)

    @rule(rank=RANK, really=RARELY)
    def a_consumer_dies(self, rank: int, really: bool) -> None:
        if really:
            self.consumer_dies(rank)

    def consumer_dies(self, rank: int) -> None:
        end = self.consumers[rank]
        # What it had not used is given to others.
        self.out -= {*end.given}
        self.job.dies(end.worker)
        self.start_consumer(rank)

    def producer_dies(self, rank: int) -> None:
        self.job.dies(self.producers[rank].worker)
        self.producers[rank] = End(self.job.starts("rollout", rank, NODES[0]))

    def get(self, rank: int, count: int, moments: Sequence[tuple[int, str, int]]) -> None:
        end = self.consumers[rank]
        feeds = end.queue._feeds.values()
        cut = {feed.line.who for feed in feeds if feed.line.lost}
        # That they were used cannot be said, so they are given out again.
        self.out -= {each for each in end.given if self.made[each][2].who in cut}
        end.queue.done()
        end.given, end.wanted = [], max(end.wanted, count)
        for nothing, what, who in moments:
            self.job.meanwhile.extend([lambda: None] * nothing)
            self.job.meanwhile.append(self.moment(what, who, rank))
        began = self.job.now
        try:
            found = end.queue.get_batch(count, timeout=GET_TIMEOUT)
        except QueueTimeout:
            return
        finally:
            self.job.meanwhile.clear()
            end.has_waited(began)
        end.wanted -= count
        for item in found:
            assert item.value not in self.out, "it was given out before, and somebody has it"
            assert self.version - self.made[item.value][1] <= AHEAD, "it is too old"
            assert item.version == self.made[item.value][1]
            self.out.add(item.value)
            end.given.append(item.value)

    def moment(self, what: str, rank: int, getter: int) -> Callable[[], None]:
        def happens() -> None:
            if what == "put":
                self.put(rank)
            elif what == "break":
                self.job.breaks(self.consumers[getter].worker, self.producers[rank].worker)
            elif what == "consumer dies":
                self.consumer_dies(1 - getter)
            else:
                self.producer_dies(rank)

        return happens

    @invariant()
    def an_item_is_in_one_place(self) -> None:
        for end in self.producers.values():
            producer = self.items(end)
            there = [offer.number for offer, _ in producer._items]
            assert there == sorted({*there} - {*producer._taken})
            kept = [block for block in producer._blocks._blocks if KEPT in block.readers]
            assert len(kept) == len(there) + len(producer._taken)

    @invariant()
    def a_consumer_has_what_it_was_given_and_no_more_than_it_wants(self) -> None:
        for end in self.consumers.values():
            taken = {
                (producer.worker.who, number)
                for producer in self.producers.values()
                for number, (_, who) in self.items(producer)._taken.items()
                if who == end.worker.who
            }
            given = {(self.made[each][2].who, self.made[each][0]) for each in end.given}
            alive = {producer.worker.who for producer in self.producers.values()}
            assert {each for each in given if each[0] in alive} <= taken
            feeds = end.queue._feeds.values()
            if not any(feed.line.lost for feed in feeds) and {feed.line.who for feed in feeds} == alive:
                assert len(taken - given) <= end.wanted

    def teardown(self) -> None:
        try:
            if self.consumers:
                for _ in range(2 * len(self.made) + 2):
                    for rank in range(2):
                        self.get(rank, 1, ())
                for rank in range(2):
                    self.consumers[rank].queue.done()
                assert [self.items(end).left for end in self.producers.values()] == [0, 0], "items are lost"
                self.all_close()
        finally:
            self.job.close()

    def all_close(self) -> None:
        """An end that is closed leaves no connection."""
        for end in self.producers.values():
            with suppress(QueueTimeout):
                end.queue.admit(timeout=1.0)
        for end in (*self.producers.values(), *self.consumers.values()):
            end.queue.close()
            assert not [link for link in self.job.links if link.client is end.worker]


TestItems = Items.TestCase
