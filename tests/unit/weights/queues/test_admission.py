"""The gate: its state as a value, in any history, and the replies of the gate that has it."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.weights.admitting import Gate
from unirun.weights.gate import Admitted, Bound, Counts, Enter, GateState


def producer(rank: int = 0, incarnation: int = 0) -> WorkerId:
    return WorkerId("rollout", rank, incarnation)


def opened(bound: Bound, version: int = 0) -> GateState:
    return GateState().opened(bound, version, frozenset())


def request(
    rank: int = 0,
    number: int = 1,
    counts: Counts | None = None,
    wants: int = 1,
    unanswered: tuple[int, ...] = (),
) -> Enter:
    return Enter("q", producer(rank), number, unanswered, counts or Counts(), wants)


@pytest.mark.parametrize(("off", "most"), [(0, 4), (1, 8), (3, 16)])
def test_a_producer_is_ahead_by_as_many_batches_as_versions_are_allowed(off: int, most: int) -> None:
    _, answers = opened(Bound(4, off)).asked(request(wants=100)).admit()
    assert answers == {producer(): most}


def test_nobody_begins_before_the_gate_is_open() -> None:
    state = GateState().asked(request())
    assert state.admit()[1] == {}
    assert state.opened(Bound(1, 0), 0, frozenset()).admit()[1] == {producer(): 1}


def test_items_that_a_consumer_has_kept_are_in_the_next_batches_and_those_that_it_drops_are_not() -> None:
    state = GateState().kept(3).opened(Bound(4, 1), 2, frozenset())
    assert state.room == 5
    assert state.kept(-2).room == 7


def test_as_many_items_are_open_as_may_be_whatever_their_age_allows() -> None:
    state, answers = opened(Bound(4, 9, 3)).asked(request(wants=100)).admit()
    assert answers == {producer(): 3}
    state, answers = state.asked(request(0, 2, Counts(open=3), 100)).admit()
    assert answers == {}
    _, answers = state.asked(request(0, 3, Counts(open=1, made=2), 100)).admit()
    assert answers == {producer(): 2}, "two were put, so two more may be made at the same time"


def test_producers_that_wait_share_what_there_is_in_the_order_in_which_they_have_asked() -> None:
    state = opened(Bound(1, 0)).asked(request(0)).admit()[0]
    for rank, wants in ((1, 1), (2, 9), (0, 9)):
        state = state.asked(request(rank, 2, Counts(open=int(not rank)), wants))
    assert state.admit()[1] == {}
    _, answers = state.advanced(1).admit()
    assert answers == {producer(1): 1}
    _, answers = state.advanced(6).admit()
    assert answers == {producer(1): 1, producer(2): 3, producer(0): 2}


def test_an_admission_counts_while_its_answer_is_on_its_way_and_no_longer_when_that_was_lost() -> None:
    state, answers = opened(Bound(2, 0)).asked(request(wants=2)).admit()
    assert answers == {producer(): 2}
    on_its_way = state.asked(request(0, 2, Counts(), 2, unanswered=(1,)))
    assert on_its_way.room == 0
    lost = state.asked(request(0, 2, Counts(), 2))
    assert lost.room == 2


def test_a_request_of_a_connection_that_has_ended_changes_nothing() -> None:
    state = opened(Bound(2, 0)).asked(request(0, 5, Counts(open=2), 0))
    assert state.asked(request(0, 4, Counts(open=1), 3)) is state


def test_what_died_with_its_producer_is_made_by_others() -> None:
    state = opened(Bound(4, 0)).asked(request(0, 1, Counts(open=4), 0))
    state = state.asked(request(0, 2, Counts(made=4, delivered=1), 0))
    assert state.lost(lambda who: who == producer()).room == 3


def test_a_gate_that_is_new_counts_the_batches_before_its_version_and_what_producers_have() -> None:
    # It has made 22 items, of which 20 were used in versions 0 to 4.
    state = opened(Bound(4, 0), version=5).asked(request(counts=Counts(made=22, delivered=20), wants=9))
    assert state.admit()[1] == {producer(): 2}


def test_a_gate_that_is_new_lets_nobody_in_before_all_that_were_there_have_told_their_counts() -> None:
    there = frozenset({producer(0), producer(1), producer(2)})
    state = GateState().opened(Bound(4, 0), 5, there).asked(request(0, 1, Counts(open=1), 9))
    assert state.room == 0
    state = state.counted(producer(1), Counts(open=1, made=21, delivered=20))
    assert state.room == 0
    assert state.lost(lambda who: who == producer(2)).room == 1, "it has died"
    assert state.counted(producer(2), Counts()).room == 1
    assert state.asked(request(2, 1, Counts(made=1), 1)).room == 0


def test_counts_that_come_after_a_request_are_older_than_those_in_it() -> None:
    state = opened(Bound(4, 0)).asked(request(0, 1, Counts(open=1), 0))
    assert state.counted(producer(), Counts(open=4)) is state


class Replies:
    """A gate, and the counts in its answers to each request, which come now or later."""

    def __init__(self) -> None:
        self.dead: set[WorkerId] = set()
        self.gate = Gate(self.dead.__contains__)

    def ask(self, asked: Enter) -> list[int]:
        answers: list[int] = []

        def reply(parcel: Parcel) -> None:
            answers.append(msgspec.json.decode(parcel.head, type=Admitted).count)

        self.gate.handle(asked, reply)
        return answers


class TestReplies:
    def test_a_request_is_answered_when_there_is_an_admission(self) -> None:
        replies = Replies()
        first, second = replies.ask(request(0)), replies.ask(request(1))
        assert (first, second) == ([], [])
        replies.gate.open(Bound(1, 0), 0, frozenset)
        assert (first, second) == ([1], [])
        replies.gate.advance(1)
        assert second == [1]

    def test_a_request_that_wants_nothing_is_answered_at_once(self) -> None:
        assert Replies().ask(request(wants=0)) == [0]

    def test_the_next_request_answers_the_one_before(self) -> None:
        replies = Replies()
        first = replies.ask(request(0, 1))
        second = replies.ask(request(0, 2, unanswered=(1,)))
        assert (first, second) == ([0], [])
        assert replies.ask(request(0, 1)) == [0], "it was on its way for longer than the second"

    def test_a_producer_that_is_gone_is_not_counted_though_its_request_comes_late(self) -> None:
        replies = Replies()
        replies.gate.open(Bound(1, 0), 0, frozenset)
        replies.dead.add(producer(0))
        assert replies.ask(request(0, counts=Counts(open=1))) == [0]
        assert replies.ask(request(1)) == [1]

    def test_the_end_of_a_producer_lets_others_in(self) -> None:
        replies = Replies()
        replies.gate.open(Bound(1, 0), 0, frozenset)
        assert replies.ask(request(0)) == [1]
        waiting = replies.ask(request(1))
        replies.dead.add(producer(0))
        replies.gate.look()
        assert waiting == [1]


class Rollout:
    """A producer in a history: its items, as it knows them."""

    def __init__(self, rank: int, incarnation: int) -> None:
        self.who = producer(rank, incarnation)
        self.open: list[int] = []
        """The versions with which its open items were begun."""
        self.queue: deque[int] = deque()
        """The versions of the items that were put and not taken."""
        self.made = self.delivered = 0
        self.wants = 0
        self.number = 0
        self.unanswered: list[int] = []
        self.answers: list[tuple[int, int, int]] = []
        """Answers on their way: the request, the admissions, and the version when they were given."""

    @property
    def counts(self) -> Counts:
        return Counts(len(self.open), self.made, self.delivered)


RANKS = 3
RANK = st.integers(0, RANKS - 1)
COUNT = st.integers(1, 6)


class Histories(RuleBasedStateMachine):
    """Producers ask, get answers late or never, put, give back and die; the consumer trains, and starts again from a
    version whose batches it has had."""

    @initialize(bound=st.builds(Bound, st.integers(1, 4), st.integers(0, 3), st.none() | st.integers(1, 6)))
    def begins(self, bound: Bound) -> None:
        self.bound = bound
        self.version = self.trained = 0
        self.rollouts = [Rollout(rank, 0) for rank in range(RANKS)]
        self.state = opened(bound)
        self.step()

    def step(self) -> None:
        self.state, answers = self.state.admit()
        for rollout in self.rollouts:
            if count := answers.get(rollout.who, 0):
                assert 0 < count <= rollout.wants
                rollout.answers.append((rollout.number, count, self.version))

    def ask(self, rollout: Rollout) -> None:
        rollout.number += 1
        enter = Enter(
            "q", rollout.who, rollout.number, tuple(rollout.unanswered), rollout.counts, rollout.wants
        )
        if rollout.wants:
            rollout.unanswered.append(rollout.number)
        self.state = self.state.asked(enter)
        self.step()

    @rule(rank=RANK, wants=COUNT)
    def a_producer_wants_admissions(self, rank: int, wants: int) -> None:
        self.rollouts[rank].wants = wants
        self.ask(self.rollouts[rank])

    @rule(rank=RANK)
    def an_answer_comes(self, rank: int) -> None:
        rollout = self.rollouts[rank]
        if rollout.answers:
            number, count, version = rollout.answers.pop(0)
            rollout.unanswered.remove(number)
            begun = min(count, rollout.wants)
            rollout.wants -= begun
            rollout.open += [version] * begun
            # Somebody has left: the rest is given back.
            self.ask(rollout)

    @rule(rank=RANK)
    def a_connection_ends(self, rank: int) -> None:
        rollout = self.rollouts[rank]
        rollout.answers.clear()
        rollout.unanswered.clear()
        self.ask(rollout)

    @rule(rank=RANK, told=st.booleans())
    def a_producer_puts(self, rank: int, told: bool) -> None:
        rollout = self.rollouts[rank]
        if rollout.open:
            rollout.queue.append(rollout.open.pop(0))
            rollout.made += 1
            if told:
                self.ask(rollout)

    @rule(rank=RANK, count=COUNT)
    def a_producer_gives_back(self, rank: int, count: int) -> None:
        del self.rollouts[rank].open[:count]
        self.ask(self.rollouts[rank])

    @rule(rank=RANK, really=st.integers(0, 3))
    def a_producer_dies(self, rank: int, really: int) -> None:
        if really == 0:
            dead = self.rollouts[rank].who
            self.rollouts[rank] = Rollout(rank, dead.incarnation + 1)
            self.state = self.state.lost(lambda who: who == dead)
            self.step()

    @rule(rank=RANK)
    def an_item_is_trained_on(self, rank: int) -> None:
        self.train(self.rollouts[rank])

    def train(self, rollout: Rollout) -> None:
        if not rollout.queue:
            return
        if self.bound.is_stale(rollout.queue.popleft(), self.version):
            rollout.made -= 1
            self.ask(rollout)
            return
        rollout.delivered += 1
        self.trained += 1
        # A consumer's acknowledgement, of which the gate learns.
        self.ask(rollout)
        if self.trained % self.bound.batch == 0:
            self.version += 1
            self.state = self.state.advanced(self.version)
            self.step()

    @rule(lost=st.integers(0, 2), order=st.permutations(range(RANKS)), early=st.integers(0, RANKS))
    def the_consumer_starts_again(self, lost: int, order: list[int], early: int) -> None:
        """From a checkpoint, some versions before. Producers tell their counts one after the other, some of them before
        the gate is open."""
        self.version = max(self.version - lost, 0)
        self.trained = self.version * self.bound.batch
        for rollout in self.rollouts:
            rollout.answers.clear()
            rollout.unanswered.clear()
        self.state = GateState()
        for rank in order[:early]:
            self.ask(self.rollouts[rank])
        self.state = self.state.opened(
            self.bound, self.version, frozenset(rollout.who for rollout in self.rollouts)
        )
        before = sum(len(rollout.open) + len(rollout.queue) for rollout in self.rollouts)
        for rank in order[early:]:
            assert self.state.room == 0, "no burst while the counts of some are unknown"
            self.ask(self.rollouts[rank])
        assert not self.state.unheard
        self.step()
        on_the_way = sum(count for rollout in self.rollouts for _, count, _ in rollout.answers)
        most = (self.bound.max_head_offpolicyness + 1) * self.bound.batch
        assert on_the_way <= max(most - before, 0), "no burst after it"

    @invariant()
    def no_more_is_begun_than_may_be(self) -> None:
        if not hasattr(self, "state"):
            return
        begun = sum(
            len(rollout.open) + len(rollout.queue) + sum(count for _, count, _ in rollout.answers)
            for rollout in self.rollouts
        )
        ahead = (self.version + self.bound.max_head_offpolicyness + 1) * self.bound.batch - self.trained
        assert begun <= max(ahead, self.begun_before), "the bound is kept"
        self.begun_before = begun
        still_open = sum(
            len(rollout.open) + sum(count for _, count, _ in rollout.answers) for rollout in self.rollouts
        )
        if self.bound.max_concurrent_rollouts is not None:
            assert still_open <= self.bound.max_concurrent_rollouts

    begun_before = 0

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        for rollout in self.rollouts:
            self.a_connection_ends(rollout.who.rank)
        permits = (
            self.trained
            + sum(len(rollout.open) + len(rollout.queue) for rollout in self.rollouts)
            + sum(count for rollout in self.rollouts for _, count, _ in rollout.answers)
        )
        assert self.state.begun == permits, "permits are conserved"
        for rollout in self.rollouts:
            rollout.open.clear()
            rollout.wants = 0
            self.a_connection_ends(rollout.who.rank)
        while any(rollout.queue for rollout in self.rollouts):
            for rollout in self.rollouts:
                self.train(rollout)
        self.rollouts[0].wants = 1
        self.ask(self.rollouts[0])
        assert self.rollouts[0].answers, "producers do not stand still for ever"


TestHistories = Histories.TestCase
