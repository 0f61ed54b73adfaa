"""`InvocationRef`: results as they come, from whatever thread asks."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import CallError, EncodingError, InvocationTimeout, RemoteTraceback, UsageError, WorkerLost
from unirun.roles import InvocationRef, wait
from unirun.roles.calls.call import Method
from unirun.roles.calls.codec import ERROR, INTERRUPTED, OK, dump, dump_error
from unirun.roles.calls.policy import Invocation
from unirun.roles.transport.protocol import Parcel, Scheduler, own


def ref_of(
    workers: int = 1, *, bare: bool = False, post: Callable[[Any], Any] | None = None
) -> InvocationRef[Any]:
    """A call of ``update`` that nobody has answered."""
    nobody: Any = None
    options = Invocation(target="RANK0" if bare else "ALL", post_func=post)
    method = Method(
        "actor",
        "update",
        options,
        range(workers),
        False,
        workers > 1,
        2.5,
        b"update",
        nobody,
        {},
        lambda run: run(),
    )
    return InvocationRef(method, range(workers), sharding={0: "replicate"})


def answer(value: Any) -> Parcel:
    """A worker's answer."""
    head, buffers = dump(value, "a result")
    return own(Parcel(OK + head, buffers))


def failure(error: BaseException, kind: bytes = ERROR) -> Parcel:
    """A worker's error."""
    return Parcel(kind + dump_error(error, "actor:0")[0])


def finished(*outcomes: Any, **options: Any) -> InvocationRef[Any]:
    """A call that was answered with these values, or ended with these errors."""
    ref = ref_of(len(outcomes), **options)
    for index, outcome in enumerate(outcomes):
        ref.settle(index, outcome if isinstance(outcome, Parcel | BaseException) else answer(outcome))
    ref.finish()
    return ref


def settle_and_finish(ref: InvocationRef[Any], value: Any) -> None:
    """The only worker of a call has answered."""
    ref.settle(0, answer(value))
    ref.finish()


class _Bomb:
    """Fails when it is unpickled."""

    def __reduce__(self) -> Any:
        return _burst, ()


def _burst() -> None:
    raise ValueError("burst")


class TestResults:
    def test_results_come_in_rank_order_or_bare(self) -> None:
        assert finished(1, 2, 3).result() == [1, 2, 3]
        assert finished(1).result() == [1]
        assert finished(1, bare=True).result() == 1

    def test_a_result_is_the_same_object_each_time(self) -> None:
        ref = finished(torch.ones(1000), bare=True)
        assert ref.result() is ref.result()

    def test_post_func_is_called_once(self) -> None:
        seen: list[list[int]] = []

        def post(results: list[int]) -> int:
            seen.append(results)
            return sum(results)

        ref = finished(1, 2, post=post)
        threads = [threading.Thread(target=ref.result) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_TIMEOUT)
        assert ref.result() == 3
        assert seen == [[1, 2]]

    def test_an_error_in_post_func_is_the_same_each_time(self) -> None:
        calls: list[int] = []

        def post(result: int) -> None:
            calls.append(result)
            raise KeyError("post")

        ref = finished(1, bare=True, post=post)
        for _ in range(3):
            with pytest.raises(KeyError, match="post"):
                ref.result()
        assert calls == [1]
        assert ref.exception() is ref.exception()

    def test_none_is_a_result_of_a_call(self) -> None:
        assert finished(None, bare=True).result() is None
        assert finished(None, bare=True).exception() is None

    def test_that_burst_name_who_sent_them(self) -> None:
        ref = finished(1, _Bomb())
        for _ in range(2):
            with pytest.raises(
                EncodingError, match="the result of update from actor:1 cannot be unpickled: burst"
            ):
                ref.result()

    def test_may_be_waited_for_by_many_threads(self) -> None:
        ref, found = ref_of(bare=True), []
        threads = [threading.Thread(target=lambda: found.append(ref.result(WAIT_TIMEOUT))) for _ in range(8)]
        for thread in threads:
            thread.start()
        settle_and_finish(ref, 5)
        for thread in threads:
            thread.join(WAIT_TIMEOUT)
        assert found == [5] * 8

    def test_are_fetched_by_whoever_waits_without_a_limit(self) -> None:
        ref = ref_of(bare=True)
        ref.fetch = partial(settle_and_finish, ref, 5)
        assert isinstance(ref.exception(0), InvocationTimeout), "with a limit, others bring them"
        assert ref.result() == 5

    def test_that_nobody_holds_are_free_at_once(self) -> None:
        gc.disable()
        try:
            ref = finished(torch.ones(1000), bare=True)
            watch = weakref.ref(ref.result())
            del ref
            assert watch() is None
        finally:
            gc.enable()


class TestErrors:
    def test_an_error_is_raised_with_its_origin(self) -> None:
        ref = finished(failure(ValueError("bad")))
        for _ in range(2):
            with pytest.raises(ValueError, match="bad") as caught:
                ref.result()
            assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert isinstance(ref.exception(), ValueError)

    def test_a_loss_comes_before_errors_and_these_before_their_consequences(self) -> None:
        lost = WorkerLost("lost", worker="actor:1")
        followed, plain = failure(RuntimeError("connection reset"), INTERRUPTED), failure(ValueError("mine"))
        assert finished(followed, plain, lost).exception() is lost
        assert isinstance(finished(followed, plain, 3).exception(), ValueError)
        assert isinstance(finished(failure(ValueError("mine"), INTERRUPTED), 3).exception(), ValueError)

    def test_an_error_of_a_collective_that_a_loss_elsewhere_has_ended_is_a_loss(self) -> None:
        interrupted = finished(3, failure(RuntimeError("connection closed"), INTERRUPTED)).exception()
        assert isinstance(interrupted, WorkerLost)
        assert interrupted.worker == "actor:1"
        assert isinstance(interrupted.__cause__, RuntimeError)

    def test_the_first_of_several_errors_is_raised(self) -> None:
        ref = ref_of(2)
        ref.settle(1, failure(ValueError("first")))
        ref.settle(0, failure(ValueError("second")))
        ref.finish()
        with pytest.raises(ValueError, match="first"):
            ref.result()

    def test_the_root_cause_comes_before_what_follows_from_it(self) -> None:
        disturbed = failure(RuntimeError("connection closed by peer"), INTERRUPTED)
        lost = WorkerLost("actor:1 was lost", worker="actor:1")
        for outcomes, cause in (
            ((disturbed, failure(ValueError("own"))), "own"),
            ((disturbed, CallError("not sent")), "not sent"),
            ((CallError("not sent"), lost), "was lost"),
            ((failure(ValueError("own")), lost, disturbed), "was lost"),
        ):
            with pytest.raises(Exception, match=cause):
                finished(*outcomes).result()


class TestTimeouts:
    def test_the_deadline_says_who_is_missing_and_has_the_rest(self) -> None:
        ref = ref_of(4)
        ref.settle(1, answer("one"))
        ref.settle(2, failure(ValueError("bad")))
        ref.expire()
        with pytest.raises(
            InvocationTimeout,
            match="update was not answered within its deadline of 2.5 s by actor:0, actor:3; give",
        ) as caught:
            ref.result()
        assert caught.value.missing == ("actor:0", "actor:3")
        assert caught.value.results == {"actor:1": "one"}
        assert ref.exception() is caught.value

    def test_a_worker_that_was_lost_has_not_answered(self) -> None:
        ref = ref_of(3)
        ref.settle(0, WorkerLost("actor:0 was lost", worker="actor:0"))
        ref.settle(1, answer("one"))
        ref.expire()
        error = ref.exception()
        assert isinstance(error, InvocationTimeout)
        assert (error.missing, error.results) == (("actor:0", "actor:2"), {"actor:1": "one"})

    def test_answers_after_the_deadline_change_nothing(self) -> None:
        ref = ref_of()
        ref.expire()
        settle_and_finish(ref, 1)
        assert isinstance(ref.exception(), InvocationTimeout)

    def test_a_result_that_bursts_does_not_keep_the_deadline_from_being_told(self) -> None:
        ref = ref_of(3)
        ref.settle(0, answer(_Bomb()))
        ref.settle(1, answer("good"))
        ref.expire()
        error = ref.exception()
        assert isinstance(error, InvocationTimeout)
        assert (error.missing, error.results) == (("actor:2",), {"actor:1": "good"})

    def test_a_deadline_that_comes_with_the_last_answer_names_nobody(self) -> None:
        ref = ref_of()
        ref.settle(0, answer("just now"))
        ref.expire()
        with pytest.raises(InvocationTimeout, match="by nobody; give") as caught:
            ref.result()
        assert caught.value.missing == ()
        assert caught.value.results == {"actor:0": "just now"}

    @pytest.mark.parametrize("timeout", [0, 0.0, -5, 0.02])
    def test_whoever_does_not_want_to_wait_longer_is_told_and_the_call_goes_on(self, timeout: float) -> None:
        ref = ref_of(2)
        ref.settle(0, answer(torch.ones(500)))
        error = ref.exception(timeout)
        assert isinstance(error, InvocationTimeout)
        assert error.missing == ("actor:1",)
        assert not ref.done()
        early = error.results["actor:0"]
        ref.settle(1, answer(2))
        ref.finish()
        assert ref.result()[0] is early, "what was handed out is not handed out again as another"

    @pytest.mark.parametrize("timeout", [math.inf, 1e20])
    def test_a_timeout_may_have_any_size(self, timeout: float) -> None:
        ref = ref_of(bare=True)
        threading.Timer(0.05, partial(settle_and_finish, ref, 1)).start()
        assert ref.result(timeout) == 1
        assert wait([ref], timeout=timeout) == ([ref], [])


class TestCallbacks:
    def test_a_callback_is_called_once_with_the_ref(self) -> None:
        ref, seen = ref_of(), list[InvocationRef[Any]]()
        ref.add_done_callback(seen.append)
        assert seen == []
        settle_and_finish(ref, 1)
        ref.finish()
        assert seen == [ref]
        ref.add_done_callback(seen.append)
        assert seen == [ref, ref], "at once when it is done already"

    def test_one_that_fails_keeps_no_other_from_being_called(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ref, seen, scheduler = ref_of(), list[InvocationRef[Any]](), Scheduler("test")
        ref.prepared.deliver = scheduler.soon
        ref.add_done_callback(lambda _: 1 / 0)  # type: ignore[arg-type]
        ref.add_done_callback(seen.append)
        ref.expire()
        scheduler.close()
        assert seen == [ref]
        assert "ZeroDivisionError" in capsys.readouterr().err

    def test_an_error_of_a_callback_goes_no_further_when_the_call_is_done_already(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ref = ref_of()
        ref.expire()
        ref.add_done_callback(lambda _: 1 / 0)  # type: ignore[arg-type]
        assert "ZeroDivisionError" in capsys.readouterr().err

    def test_a_callback_can_ask_for_the_result(self) -> None:
        ref, seen = ref_of(bare=True), []
        ref.add_done_callback(lambda done: seen.append(done.result()))
        settle_and_finish(ref, 4)
        assert seen == [4]


class TestInAsyncio:
    def test_a_ref_can_be_awaited(self) -> None:
        async def main() -> tuple[int, int]:
            late = ref_of(bare=True)
            threading.Timer(0.05, partial(settle_and_finish, late, 2)).start()
            async with asyncio.timeout(WAIT_TIMEOUT):
                return await finished(1, bare=True), await late

        assert asyncio.run(main()) == (1, 2)

    def test_many_at_once_and_the_loop_goes_on(self) -> None:
        async def main() -> list[int]:
            refs = [ref_of(bare=True) for _ in range(20)]
            ticks = asyncio.Event()

            async def answer_all() -> None:
                for number, ref in enumerate(refs):
                    settle_and_finish(ref, number)
                ticks.set()

            async with asyncio.timeout(WAIT_TIMEOUT):
                *results, _ = await asyncio.gather(*map(_awaited, refs), answer_all())
            assert ticks.is_set()
            return results

        assert asyncio.run(main()) == list(range(20))

    def test_an_awaited_ref_raises_its_error(self) -> None:
        async def main() -> None:
            await finished(failure(ValueError("bad")))

        with pytest.raises(ValueError, match="bad"):
            asyncio.run(main())

    def test_who_stops_waiting_leaves_nothing_behind(self, capsys: pytest.CaptureFixture[str]) -> None:
        ref = ref_of()

        async def main() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await ref

        asyncio.run(main())
        settle_and_finish(ref, 1)
        assert capsys.readouterr().err == "", "the loop is closed, and nobody minds"


async def _awaited(ref: InvocationRef[Any]) -> Any:
    return await ref


class TestWait:
    def test_returns_who_is_done_and_who_is_not_in_their_order(self) -> None:
        refs = [finished(1), ref_of(), finished(2), ref_of()]
        assert wait(refs, 2) == ([refs[0], refs[2]], [refs[1], refs[3]])
        assert wait(refs, 0) == ([refs[0], refs[2]], [refs[1], refs[3]])

    def test_wakes_up_with_the_last_that_is_wanted(self) -> None:
        refs = [ref_of() for _ in range(3)]
        for ref in refs[:2]:
            threading.Timer(0.05, lambda ref=ref: (ref.settle(0, answer(1)), ref.finish())).start()
        done, pending = wait(refs, 2, WAIT_TIMEOUT)
        assert (len(done), len(pending)) == (2, 1)

    def test_wait_counts_a_failed_ref_as_done(self) -> None:
        ref = finished(failure(ValueError()))
        assert wait([ref]) == ([ref], [])

    def test_wait_returns_after_its_timeout(self) -> None:
        ref, began = ref_of(), time.monotonic()
        assert wait([ref], timeout=0.1) == ([], [ref])
        assert 0.1 <= time.monotonic() - began < WAIT_TIMEOUT
        assert wait([ref], timeout=0) == ([], [ref])
        assert wait([ref], timeout=-1) == ([], [ref])

    def test_wait_takes_no_more_than_what_is_left_of_its_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times, ref, began = iter([0.0, 2 * WAIT_TIMEOUT]), ref_of(), time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr("unirun.roles.calls.call.time", SimpleNamespace(monotonic=lambda: next(times)))
            assert wait([ref], timeout=WAIT_TIMEOUT) == ([], [ref])
        assert time.monotonic() - began < WAIT_TIMEOUT / 2

    def test_wait_for_no_refs_returns_at_once(self) -> None:
        assert wait([], 0) == ([], [])
        with pytest.raises(UsageError, match="of 0 refs"):
            wait([])

    @pytest.mark.parametrize("number", [-1, 3])
    def test_wait_for_more_refs_than_given_is_refused(self, number: int) -> None:
        with pytest.raises(UsageError, match=f"num_returns={number}"):
            wait([ref_of(), ref_of()], number)

    def test_leaves_nothing_in_those_that_it_did_not_wait_for(self) -> None:
        ref = ref_of()
        for _ in range(100):
            wait([finished(1), ref])
        assert ref._wakes == []

    def test_wait_for_many_refs_is_quick(self) -> None:
        refs = [finished(1) for _ in range(5000)]
        began = time.thread_time()
        assert wait(refs, len(refs)) == (refs, [])
        assert time.thread_time() - began < 2.0


def test_the_repr_of_a_ref_names_method_workers_and_state() -> None:
    ref = ref_of(2)
    assert repr(ref) == "<update on actor:0, actor:1: 0 of 2 answered>"
    assert (ref.method, ref.workers, ref.sharding) == ("update", ("actor:0", "actor:1"), {0: "replicate"})
    ref.settle(0, answer(1))
    assert "1 of 2 answered" in repr(ref)
    ref.expire()
    assert repr(ref) == "<update on actor:0, actor:1: done>"
