"""The called end, without a transport: what is run, kept, answered and forgotten."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import CallError, EncodingError
from unirun.roles import trainer_invocation
from unirun.roles.calls.codec import (
    ACK,
    DESCRIBE,
    ERROR,
    GIVE_UP,
    INTERRUPTED,
    OK,
    OPEN_RPC,
    VISITOR,
    dump,
    encode_address,
    encode_giving_up,
    encode_request,
    load,
    load_error,
    outcome_of,
    refused_for,
)
from unirun.roles.calls.dispatcher import VISITOR_RESULTS_TTL, Dispatcher
from unirun.roles.calls.policy import invocations
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.wire.progress import IDLE, page

ME, TRAINER = WorkerId("desk", 0, 0), WorkerId("trainer", 0, 0)


class RecordingWorkload:
    """Counts what it runs."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.gate, self.begun = threading.Event(), threading.Event()

    def note(self, item: Any) -> Any:
        """Remember it."""
        self.ran.append(item)
        return item

    def hold(self) -> str:
        """Wait."""
        self.begun.set()
        self.gate.wait(WAIT_TIMEOUT)
        self.ran.append("held")
        return "held"

    def hold_and_fail(self) -> None:
        """Wait and fail."""
        self.hold()
        raise RuntimeError("connection reset by peer")

    @trainer_invocation(concurrency=2)
    def beside(self, item: Any) -> Any:
        """In a thread of a pool."""
        return item

    async def later(self, item: Any) -> Any:
        """In the loop."""
        return item


class Generations:
    """The generations of a worker's process group; each one that is formed is noted at the desk."""

    def __init__(self, workload: RecordingWorkload) -> None:
        self._workload = workload
        self.generation = self.guarded = 0
        self.away: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()

    def explain(self, error: BaseException) -> bool:
        """The word "closed" is one of a peer that has left."""
        return "closed" in str(error)

    def guard(self, call: Callable[[], Any]) -> Any:
        """Run it in the serving thread."""
        self.guarded += 1
        return call()

    def kept_away(self, by: Callable[[], bool]) -> None:
        """Note it."""
        self.away.put(by)

    def catch_up(self, generation: int) -> None:
        """Form it."""
        if generation > self.generation:
            self.generation = generation
            self._workload.ran.append(("generation", generation))


def request(seq: int, method: str) -> bytes:
    """A call of a method without arguments."""
    return encode_request(encode_address(TRAINER), seq, 0, False, [], method.encode(), dump(((), {}), "x")[0])


class DispatcherHarness:
    """A dispatcher that serves in a thread, and what it answers."""

    def __init__(self, target: Any, **options: Any) -> None:
        self.workload = target
        self.dispatcher = Dispatcher(target, ME, invocations(target), **options)
        self.thread = threading.Thread(target=self.dispatcher.serve, daemon=True)
        self.thread.start()

    @property
    def kept(self) -> int:
        """The number of calls whose result is not acked: waiting, running, or done."""
        return sum(len(caller.runs) for caller in list(self.dispatcher._callers.values()))

    def send(
        self,
        seq: int,
        method: str,
        *args: Any,
        caller: WorkerId = TRAINER,
        acks: tuple[int, ...] = (),
        generation: int = 0,
        joint: bool = False,
    ) -> queue.SimpleQueue[Parcel]:
        """A request; where its answer will be."""
        body, buffers = dump((args, {}), "arguments")
        head = encode_request(
            encode_address(caller), seq, generation, joint, list(acks), method.encode(), body
        )
        answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self.dispatcher.handle(Parcel(head, buffers), answers.put)
        return answers

    def give_up(self, seq: int, *, lost: bool = False) -> None:
        """Do nothing, as no caller waits for this call."""
        body = encode_giving_up(seq, lost=lost)
        head = encode_request(encode_address(TRAINER), 0, 0, False, [], GIVE_UP, body)
        self.dispatcher.handle(Parcel(head), lambda answer: None)

    def close(self) -> None:
        """End the thread."""
        self.workload.gate.set()
        self.dispatcher.stop()
        self.thread.join(WAIT_TIMEOUT)
        self.dispatcher.close()
        assert not self.thread.is_alive()


def value_of(answers: queue.SimpleQueue[Parcel]) -> Any:
    """The result, when it comes."""
    parcel = answers.get(timeout=WAIT_TIMEOUT)
    kind, body = outcome_of(parcel.head)
    assert kind == OK, load_error(body)
    return load(body, parcel.buffers)


def error_of(answers: queue.SimpleQueue[Parcel], kind: bytes = ERROR) -> BaseException:
    """The error, when it comes."""
    found, body = outcome_of(answers.get(timeout=WAIT_TIMEOUT).head)
    assert found == kind
    return load_error(body)


@pytest.fixture
def harness() -> Iterator[DispatcherHarness]:
    """One desk."""
    harness = DispatcherHarness(RecordingWorkload())
    yield harness
    harness.close()


class TestAtMostOnce:
    def test_a_request_that_comes_again_gets_the_answer_that_was_kept(
        self, harness: DispatcherHarness
    ) -> None:
        tensor = torch.ones(1000)
        first = value_of(harness.send(1, "note", tensor))
        again = value_of(harness.send(1, "note", tensor))
        assert torch.equal(first, again)
        assert len(harness.workload.ran) == 1

    def test_a_request_that_comes_again_while_it_runs_is_answered_twice_and_runs_once(
        self, harness: DispatcherHarness
    ) -> None:
        first = harness.send(1, "hold")
        assert harness.workload.begun.wait(WAIT_TIMEOUT)
        again = harness.send(1, "hold")
        harness.workload.gate.set()
        assert value_of(first) == value_of(again) == "held"
        assert harness.workload.ran == ["held"]

    def test_an_error_is_kept_until_it_is_acked(self, harness: DispatcherHarness) -> None:
        assert isinstance(error_of(harness.send(1, "note")), TypeError)
        assert isinstance(error_of(harness.send(1, "note")), TypeError)

    def test_the_same_number_of_another_caller_is_another_call(self, harness: DispatcherHarness) -> None:
        assert value_of(harness.send(1, "note", "a")) == "a"
        assert value_of(harness.send(1, "note", "b", caller=WorkerId("other", 0, 0))) == "b"

    def test_a_result_that_is_acked_is_forgotten(self, harness: DispatcherHarness) -> None:
        for seq in range(1, 6):
            value_of(harness.send(seq, "note", seq))
        assert harness.kept == 5
        value_of(harness.send(6, "note", 6, acks=(1, 2, 3)))
        assert harness.kept == 3
        value_of(harness.send(0, ACK.decode(), acks=(4, 5, 6, 77)))
        assert harness.kept == 0
        assert harness.workload.ran == [1, 2, 3, 4, 5, 6]

    def test_acks_of_one_caller_are_not_those_of_another(self, harness: DispatcherHarness) -> None:
        value_of(harness.send(1, "note", 1))
        value_of(harness.send(1, "note", 2, caller=WorkerId("other", 0, 0), acks=(1,)))
        assert harness.kept == 2


class TestACallerThatWasStartedAgain:
    def test_results_for_an_earlier_incarnation_of_a_caller_are_dropped(
        self, harness: DispatcherHarness
    ) -> None:
        for seq in range(1, 4):
            value_of(harness.send(seq, "note", seq))
        value_of(harness.send(1, "note", "new", caller=TRAINER._replace(incarnation=1)))
        assert harness.kept == 1
        assert harness.workload.ran == [1, 2, 3, "new"]

    def test_a_late_request_of_an_earlier_incarnation_is_not_run(self, harness: DispatcherHarness) -> None:
        value_of(harness.send(1, "note", "new", caller=TRAINER._replace(incarnation=1)))
        late = harness.send(9, "note", "old")
        assert value_of(harness.send(2, "note", "next", caller=TRAINER._replace(incarnation=1))) == "next"
        assert late.empty()
        assert harness.workload.ran == ["new", "next"]
        assert harness.kept == 2

    def test_another_rank_of_its_role_is_another_caller(self, harness: DispatcherHarness) -> None:
        value_of(harness.send(1, "note", 1))
        value_of(harness.send(1, "note", 2, caller=WorkerId("trainer", 1, 3)))
        assert value_of(harness.send(2, "note", 3)) == 3


class TestAnswers:
    def test_noise_is_answered_with_an_error(self, harness: DispatcherHarness) -> None:
        answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        harness.dispatcher.handle(Parcel(b"noise"), answers.put)
        assert "malformed" in str(error_of(answers))

    def test_methods_are_described_with_their_options(self, harness: DispatcherHarness) -> None:
        assert value_of(harness.send(1, DESCRIBE)) == invocations(RecordingWorkload())

    def test_methods_that_cannot_be_described_are_told_of(self) -> None:
        lock = threading.Lock()

        class Locked(RecordingWorkload):
            @trainer_invocation(post_func=lambda result: (lock, result))
            def work(self) -> None:
                """Has an option that does not pickle."""

        harness = DispatcherHarness(Locked())
        assert isinstance(error_of(harness.send(1, DESCRIBE)), EncodingError)
        assert value_of(harness.send(2, "note", 1)) == 1
        harness.close()

    def test_the_agent_of_torch_rpc_is_opened_beside_the_main_thread_and_only_when_asked(self) -> None:
        opened = list[str]()

        def open_rpc() -> str:
            opened.append(threading.current_thread().name)
            return "tcp://127.0.0.1:1"

        harness = DispatcherHarness(RecordingWorkload(), open_rpc=open_rpc)
        assert value_of(harness.send(1, "note", 1)) == 1
        assert not opened
        assert value_of(harness.send(2, OPEN_RPC)) == "tcp://127.0.0.1:1"
        assert opened == [f"unirun-{OPEN_RPC}_0"]
        harness.close()

    def test_an_agent_of_torch_rpc_that_cannot_be_opened_is_told_of(self) -> None:
        def open_rpc() -> str:
            raise RuntimeError("no address to listen on")

        harness = DispatcherHarness(RecordingWorkload(), open_rpc=open_rpc)
        assert "no address to listen on" in str(error_of(harness.send(1, OPEN_RPC)))
        harness.close()

    def test_an_unknown_method_is_told_with_those_there_are(self, harness: DispatcherHarness) -> None:
        error = error_of(harness.send(1, "nota"))
        assert isinstance(error, AttributeError)
        assert (
            str(error)
            == "desk:0 has no method 'nota'; its methods are: beside, hold, hold_and_fail, later, note"
        )

    def test_a_target_without_methods_says_so(self) -> None:
        answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        Dispatcher(object(), ME, {}).handle(Parcel(request(1, "note")), answers.put)
        assert str(error_of(answers)) == "desk:0 has no method 'note'; its methods are: none"

    @pytest.mark.parametrize("name", ["ran", "__init__", "gate", "_private", ""])
    def test_a_private_method_is_unknown(self, harness: DispatcherHarness, name: str) -> None:
        assert isinstance(error_of(harness.send(1, name)), AttributeError)

    def test_an_answer_that_cannot_be_sent_becomes_an_error_that_is_kept(
        self, harness: DispatcherHarness
    ) -> None:
        sent: queue.SimpleQueue[Parcel] = queue.SimpleQueue()

        def reply(parcel: Parcel) -> None:
            if parcel.head[:1] == OK:
                raise CallError("there is no memory")
            sent.put(parcel)

        head = encode_request(encode_address(TRAINER), 1, 0, False, [], b"note", dump((("x",), {}), "x")[0])
        harness.dispatcher.handle(Parcel(head), reply)
        assert "there is no memory" in str(error_of(sent))
        assert "there is no memory" in str(error_of(harness.send(1, "note", "x")))
        assert value_of(harness.send(2, "note", "y")) == "y"

    def test_a_call_after_stop_is_refused(self) -> None:
        harness = DispatcherHarness(RecordingWorkload())
        harness.close()
        error = error_of(harness.send(1, "note", 1))
        assert isinstance(error, CallError)
        assert str(error) == "desk:0 does not take calls any more; it was told to stop"
        assert harness.workload.ran == []


class TestTheServingThread:
    def test_is_idle_until_the_first_call_and_between_calls(self) -> None:
        """One that is not called for a long time does not hang. The serving thread is the main one, as in a worker."""
        seen = list[int]()

        class Seeing(RecordingWorkload):
            def look(self) -> None:
                seen.append(page().fields[IDLE])
                dispatcher.run_first(lambda: seen.append(page().fields[IDLE]))
                dispatcher.run_first(dispatcher.stop)

        workload = Seeing()
        dispatcher = Dispatcher(workload, ME, invocations(workload))
        page().fields[IDLE] = 0
        dispatcher.run_first(lambda: seen.append(page().fields[IDLE]))
        dispatcher.handle(Parcel(request(1, "look")), lambda parcel: None)
        dispatcher.serve()
        dispatcher.close()
        assert [*seen, page().fields[IDLE]] == [1, 0, 1, 0]

    def test_catches_up_with_the_generation_that_a_call_wants_before_it_runs(self) -> None:
        workload = RecordingWorkload()
        harness = DispatcherHarness(workload, generations=Generations(workload))
        value_of(harness.send(1, "note", "a", generation=3))
        value_of(harness.send(2, "note", "b", generation=4))
        harness.close()
        assert workload.ran == [("generation", 3), "a", ("generation", 4), "b"]

    @pytest.mark.parametrize("method", ["note", "beside", "later"])
    def test_refuses_a_joint_call_that_was_made_for_an_earlier_generation(self, method: str) -> None:
        workload = RecordingWorkload()
        harness = DispatcherHarness(workload, generations=Generations(workload))
        value_of(harness.send(1, "note", "a", generation=3, joint=True))
        answer = harness.send(2, method, "b", generation=2, joint=True).get(timeout=WAIT_TIMEOUT)
        assert refused_for(answer.head) == 3
        assert value_of(harness.send(3, "note", "alone", generation=2)) == "alone"
        value_of(harness.send(4, "note", "c", generation=3, joint=True))
        harness.close()
        assert workload.ran == [("generation", 3), "a", "alone", "c"]

    def test_refuses_what_waited_behind_a_call_in_which_the_generation_has_ended(self) -> None:
        workload = RecordingWorkload()
        generations = Generations(workload)
        harness = DispatcherHarness(workload, generations=generations)
        held = harness.send(1, "hold", generation=0, joint=True)
        assert workload.begun.wait(WAIT_TIMEOUT)
        behind = harness.send(2, "note", "behind", generation=0, joint=True)
        harness.dispatcher.run_first(lambda: generations.catch_up(1))
        workload.gate.set()
        assert value_of(held) == "held"
        assert refused_for(behind.get(timeout=WAIT_TIMEOUT).head) == 1
        harness.close()

    def test_run_first_runs_before_waiting_calls(self, harness: DispatcherHarness) -> None:
        held = harness.send(1, "hold")
        assert harness.workload.begun.wait(WAIT_TIMEOUT)
        behind = harness.send(2, "note", "behind")
        harness.dispatcher.run_first(lambda: harness.workload.ran.append("first"))
        harness.dispatcher.run_first(lambda: harness.workload.ran.append("second"))
        harness.workload.gate.set()
        assert (value_of(held), value_of(behind)) == ("held", "behind")
        assert harness.workload.ran == ["held", "first", "second", "behind"]

    def test_run_first_runs_without_a_call(self, harness: DispatcherHarness) -> None:
        done = threading.Event()
        harness.dispatcher.run_first(done.set)
        assert done.wait(WAIT_TIMEOUT)

    def test_says_that_it_is_kept_away_by_a_call_that_was_given_up_until_that_is_over(self) -> None:
        workload = RecordingWorkload()
        generations = Generations(workload)
        harness = DispatcherHarness(workload, generations=generations)
        held = harness.send(1, "hold")
        workload.begun.wait(WAIT_TIMEOUT)
        for seq, away in ((7, False), (1, True)):
            harness.give_up(seq)
            assert generations.away.empty() is not away
        by = generations.away.get(timeout=WAIT_TIMEOUT)
        assert by()
        workload.gate.set()
        assert value_of(held) is not None
        assert value_of(harness.send(2, "note", "next")) == "next"
        assert not by()
        harness.close()

    @pytest.mark.parametrize(("lost", "joint"), [(True, True), (True, False), (False, True)])
    def test_does_not_begin_a_joint_call_that_has_lost_another_worker(self, lost: bool, joint: bool) -> None:
        workload = RecordingWorkload()
        harness = DispatcherHarness(workload, generations=Generations(workload))
        harness.send(1, "hold")
        workload.begun.wait(WAIT_TIMEOUT)
        waiting = harness.send(2, "note", "run", joint=joint)
        harness.give_up(2, lost=lost)
        workload.gate.set()
        refused = refused_for(waiting.get(timeout=WAIT_TIMEOUT).head)
        assert (refused is not None) is (lost and joint)
        assert ("run" in workload.ran) is not (lost and joint)
        harness.close()

    def test_is_kept_away_by_a_call_of_a_trainer_that_has_a_successor(self) -> None:
        workload = RecordingWorkload()
        generations = Generations(workload)
        harness = DispatcherHarness(workload, generations=generations)
        harness.send(1, "hold")
        workload.begun.wait(WAIT_TIMEOUT)
        harness.send(1, "note", "next", caller=TRAINER._replace(incarnation=1))
        assert generations.away.get(timeout=WAIT_TIMEOUT)()
        harness.close()

    def test_an_error_during_a_loss_is_marked_as_interrupted(self, harness: DispatcherHarness) -> None:
        for loss in (1, 2):
            harness.workload.begun.clear()
            harness.workload.gate.clear()
            disturbed = harness.send(loss, "hold_and_fail")
            assert harness.workload.begun.wait(WAIT_TIMEOUT)
            harness.dispatcher.run_first(lambda: None)
            harness.workload.gate.set()
            assert "connection reset" in str(error_of(disturbed, INTERRUPTED))
        assert "connection reset" in str(error_of(harness.send(3, "hold_and_fail"), ERROR))

    @pytest.mark.parametrize("method", ["fail", "fail_beside", "fail_later"])
    def test_an_error_that_a_loss_explains_is_marked_before_the_loss_is_told(self, method: str) -> None:
        class Failing(RecordingWorkload):
            def fail(self, text: str) -> None:
                raise RuntimeError(text)

            @trainer_invocation(concurrency=2)
            def fail_beside(self, text: str) -> None:
                raise RuntimeError(text)

            async def fail_later(self, text: str) -> None:
                raise RuntimeError(text)

        workload = Failing()
        harness = DispatcherHarness(workload, generations=Generations(workload))
        assert "closed" in str(error_of(harness.send(1, method, "connection closed"), INTERRUPTED))
        assert "of my own" in str(error_of(harness.send(2, method, "of my own"), ERROR))
        harness.close()

    def test_only_calls_of_the_serving_thread_can_be_interrupted(self) -> None:
        workload = RecordingWorkload()
        generations = Generations(workload)
        harness = DispatcherHarness(workload, generations=generations)
        for number, method in enumerate(("beside", "later", "note"), 1):
            value_of(harness.send(number, method, "x"))
        assert generations.guarded == 1
        harness.close()

    def test_a_result_that_came_in_spite_of_a_loss_is_a_result(self, harness: DispatcherHarness) -> None:
        held = harness.send(1, "hold")
        assert harness.workload.begun.wait(WAIT_TIMEOUT)
        harness.dispatcher.run_first(lambda: None)
        harness.workload.gate.set()
        assert value_of(held) == "held"

    @pytest.mark.parametrize("method", ["leave", "leave_beside", "leave_later"])
    def test_system_exit_of_a_method_is_raised_in_the_serving_thread(self, method: str) -> None:
        class Leaving(RecordingWorkload):
            def leave(self) -> None:
                """Ends the program."""
                raise SystemExit(3)

            @trainer_invocation(concurrency=2)
            def leave_beside(self) -> None:
                """The same in a thread."""
                raise SystemExit(3)

            async def leave_later(self) -> None:
                """The same in an event loop."""
                raise SystemExit(3)

        workload = Leaving()
        dispatcher = Dispatcher(workload, ME, invocations(workload))
        dispatcher.handle(Parcel(request(1, method)), lambda parcel: pytest.fail("no answer"))
        with pytest.raises(SystemExit):
            dispatcher.serve()
        dispatcher.close()

    def test_concurrent_methods_run_beside_the_serving_thread_and_none_begins_after_close(self) -> None:
        gate, entered = threading.Event(), threading.Semaphore(0)

        class Crowd:
            @trainer_invocation(concurrency=2)
            def work(self) -> None:
                """Waits in a thread of a pool."""
                entered.release()
                gate.wait(WAIT_TIMEOUT)
                left.append(True)

        left: list[bool] = []
        crowd = Crowd()
        dispatcher = Dispatcher(crowd, ME, invocations(crowd))
        serving = threading.Thread(target=dispatcher.serve)
        serving.start()
        for seq in range(1, 6):
            dispatcher.handle(Parcel(request(seq, "work")), lambda parcel: None)
        assert entered.acquire(timeout=WAIT_TIMEOUT)
        assert entered.acquire(timeout=WAIT_TIMEOUT)
        assert not entered.acquire(timeout=0.1), "a third runs"
        dispatcher.stop()
        serving.join(WAIT_TIMEOUT)
        dispatcher.close()
        assert not left, "what runs is not waited for"
        gate.set()
        assert not entered.acquire(timeout=0.1), "one that waited has begun"

    def test_coroutines_run_beside_it(self, harness: DispatcherHarness) -> None:
        held = harness.send(1, "hold")
        assert harness.workload.begun.wait(WAIT_TIMEOUT)
        assert value_of(harness.send(2, "later", 5)) == 5
        assert held.empty()
        harness.workload.gate.set()
        assert value_of(held) == "held"

    def test_coroutines_keep_no_program_from_ending(self, harness: DispatcherHarness) -> None:
        before = {*threading.enumerate()}
        value_of(harness.send(1, "later", 5))
        (loop,) = {*threading.enumerate()} - before
        assert loop.daemon


def test_an_empty_answer_is_told_of() -> None:
    with pytest.raises(CallError, match="empty answer"):
        outcome_of(b"")


class TestVisitors:
    def test_what_is_kept_for_a_visitor_is_dropped_an_hour_after_its_last_word(self) -> None:
        clock = [0.0]
        harness = DispatcherHarness(RecordingWorkload(), now=lambda: clock[0])
        first, second, third = (WorkerId(f"{VISITOR}{n}", 0, 0) for n in range(3))
        for caller in (first, second, TRAINER):
            value_of(harness.send(1, "note", "x", caller=caller))
        clock[0] = VISITOR_RESULTS_TTL / 2
        value_of(harness.send(2, "note", "y", caller=second))
        clock[0] = VISITOR_RESULTS_TTL + 1
        value_of(harness.send(1, "note", "z", caller=third))
        assert {name for name, _ in harness.dispatcher._callers} == {second.role, third.role, TRAINER.role}
        harness.close()

    def test_a_visitor_whose_call_still_runs_is_kept(self) -> None:
        clock = [0.0]
        harness = DispatcherHarness(RecordingWorkload(), now=lambda: clock[0])
        first, second = (WorkerId(f"{VISITOR}{n}", 0, 0) for n in range(2))
        answers = harness.send(1, "hold", caller=first)
        assert harness.workload.begun.wait(WAIT_TIMEOUT)
        clock[0] = VISITOR_RESULTS_TTL + 1
        harness.send(1, "beside", "x", caller=second)
        assert first.role in {name for name, _ in harness.dispatcher._callers}
        harness.workload.gate.set()
        assert value_of(answers) == "held"
        harness.close()
