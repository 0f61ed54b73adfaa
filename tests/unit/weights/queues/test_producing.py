"""A producer's end without transports: what consumers ask comes as values, and answers are collected."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unirun.roles.calls.codec import load
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.weights.producing import AwaitItem, Done, Hold, Producer, Take, offered

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

    @rule(rank=RANKS, count=st.integers(0, 3))
    def connects_anew(self, rank: int, count: int) -> None:
        """Some answers were lost."""
        self.held[rank], lost = self.held[rank][:count], self.held[rank][count:]
        self.producer.handle(Hold("q", self.who(rank), tuple(self.held[rank])), lambda _: None)
        self.there = sorted(lost) + self.there

    @rule(rank=RANKS)
    def dies(self, rank: int) -> None:
        self.incarnation[rank] += 1
        alive = {self.who(each) for each in range(3)}
        self.producer.lost(lambda who: who not in alive)
        lost, self.held[rank] = self.held[rank], []
        self.there = sorted(lost) + self.there

    @rule()
    def waits(self) -> None:
        self.producer.handle(AwaitItem("q", 1.0), self.waiting.append)
        self.expected_wakes += 1

    @invariant()
    def no_item_is_lost_or_there_twice(self) -> None:
        held = [number for some in self.held.values() for number in some]
        assert sorted([*self.there, *held, *self.used]) == list(range(1, self.put + 1))
        assert (len(self.producer), self.producer.left) == (len(self.there), len(self.there) + len(held))

    @invariant()
    def who_waits_is_woken_as_soon_as_there_is_an_item(self) -> None:
        if self.there:
            assert len(self.waiting) == self.expected_wakes

    def teardown(self) -> None:
        self.producer.close()


TestItems = Items.TestCase
