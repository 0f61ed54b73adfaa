"""The processes that may begin an item, without transports: replies are collected."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.weights.producing import Bound, Enter, Gate


class Asking:
    """A gate and the producers that ask it; each of them has numbers as `Producer` has."""

    def __init__(self, bound: Bound | None = None, version: int = 0) -> None:
        self.now = 0.0
        self.gate = Gate(lambda: self.now)
        if bound is not None:
            self.gate.open(bound, version)

    def ask(self, rank: int = 0, incarnation: int = 0, *, made: int = 0, delivered: int = 0) -> list[Parcel]:
        """The answers, which come now or later."""
        answers: list[Parcel] = []
        who = WorkerId("rollout", rank, incarnation)
        self.gate.handle(Enter("q", who, made, delivered, 10.0), answers.append)
        return answers

    def tell(self, rank: int = 0, *, made: int, delivered: int = 0) -> list[Parcel]:
        """Tell the gate how many items were begun, without a request."""
        answers: list[Parcel] = []
        self.gate.handle(Enter("q", WorkerId("rollout", rank, 0), made, delivered), answers.append)
        return answers

    def begins(self, count: int, rank: int = 0) -> int:
        """The number of items, of `count`, that a producer may begin now."""
        begun = 0
        while begun < count and self.ask(rank, made=begun):
            begun += 1
        return begun


@pytest.mark.parametrize(("off", "most"), [(0, 4), (1, 8), (3, 16)])
def test_a_producer_is_ahead_by_as_many_batches_as_versions_are_allowed(off: int, most: int) -> None:
    assert Asking(Bound(4, off)).begins(100) == most


def test_a_producer_that_was_held_back_begins_with_the_next_version() -> None:
    asking = Asking(Bound(2, 0))
    assert asking.begins(2) == 2
    answers = asking.ask(made=2)
    assert answers == []
    asking.gate.advance(1)
    assert len(answers) == 1


def test_nobody_begins_before_the_gate_is_open() -> None:
    asking = Asking()
    answers = asking.ask()
    assert answers == []
    asking.gate.open(Bound(1, 0), 0)
    assert len(answers) == 1


def test_all_producers_count_together_and_are_let_in_in_the_order_in_which_they_asked() -> None:
    asking = Asking(Bound(3, 0))
    assert asking.begins(2, rank=0) == 2
    first, second = asking.ask(1), asking.ask(2)
    assert (len(first), len(second)) == (1, 0)
    third = asking.ask(0, made=2)
    asking.gate.advance(1)
    assert (len(second), len(third)) == (1, 1)


def test_who_has_stopped_waiting_is_not_let_in() -> None:
    asking = Asking(Bound(1, 0))
    assert asking.begins(1) == 1
    late = asking.ask(1)
    asking.now = 11.0
    other = asking.ask(2)
    asking.gate.advance(1)
    assert (len(late), len(other)) == (0, 1)


def test_what_is_given_back_lets_others_in_at_once() -> None:
    asking = Asking(Bound(2, 0))
    assert asking.begins(2, rank=0) == 2
    waiting = asking.ask(1)
    assert (len(asking.tell(0, made=2)), len(waiting)) == (1, 0)
    assert (len(asking.tell(0, made=1)), len(waiting)) == (1, 1)


def test_a_producer_that_waits_no_longer_is_not_let_in_by_its_earlier_question() -> None:
    asking = Asking(Bound(1, 0))
    assert asking.begins(1, rank=0) == 1
    early = asking.ask(1)
    asking.tell(1, made=0)
    other = asking.ask(2)
    asking.gate.advance(1)
    assert (len(early), len(other)) == (0, 1)


def test_items_that_died_with_their_producer_are_made_by_others() -> None:
    asking = Asking(Bound(4, 0))
    assert asking.begins(4, rank=0) == 4
    waiting = asking.ask(1)
    # One of the four was used.
    assert asking.ask(0, made=4, delivered=1) == []
    asking.gate.lost({WorkerId("rollout", 1, 0)})
    assert len(waiting) == 1
    assert [len(asking.ask(1, made=made)) for made in (1, 2, 3)] == [1, 1, 0]


def test_a_gate_that_is_new_counts_what_producers_have_and_the_batches_before_its_version() -> None:
    asking = Asking(Bound(4, 0), version=5)
    # It has made 22 items, of which 20 were used in versions 0 to 4.
    assert [len(asking.ask(made=made, delivered=20)) for made in (22, 23, 24)] == [1, 1, 0]


@given(
    batch=st.integers(1, 5),
    off=st.integers(0, 3),
    ranks=st.integers(1, 3),
    choices=st.lists(st.integers(0, 99), max_size=200),
)
def test_nothing_too_old_is_trained_on_and_producers_never_stand_still_for_ever(
    batch: int, off: int, ranks: int, choices: list[int]
) -> None:
    """Producers of any speed die and begin anew, and give admissions back; consumers take from any of them, and drop
    what is too old."""
    bound = Bound(batch, off)
    asking = Asking(bound)
    version = trained = 0
    queues: list[deque[int]] = [deque() for _ in range(ranks)]
    made, delivered, incarnation = [0] * ranks, [0] * ranks, [0] * ranks

    def begin(rank: int) -> bool:
        if asking.ask(rank, incarnation[rank], made=made[rank], delivered=delivered[rank]):
            made[rank] += 1
            queues[rank].append(version)
            return True
        asking.now += 11.0
        return False

    def begin_nothing(rank: int) -> None:
        if asking.ask(rank, incarnation[rank], made=made[rank], delivered=delivered[rank]):
            who = WorkerId("rollout", rank, incarnation[rank])
            asking.gate.handle(Enter("q", who, made[rank], delivered[rank]), lambda _: None)
        else:
            asking.now += 11.0

    def take(rank: int) -> None:
        nonlocal trained, version
        if not queues[rank]:
            return
        if bound.is_stale(queues[rank].popleft(), version):
            assert ranks > 1, "the items of one producer are taken in time"
            made[rank] -= 1
            return
        delivered[rank] += 1
        trained += 1
        if trained % batch == 0:
            version += 1
            asking.gate.advance(version)

    def die(rank: int) -> None:
        queues[rank].clear()
        made[rank], delivered[rank], incarnation[rank] = 0, 0, incarnation[rank] + 1
        asking.gate.lost({WorkerId("rollout", other, incarnation[other]) for other in range(ranks)})

    for choice in choices:
        rank = choice % ranks
        if choice < 35:
            begin(rank)
        elif choice < 45:
            begin_nothing(rank)
        elif choice < 95 or ranks == 1:
            take(rank)
        else:
            die(rank)
    for rank in range(ranks):
        while queues[rank]:
            take(rank)
    # All numbers are told with the next question of each producer.
    assert [begin(rank) for rank in range(ranks)].count(True) > 0
