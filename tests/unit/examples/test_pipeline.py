"""The pipeline of the online learning example: many items under way, the last stage in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline import pipelined

from tests.waiting import WAIT_TIMEOUT
from unirun import InvocationRef
from unirun.roles.calls.call import Method
from unirun.roles.calls.codec import ERROR, OK, dump, dump_error
from unirun.roles.calls.policy import Invocation
from unirun.roles.transport.protocol import Parcel


class Promise(InvocationRef[Any]):
    """A call that the test answers itself."""

    def __init__(self) -> None:
        nobody: Any = None
        options = Invocation(target="RANK0")
        super().__init__(
            Method("worker", "stage", options, (0,), False, False, nobody, b"stage", nobody, {}, nobody), (0,)
        )

    def answer(self, work: Callable[[], object]) -> None:
        try:
            self.settle(0, Parcel(OK + dump(work(), "a result")[0]))
        except ArithmeticError as error:
            self.settle(0, Parcel(ERROR + dump_error(error, "worker:0")[0]))
        self.finish()


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def settled(value: object) -> Promise:
    promise = Promise()
    promise.answer(lambda: value)
    return promise


def submitted(workers: ThreadPoolExecutor, work: Callable[[], object]) -> Promise:
    promise = Promise()
    workers.submit(promise.answer, work)
    return promise


@given(count=st.integers(0, 30), depth=st.integers(1, 8), stages=st.integers(1, 4))
def test_every_item_goes_through_every_stage_and_comes_out_in_order(
    count: int, depth: int, stages: int
) -> None:
    def stage(name: int) -> Callable[[int, Any], Promise]:
        return lambda t, value: settled([*(value or []), (name, t)])

    out = list(pipelined(range(count), [stage(name) for name in range(stages)], depth))
    assert out == [(t, [(name, t) for name in range(stages)]) for t in range(count)]


def test_a_slow_first_stage_of_one_item_does_not_keep_the_next_from_starting(
    workers: ThreadPoolExecutor,
) -> None:
    second_started = threading.Event()

    def first(t: int, _: object) -> Promise:
        def work() -> int:
            if t == 0:
                assert second_started.wait(WAIT_TIMEOUT)
            if t == 1:
                second_started.set()
            return t

        return submitted(workers, work)

    assert [value for _, value in pipelined(range(3), [first], depth=2)] == [0, 1, 2]


@given(order=st.permutations(range(6)))
def test_the_last_stage_is_entered_in_order_whoever_is_ready_first(order: list[int]) -> None:
    ready: dict[int, Promise] = {}
    entered: list[int] = []

    def let_go() -> None:
        for each in order:
            ready[each].answer(partial(int, each))

    def first(t: int, _: object) -> Promise:
        ready[t] = Promise()
        if len(ready) == len(order):
            # All are under way: a thread lets them go in the order of the example.
            threading.Thread(target=let_go).start()
        return ready[t]

    def last(t: int, value: int) -> Promise:
        entered.append(t)
        return settled(value)

    assert [t for t, _ in pipelined(range(6), [first, last], depth=6)] == list(range(6))
    assert entered == list(range(6))


@given(depth=st.integers(1, 5))
def test_no_more_than_depth_items_are_under_way(depth: int) -> None:
    inside: set[int] = set()
    most = 0

    def first(t: int, _: object) -> Promise:
        nonlocal most
        inside.add(t)
        most = max(most, len(inside))
        return settled(t)

    for t, _ in pipelined(range(12), [first, lambda t, value: settled(value)], depth):
        inside.remove(t)
    assert most == depth


def test_an_error_in_a_stage_comes_out(workers: ThreadPoolExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        list(pipelined(range(2), [lambda t, _: submitted(workers, lambda: 1 // t)], depth=2))
