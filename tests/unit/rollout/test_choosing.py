"""A request goes to the engine with the least to do, and again to another one when that engine fails; never twice at a time."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.rollout.choosing import (
    MAX_PAUSE_SECONDS,
    MIN_PAUSE_SECONDS,
    POLICIES,
    PREFIX_LOAD,
    Kind,
    Load,
    RequestFailure,
    begun,
    choose,
    cut,
    ended,
    has_failed,
)
from unirun.values import Engine, WorkerId


def engine(rank: int, *, ready: bool = True, incarnation: int = 0) -> Engine:
    return Engine(rank, incarnation, f"http://127.0.0.1:{20_000 + rank}", ready)


def failure(kind: Kind = "lost", status: int = 0, rank: int = 0) -> RequestFailure:
    return RequestFailure(engine(rank), kind, "words", status)


def chosen(loads: Iterable[Load], avoid: tuple[Engine, ...] = (), now: float = 0.0) -> int:
    found = choose(loads, avoid, now)
    assert isinstance(found, Engine)
    return found.rank


def test_the_engine_with_the_fewest_requests_in_flight_gets_the_next_one() -> None:
    assert chosen([Load(engine(0), 2), Load(engine(1), 1), Load(engine(2), 3)]) == 1


def test_among_equals_it_is_the_one_whose_turn_is_longest_ago() -> None:
    loads = {rank: Load(engine(rank)) for rank in range(3)}
    order = []
    for turn in range(1, 7):
        rank = chosen(loads.values())
        order.append(rank)
        loads[rank] = cut(begun(loads[rank], turn))
    assert order == [0, 1, 2, 0, 1, 2]


def test_a_policy_counts_turns_or_tokens_instead_of_requests() -> None:
    loads = [Load(engine(0), 1, turn=5, tokens=900), Load(engine(1), 9, turn=4, tokens=90)]
    found = [choose(loads, (), 0.0, policy) for policy in POLICIES]
    assert found == [engine(1), engine(0), engine(1)]
    assert cut(begun(loads[0], 6, 50), 50) == Load(engine(0), 1, turn=6, tokens=900)


def test_a_request_stays_on_its_engine_unless_that_has_failed_or_is_another_process() -> None:
    loads, stay = [Load(engine(0)), Load(engine(1), 5)], WorkerId("engine", 1, 0)
    assert choose(loads, (), 0.0, stay=stay) == engine(1)
    assert choose(loads, (engine(1),), 0.0, stay=stay) == engine(0)
    assert choose(loads, (), 0.0, stay=stay._replace(incarnation=1)) == engine(0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_prompts_go_to_one_engine_until_it_has_many_more_than_another_one(count: int) -> None:
    loads = [Load(engine(rank), 100) for rank in range(count)]
    homes = {number: choose(loads, (), 0.0, prompt=number) for number in range(-10, 10)}
    assert {*homes.values()} == {load.engine for load in loads}
    for turn in range(1, 200):
        found = choose(loads, (), 0.0, prompt=7)
        assert isinstance(found, Engine)
        loads[found.rank] = begun(loads[found.rank], turn)
        most, least = max(load.in_flight for load in loads), min(load.in_flight for load in loads)
        assert most <= least * PREFIX_LOAD + 1
        if turn <= 10:
            assert found == homes[7]


def test_equal_prompts_are_spread_while_engines_have_little_to_do_and_by_other_policies() -> None:
    loads = [Load(engine(0)), Load(engine(1))]
    for turn in range(1, 7):
        found = choose(loads, (), 0.0, prompt=4)
        assert isinstance(found, Engine)
        loads[found.rank] = begun(loads[found.rank], turn)
    assert [load.in_flight for load in loads] == [3, 3]
    loads = [Load(engine(0), 90, turn=9, tokens=9), Load(engine(1), 89, turn=8, tokens=8)]
    assert [choose(loads, (), 0.0, policy, prompt=4) for policy in POLICIES] == [
        engine(1),
        engine(0),
        engine(1),
    ]


def test_equal_prompts_go_elsewhere_when_their_engine_has_failed_on_one() -> None:
    loads = [Load(engine(0), 50), Load(engine(1), 50), Load(engine(2), 50, doubted=1.0)]
    assert choose(loads, (), 0.0, prompt=4) == engine(0)
    assert choose(loads, (engine(0),), 0.0, prompt=4) == engine(1)
    assert choose(loads, (), 0.0, stay=WorkerId("engine", 1, 0), prompt=4) == engine(1)


def test_an_engine_that_is_not_ready_gets_none() -> None:
    assert chosen([Load(engine(0, ready=False)), Load(engine(1), 9)]) == 1


def test_without_a_ready_engine_a_request_waits_for_a_change() -> None:
    assert choose([], (), 0.0) == inf
    assert choose([Load(engine(0, ready=False))], (), 0.0) == inf


def test_an_engine_that_has_failed_on_a_request_gets_it_again_only_if_there_is_no_other() -> None:
    loads = [Load(engine(0)), Load(engine(1), 5)]
    assert chosen(loads, (engine(0),)) == 1
    assert chosen(loads, (engine(0), engine(1))) == 0


def test_an_engine_that_has_failed_is_doubted_for_a_while_and_longer_each_time() -> None:
    load, now, doubts = Load(engine(0)), 100.0, []
    for turn in range(10):
        load = ended(begun(load, turn), failure(), now)
        doubts.append(load.doubted - now)
        assert choose([load], (), now) == load.doubted - now
        now = load.doubted
        assert choose([load], (), now) == load.engine
    assert doubts[:3] == pytest.approx([MIN_PAUSE_SECONDS, 2 * MIN_PAUSE_SECONDS, 4 * MIN_PAUSE_SECONDS])
    assert doubts[-1] == pytest.approx(MAX_PAUSE_SECONDS)
    assert ended(begun(load, 11), None, now).failures == 0


def test_a_request_waits_for_the_first_engine_that_is_no_longer_doubted() -> None:
    loads = [Load(engine(rank), doubted=doubted) for rank, doubted in enumerate((3.0, 1.0, 2.0))]
    assert choose(loads, (), 0.5) == 0.5
    assert chosen(loads, now=1.0) == 1
    assert chosen([loads[0], loads[2], Load(engine(3))]) == 3


def test_a_request_that_nobody_waits_for_any_more_is_one_less() -> None:
    assert cut(begun(begun(Load(engine(0)), 1), 2)).in_flight == 1


def test_an_engine_that_has_answered_is_not_doubted() -> None:
    load = ended(begun(begun(Load(engine(0)), 1), 2), failure(), 10.0)
    assert choose([ended(load, None, 10.0)], (), 10.0) == load.engine


def test_the_requests_that_an_engine_takes_with_it_are_one_failure() -> None:
    load = begun(begun(begun(Load(engine(0)), 1), 2), 3)
    for _ in range(3):
        load = ended(load, failure(), 10.0)
    assert (load.in_flight, load.failures, load.doubted) == (0, 1, 10.0 + MIN_PAUSE_SECONDS)


def test_a_wrong_request_says_nothing_against_its_engine() -> None:
    assert ended(begun(Load(engine(0)), 1), failure("status", 400), 10.0).doubted == 0.0


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422, 501])
def test_what_the_server_says_is_wrong_is_not_sent_again(status: int) -> None:
    wrong = failure("status", status)
    assert has_failed((wrong,), 5)


@pytest.mark.parametrize("kind", ["refused", "lost", "unready", "aborted"])
def test_what_an_engine_had_not_finished_is_sent_again(kind: Kind) -> None:
    assert not has_failed((failure(kind),), 2)


def test_a_request_on_which_engines_fail_again_and_again_is_given_up() -> None:
    failures = (failure("lost"), failure("status", 500), failure("unready"))
    assert not has_failed(failures, 4)
    assert has_failed(failures, 3)


def test_an_engine_that_never_got_a_request_did_not_fail_because_of_it() -> None:
    others = (failure("refused"), failure("status", 503), failure("status", 502), failure("aborted"))
    assert not has_failed(others * 50, 2)


ACTIONS = ("ask", "finish", "die", "start", "tell", "later")
ATTEMPTS = 4


class EnginesModel:
    """Three engines that die and start, what a client knows of them, and its requests; without time or input and output."""

    def __init__(self) -> None:
        self.alive = [True] * 3
        self.incarnations = [0] * 3
        self.loads = {each: Load(each) for each in map(engine, range(3))}
        self.now, self.turn = 0.0, 0
        self.waiting: dict[int, tuple[RequestFailure, ...]] = {}
        self.running: dict[int, tuple[Engine, tuple[RequestFailure, ...]]] = {}
        self.outcomes: dict[int, list[str]] = {}

    def ask(self) -> None:
        number = len(self.outcomes)
        self.outcomes[number], self.waiting[number] = [], ()

    def send(self) -> None:
        """Send all that can be sent; a dead engine refuses at once."""
        again = True
        while again:
            again = False
            for number, failures in list(self.waiting.items()):
                found = choose(self.loads.values(), [each.engine for each in failures], self.now)
                if not isinstance(found, Engine):
                    continue
                again, its = True, found
                assert number not in self.running
                del self.waiting[number]
                self.turn += 1
                self.loads[its] = begun(self.loads[its], self.turn)
                self.running[number] = its, failures
                if not self.lives(its):
                    self.fail(number, RequestFailure(its, "refused", ""))

    def lives(self, its: Engine) -> bool:
        return self.alive[its.rank] and self.incarnations[its.rank] == its.incarnation

    def fail(self, number: int, failed: RequestFailure) -> None:
        its, failures = self.running.pop(number)
        if its in self.loads:
            self.loads[its] = ended(self.loads[its], failed, self.now)
        if not has_failed((*failures, failed), ATTEMPTS):
            self.waiting[number] = *failures, failed
        else:
            self.outcomes[number].append("given up")
            assert sum(each.was_tried for each in (*failures, failed)) == ATTEMPTS

    def finish(self, pick: int) -> None:
        if self.running:
            number = sorted(self.running)[pick % len(self.running)]
            its, _ = self.running.pop(number)
            assert self.lives(its)
            self.loads[its] = ended(self.loads[its], None, self.now)
            self.outcomes[number].append("answered")

    def die(self, rank: int) -> None:
        self.alive[rank] = False
        for number, (its, _) in list(self.running.items()):
            if its.rank == rank:
                self.fail(number, RequestFailure(its, "lost", ""))

    def start(self, rank: int) -> None:
        if not self.alive[rank]:
            self.alive[rank] = True
            self.incarnations[rank] += 1

    def tell(self) -> None:
        """The client learns of the engines."""
        told = [
            engine(rank, ready=alive, incarnation=self.incarnations[rank])
            for rank, alive in enumerate(self.alive)
        ]
        self.loads = {each: self.loads.get(each, Load(each)) for each in told}


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), max_size=60))
def test_no_request_is_lost_and_none_is_answered_twice(history: list[tuple[str, int]]) -> None:
    model = EnginesModel()
    for action, pick in history:
        if action == "ask":
            model.ask()
        elif action == "tell":
            model.tell()
        elif action == "later":
            model.now += MIN_PAUSE_SECONDS
        else:
            getattr(model, action)(pick)
        model.send()
    for rank in range(3):
        model.start(rank)
    model.tell()
    model.now += MAX_PAUSE_SECONDS
    model.send()
    while model.running:
        model.finish(0)
        model.send()
    assert not model.waiting
    assert all(len(outcome) == 1 for outcome in model.outcomes.values())
    assert all(load.in_flight == 0 for load in model.loads.values())
