"""Admissions of one producer: used by an item, or given back."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from contextvars import Context

from hypothesis import given
from hypothesis import strategies as st

from unirun.weights.admitting import Admission, Admissions


class RecordedAdmissions:
    """Admissions, and the number of begun items at each time when one was given back."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.put = 0
        self.admissions = Admissions(self.changed)

    def changed(self) -> None:
        still_open, made = self.admissions.counts()
        if made == self.put:
            self.begun.append(made + still_open)
        self.put = made

    def state(self) -> tuple[int, int]:
        still_open, made = self.admissions.counts()
        return made + still_open, still_open


def test_an_admission_counts_until_its_item_is_put_or_it_is_given_back() -> None:
    told = RecordedAdmissions()
    first, second = told.admissions.admit(), told.admissions.admit()
    told.admissions.put()
    assert told.state() == (2, 1)
    first.reject()
    assert told.state() == (2, 1), "it has an item"
    second.reject()
    second.reject()
    assert told.state() == (1, 0)
    assert told.begun == [1]


def test_a_block_that_puts_nothing_gives_its_admission_back() -> None:
    told = RecordedAdmissions()
    with suppress(ZeroDivisionError), told.admissions.admit():
        raise ZeroDivisionError
    with told.admissions.admit():
        pass
    with told.admissions.admit():
        told.admissions.put()
    assert told.state() == (1, 0)
    assert told.begun == [0, 0]


def test_an_item_belongs_to_its_block_and_not_to_another_thread_or_task() -> None:
    told = RecordedAdmissions()
    other = told.admissions.admit()
    with told.admissions.admit(), told.admissions.admit():
        told.admissions.put()
        assert told.state() == (3, 2)
    assert told.state() == (2, 1), "the outer block has put nothing"

    async def one(puts: bool, both: asyncio.Barrier) -> None:
        with told.admissions.admit():
            await both.wait()
            if puts:
                told.admissions.put()
            await both.wait()

    async def tasks() -> None:
        both = asyncio.Barrier(2)
        await asyncio.gather(one(False, both), one(True, both))

    asyncio.run(tasks())
    assert told.state() == (3, 1)
    thread = threading.Thread(target=told.admissions.put)
    thread.start()
    thread.join()
    other.reject()
    assert told.state() == (3, 0), "a thread without a block uses the oldest one"


def test_an_item_of_a_thread_that_does_not_know_its_block_leaves_the_others_theirs() -> None:
    told = RecordedAdmissions()
    with told.admissions.admit():
        with told.admissions.admit():
            # For example a thread of a pool.
            thread = threading.Thread(target=told.admissions.put)
            thread.start()
            thread.join()
            assert told.state() == (2, 1)
        assert (told.state(), told.begun) == ((2, 1), []), "the outer block may put its item yet"
        told.admissions.put()
    assert (told.state(), told.begun) == ((2, 0), [])


def test_a_block_that_has_its_admission_back_and_puts_nothing_gives_it_back() -> None:
    told = RecordedAdmissions()
    with told.admissions.admit(), told.admissions.admit():
        thread = threading.Thread(target=told.admissions.put)
        thread.start()
        thread.join()
    assert (told.state(), told.begun) == ((1, 0), [1])


@given(st.lists(st.sampled_from(["enter", "put", "put elsewhere", "leave"]), max_size=40))
def test_blocks_that_have_ended_leave_what_was_put_whichever_thread_has(actions: list[str]) -> None:
    told = RecordedAdmissions()
    blocks: list[Admission] = []
    put = 0
    for action in [*actions, *["leave"] * len(actions)]:
        if action == "enter":
            blocks.append(told.admissions.admit().__enter__())
        elif action == "leave" and blocks:
            blocks.pop().__exit__(None, None, None)
        elif action.startswith("put"):
            put += 1
            Context().run(told.admissions.put) if action.endswith("elsewhere") else told.admissions.put()
        begun, still_open = told.state()
        assert begun == put + still_open
    assert told.state() == (put, 0)


@given(
    st.lists(st.sampled_from(["puts", "puts in a block", "puts elsewhere", "rejects", "ends"]), max_size=9),
    st.data(),
)
def test_no_admission_is_left_when_each_item_was_put_or_given_up_in_whichever_order(
    fates: list[str], data: st.DataObject
) -> None:
    told = RecordedAdmissions()

    def elsewhere() -> None:
        # A thread that knows nothing of what it puts for.
        thread = threading.Thread(target=told.admissions.put)
        thread.start()
        thread.join()

    async def makes(fate: str, go: asyncio.Event) -> None:
        admission = told.admissions.admit()
        if fate in ("puts in a block", "ends"):
            with admission:
                await go.wait()
                if fate == "puts in a block":
                    told.admissions.put()
            return
        await go.wait()
        if fate == "puts":
            told.admissions.put()
            # As in a `finally`.
            admission.reject()
        elif fate == "puts elsewhere":
            elsewhere()
        else:
            admission.reject()

    async def tasks(order: list[int]) -> None:
        gates = [asyncio.Event() for _ in fates]
        made = [asyncio.create_task(makes(*each)) for each in zip(fates, gates, strict=True)]
        await asyncio.sleep(0)
        assert told.state() == (len(fates), len(fates))
        for done, number in enumerate(order, 1):
            gates[number].set()
            await made[number]
            if "puts elsewhere" not in fates:
                assert told.state()[1] == len(fates) - done, "exact, as each put is known"

    asyncio.run(tasks(data.draw(st.permutations(range(len(fates))))))
    assert told.state() == (sum(fate.startswith("puts") for fate in fates), 0)


def test_an_item_without_an_admission_counts_too() -> None:
    told = RecordedAdmissions()
    told.admissions.put()
    assert told.state() == (1, 0)


def test_a_producer_that_is_closed_keeps_what_consumers_have() -> None:
    told = RecordedAdmissions()
    left = told.admissions.admit()
    for _ in range(5):
        told.admissions.put()
    told.admissions.close(3)
    left.reject()
    assert told.state() == (3, 0)


@given(st.lists(st.sampled_from(["admit", "put", "reject"]), max_size=60))
def test_what_was_begun_is_what_was_put_and_what_may_yet_be(actions: list[str]) -> None:
    told = RecordedAdmissions()
    admitted: list[Admission] = []
    put = rejected = 0
    for action in actions:
        if action == "admit":
            admitted.append(told.admissions.admit())
        elif action == "put":
            told.admissions.put()
            put += 1
        elif admitted:
            before = told.state()[1]
            admitted.pop().reject()
            rejected += before - told.state()[1]
        begun, still_open = told.state()
        assert begun == put + still_open
        assert len(told.begun) == rejected
