"""The called end, without a transport: what is run, kept, answered and forgotten."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.roles.calls.hall import ME, SOON, TRAINER, Desk, Generations, Hall, request
from unirun.errors import CallError, EncodingError
from unirun.roles import trainer_invocation
from unirun.roles.calls.codec import (
    ACK,
    DESCRIBE,
    ERROR,
    INTERRUPTED,
    OK,
    OPEN_RPC,
    VISITOR,
    dump,
    encode_address,
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


def value_of(answers: queue.SimpleQueue[Parcel]) -> Any:
    """The result, when it comes."""
    parcel = answers.get(timeout=SOON)
    kind, body = outcome_of(parcel.head)
    assert kind == OK, load_error(body)
    return load(body, parcel.buffers)


def error_of(answers: queue.SimpleQueue[Parcel], kind: bytes = ERROR) -> BaseException:
    """The error, when it comes."""
    found, body = outcome_of(answers.get(timeout=SOON).head)
    assert found == kind
    return load_error(body)


@pytest.fixture
def hall() -> Iterator[Hall]:
    """One desk."""
    hall = Hall(Desk())
    yield hall
    hall.close()


class TestAtMostOnce:
    def test_a_request_that_comes_again_gets_the_answer_that_was_kept(self, hall: Hall) -> None:
        tensor = torch.ones(1000)
        first = value_of(hall.send(1, "note", tensor))
        again = value_of(hall.send(1, "note", tensor))
        assert torch.equal(first, again)
        assert len(hall.desk.ran) == 1

    def test_a_request_that_comes_again_while_it_runs_is_answered_twice_and_runs_once(
        self, hall: Hall
    ) -> None:
        first = hall.send(1, "hold")
        assert hall.desk.begun.wait(SOON)
        again = hall.send(1, "hold")
        hall.desk.gate.set()
        assert value_of(first) == value_of(again) == "held"
        assert hall.desk.ran == ["held"]

    def test_an_error_is_kept_until_it_is_acked(self, hall: Hall) -> None:
        assert isinstance(error_of(hall.send(1, "note")), TypeError)
        assert isinstance(error_of(hall.send(1, "note")), TypeError)

    def test_the_same_number_of_another_caller_is_another_call(self, hall: Hall) -> None:
        assert value_of(hall.send(1, "note", "a")) == "a"
        assert value_of(hall.send(1, "note", "b", caller=WorkerId("other", 0, 0))) == "b"

    def test_a_result_that_is_acked_is_forgotten(self, hall: Hall) -> None:
        for seq in range(1, 6):
            value_of(hall.send(seq, "note", seq))
        assert hall.kept == 5
        value_of(hall.send(6, "note", 6, acks=(1, 2, 3)))
        assert hall.kept == 3
        value_of(hall.send(0, ACK.decode(), acks=(4, 5, 6, 77)))
        assert hall.kept == 0
        assert hall.desk.ran == [1, 2, 3, 4, 5, 6]

    def test_acks_of_one_caller_are_not_those_of_another(self, hall: Hall) -> None:
        value_of(hall.send(1, "note", 1))
        value_of(hall.send(1, "note", 2, caller=WorkerId("other", 0, 0), acks=(1,)))
        assert hall.kept == 2


class TestACallerThatWasStartedAgain:
    def test_results_for_an_earlier_incarnation_of_a_caller_are_dropped(self, hall: Hall) -> None:
        for seq in range(1, 4):
            value_of(hall.send(seq, "note", seq))
        value_of(hall.send(1, "note", "new", caller=TRAINER._replace(incarnation=1)))
        assert hall.kept == 1
        assert hall.desk.ran == [1, 2, 3, "new"]

    def test_a_late_request_of_an_earlier_incarnation_is_not_run(self, hall: Hall) -> None:
        value_of(hall.send(1, "note", "new", caller=TRAINER._replace(incarnation=1)))
        late = hall.send(9, "note", "old")
        assert value_of(hall.send(2, "note", "next", caller=TRAINER._replace(incarnation=1))) == "next"
        assert late.empty()
        assert hall.desk.ran == ["new", "next"]
        assert hall.kept == 2

    def test_another_rank_of_its_role_is_another_caller(self, hall: Hall) -> None:
        value_of(hall.send(1, "note", 1))
        value_of(hall.send(1, "note", 2, caller=WorkerId("trainer", 1, 3)))
        assert value_of(hall.send(2, "note", 3)) == 3


class TestAnswers:
    def test_noise_is_answered_with_an_error(self, hall: Hall) -> None:
        answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        hall.dispatcher.handle(Parcel(b"noise"), answers.put)
        assert "malformed" in str(error_of(answers))

    def test_methods_are_described_with_their_options(self, hall: Hall) -> None:
        assert value_of(hall.send(1, DESCRIBE)) == invocations(Desk())

    def test_methods_that_cannot_be_described_are_told_of(self) -> None:
        lock = threading.Lock()

        class Locked(Desk):
            @trainer_invocation(post_func=lambda result: (lock, result))
            def work(self) -> None:
                """Has an option that does not pickle."""

        hall = Hall(Locked())
        assert isinstance(error_of(hall.send(1, DESCRIBE)), EncodingError)
        assert value_of(hall.send(2, "note", 1)) == 1
        hall.close()

    def test_the_agent_of_torch_rpc_is_opened_beside_the_main_thread_and_only_when_asked(self) -> None:
        opened = list[str]()

        def open_rpc() -> str:
            opened.append(threading.current_thread().name)
            return "tcp://127.0.0.1:1"

        hall = Hall(Desk(), open_rpc=open_rpc)
        assert value_of(hall.send(1, "note", 1)) == 1
        assert not opened
        assert value_of(hall.send(2, OPEN_RPC)) == "tcp://127.0.0.1:1"
        assert opened == [f"unirun-{OPEN_RPC}_0"]
        hall.close()

    def test_an_agent_of_torch_rpc_that_cannot_be_opened_is_told_of(self) -> None:
        def open_rpc() -> str:
            raise RuntimeError("no address to listen on")

        hall = Hall(Desk(), open_rpc=open_rpc)
        assert "no address to listen on" in str(error_of(hall.send(1, OPEN_RPC)))
        hall.close()

    def test_an_unknown_method_is_told_with_those_there_are(self, hall: Hall) -> None:
        error = error_of(hall.send(1, "nota"))
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
    def test_a_private_method_is_unknown(self, hall: Hall, name: str) -> None:
        assert isinstance(error_of(hall.send(1, name)), AttributeError)

    def test_an_answer_that_cannot_be_sent_becomes_an_error_that_is_kept(self, hall: Hall) -> None:
        sent: queue.SimpleQueue[Parcel] = queue.SimpleQueue()

        def reply(parcel: Parcel) -> None:
            if parcel.head[:1] == OK:
                raise CallError("there is no memory")
            sent.put(parcel)

        head = encode_request(encode_address(TRAINER), 1, 0, False, [], b"note", dump((("x",), {}), "x")[0])
        hall.dispatcher.handle(Parcel(head), reply)
        assert "there is no memory" in str(error_of(sent))
        assert "there is no memory" in str(error_of(hall.send(1, "note", "x")))
        assert value_of(hall.send(2, "note", "y")) == "y"

    def test_a_call_after_stop_is_refused(self) -> None:
        hall = Hall(Desk())
        hall.close()
        error = error_of(hall.send(1, "note", 1))
        assert isinstance(error, CallError)
        assert str(error) == "desk:0 does not take calls any more; it was told to stop"
        assert hall.desk.ran == []


class TestTheServingThread:
    def test_catches_up_with_the_generation_that_a_call_wants_before_it_runs(self) -> None:
        desk = Desk()
        hall = Hall(desk, generations=Generations(desk))
        value_of(hall.send(1, "note", "a", generation=3))
        value_of(hall.send(2, "note", "b", generation=4))
        hall.close()
        assert desk.ran == [("generation", 3), "a", ("generation", 4), "b"]

    @pytest.mark.parametrize("method", ["note", "beside", "later"])
    def test_refuses_a_joint_call_that_was_made_for_an_earlier_generation(self, method: str) -> None:
        desk = Desk()
        hall = Hall(desk, generations=Generations(desk))
        value_of(hall.send(1, "note", "a", generation=3, joint=True))
        answer = hall.send(2, method, "b", generation=2, joint=True).get(timeout=SOON)
        assert refused_for(answer.head) == 3
        assert value_of(hall.send(3, "note", "alone", generation=2)) == "alone"
        value_of(hall.send(4, "note", "c", generation=3, joint=True))
        hall.close()
        assert desk.ran == [("generation", 3), "a", "alone", "c"]

    def test_refuses_what_waited_behind_a_call_in_which_the_generation_has_ended(self) -> None:
        desk = Desk()
        generations = Generations(desk)
        hall = Hall(desk, generations=generations)
        held = hall.send(1, "hold", generation=0, joint=True)
        assert desk.begun.wait(SOON)
        behind = hall.send(2, "note", "behind", generation=0, joint=True)
        hall.dispatcher.run_first(lambda: generations.catch_up(1))
        desk.gate.set()
        assert value_of(held) == "held"
        assert refused_for(behind.get(timeout=SOON).head) == 1
        hall.close()

    def test_run_first_runs_before_waiting_calls(self, hall: Hall) -> None:
        held = hall.send(1, "hold")
        assert hall.desk.begun.wait(SOON)
        behind = hall.send(2, "note", "behind")
        hall.dispatcher.run_first(lambda: hall.desk.ran.append("first"))
        hall.dispatcher.run_first(lambda: hall.desk.ran.append("second"))
        hall.desk.gate.set()
        assert (value_of(held), value_of(behind)) == ("held", "behind")
        assert hall.desk.ran == ["held", "first", "second", "behind"]

    def test_run_first_runs_without_a_call(self, hall: Hall) -> None:
        done = threading.Event()
        hall.dispatcher.run_first(done.set)
        assert done.wait(SOON)

    def test_says_that_it_is_kept_away_by_a_call_that_was_given_up_until_that_is_over(self) -> None:
        desk = Desk()
        generations = Generations(desk)
        hall = Hall(desk, generations=generations)
        held = hall.send(1, "hold")
        desk.begun.wait(SOON)
        for seq, away in ((7, False), (1, True)):
            hall.give_up(seq)
            assert generations.away.empty() is not away
        by = generations.away.get(timeout=SOON)
        assert by()
        desk.gate.set()
        assert value_of(held) is not None
        assert value_of(hall.send(2, "note", "next")) == "next"
        assert not by()
        hall.close()

    @pytest.mark.parametrize(("lost", "joint"), [(True, True), (True, False), (False, True)])
    def test_does_not_begin_a_joint_call_that_has_lost_another_worker(self, lost: bool, joint: bool) -> None:
        desk = Desk()
        hall = Hall(desk, generations=Generations(desk))
        hall.send(1, "hold")
        desk.begun.wait(SOON)
        waiting = hall.send(2, "note", "run", joint=joint)
        hall.give_up(2, lost=lost)
        desk.gate.set()
        refused = refused_for(waiting.get(timeout=SOON).head)
        assert (refused is not None) is (lost and joint)
        assert ("run" in desk.ran) is not (lost and joint)
        hall.close()

    def test_is_kept_away_by_a_call_of_a_trainer_that_has_a_successor(self) -> None:
        desk = Desk()
        generations = Generations(desk)
        hall = Hall(desk, generations=generations)
        hall.send(1, "hold")
        desk.begun.wait(SOON)
        hall.send(1, "note", "next", caller=TRAINER._replace(incarnation=1))
        assert generations.away.get(timeout=SOON)()
        hall.close()

    def test_an_error_during_a_loss_is_marked_as_interrupted(self, hall: Hall) -> None:
        for loss in (1, 2):
            hall.desk.begun.clear()
            hall.desk.gate.clear()
            disturbed = hall.send(loss, "hold_and_fail")
            assert hall.desk.begun.wait(SOON)
            hall.dispatcher.run_first(lambda: None)
            hall.desk.gate.set()
            assert "connection reset" in str(error_of(disturbed, INTERRUPTED))
        assert "connection reset" in str(error_of(hall.send(3, "hold_and_fail"), ERROR))

    @pytest.mark.parametrize("method", ["fail", "fail_beside", "fail_later"])
    def test_an_error_that_a_loss_explains_is_marked_before_the_loss_is_told(self, method: str) -> None:
        class Failing(Desk):
            def fail(self, text: str) -> None:
                raise RuntimeError(text)

            @trainer_invocation(concurrency=2)
            def fail_beside(self, text: str) -> None:
                raise RuntimeError(text)

            async def fail_later(self, text: str) -> None:
                raise RuntimeError(text)

        desk = Failing()
        hall = Hall(desk, generations=Generations(desk))
        assert "closed" in str(error_of(hall.send(1, method, "connection closed"), INTERRUPTED))
        assert "of my own" in str(error_of(hall.send(2, method, "of my own"), ERROR))
        hall.close()

    def test_a_result_that_came_in_spite_of_a_loss_is_a_result(self, hall: Hall) -> None:
        held = hall.send(1, "hold")
        assert hall.desk.begun.wait(SOON)
        hall.dispatcher.run_first(lambda: None)
        hall.desk.gate.set()
        assert value_of(held) == "held"

    @pytest.mark.parametrize("method", ["leave", "leave_beside", "leave_later"])
    def test_system_exit_of_a_method_is_raised_in_the_serving_thread(self, method: str) -> None:
        class Leaving(Desk):
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

        desk = Leaving()
        dispatcher = Dispatcher(desk, ME, invocations(desk))
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
                gate.wait(SOON)
                left.append(True)

        left: list[bool] = []
        crowd = Crowd()
        dispatcher = Dispatcher(crowd, ME, invocations(crowd))
        serving = threading.Thread(target=dispatcher.serve)
        serving.start()
        for seq in range(1, 6):
            dispatcher.handle(Parcel(request(seq, "work")), lambda parcel: None)
        assert entered.acquire(timeout=SOON)
        assert entered.acquire(timeout=SOON)
        assert not entered.acquire(timeout=0.1), "a third runs"
        dispatcher.stop()
        serving.join(SOON)
        dispatcher.close()
        assert not left, "what runs is not waited for"
        gate.set()
        assert not entered.acquire(timeout=0.1), "one that waited has begun"

    def test_coroutines_run_beside_it(self, hall: Hall) -> None:
        held = hall.send(1, "hold")
        assert hall.desk.begun.wait(SOON)
        assert value_of(hall.send(2, "later", 5)) == 5
        assert held.empty()
        hall.desk.gate.set()
        assert value_of(held) == "held"

    def test_coroutines_keep_no_program_from_ending(self, hall: Hall) -> None:
        before = {*threading.enumerate()}
        value_of(hall.send(1, "later", 5))
        (loop,) = {*threading.enumerate()} - before
        assert loop.daemon


def test_an_empty_answer_is_told_of() -> None:
    with pytest.raises(CallError, match="empty answer"):
        outcome_of(b"")


class TestVisitors:
    def test_what_is_kept_for_a_visitor_is_dropped_an_hour_after_its_last_word(self) -> None:
        clock = [0.0]
        hall = Hall(Desk(), now=lambda: clock[0])
        first, second, third = (WorkerId(f"{VISITOR}{n}", 0, 0) for n in range(3))
        for caller in (first, second, TRAINER):
            value_of(hall.send(1, "note", "x", caller=caller))
        clock[0] = VISITOR_RESULTS_TTL / 2
        value_of(hall.send(2, "note", "y", caller=second))
        clock[0] = VISITOR_RESULTS_TTL + 1
        value_of(hall.send(1, "note", "z", caller=third))
        assert {name for name, _ in hall.dispatcher._callers} == {second.role, third.role, TRAINER.role}
        hall.close()

    def test_a_visitor_whose_call_still_runs_is_kept(self) -> None:
        clock = [0.0]
        hall = Hall(Desk(), now=lambda: clock[0])
        first, second = (WorkerId(f"{VISITOR}{n}", 0, 0) for n in range(2))
        answers = hall.send(1, "hold", caller=first)
        assert hall.desk.begun.wait(SOON)
        clock[0] = VISITOR_RESULTS_TTL + 1
        hall.send(1, "beside", "x", caller=second)
        assert first.role in {name for name, _ in hall.dispatcher._callers}
        hall.desk.gate.set()
        assert value_of(answers) == "held"
        hall.close()
