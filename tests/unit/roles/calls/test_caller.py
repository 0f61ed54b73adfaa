"""The calling end, without workers: what it sends, and what it makes of answers and of what the directory says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sim.calls.threads import FakeScheduler
from tests.sim.fake_clock import FakeClock
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import CallError, ChannelError, InvocationTimeout, WorkerLost
from unirun.observe.spans import TraceSpan
from unirun.roles import InvocationRef
from unirun.roles.calls.call import Call
from unirun.roles.calls.caller import GROUP_ERROR_DELAY, Caller
from unirun.roles.calls.codec import (
    ERROR,
    INTERRUPTED,
    OK,
    OPEN_RPC,
    decode_request,
    dump,
    dump_error,
    encode_refusal,
)
from unirun.roles.calls.policy import Invocation
from unirun.roles.peers import Peer, Peers
from unirun.roles.transport.protocol import Connection, Parcel
from unirun.values import WorkerId

OLD, NEW = WorkerId("actor", 0, 0), WorkerId("actor", 0, 1)
RESULT = Parcel(OK + dump(42, "a result")[0])


def failure(error: Exception, kind: bytes = ERROR) -> Parcel:
    """A worker's error."""
    return Parcel(kind + dump_error(error, "actor:1")[0])


class Stale(Peers):
    """A directory that has changed, and said so, just after the caller's first look."""

    def __init__(self) -> None:
        self._looks = iter([Peer(OLD, "old")])

    def size(self, role: str) -> int:
        """Of any role."""
        return 1

    def find(self, role: str, rank: int) -> Peer:
        """The old place once."""
        return next(self._looks, Peer(NEW, "new", 1))

    def when_changed(self, listener: Callable[[], None]) -> None:
        """It does not change again."""


class Unreachable:
    """A transport whose worker is dead."""

    name = "unreachable"

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Connection:
        raise ChannelError(f"{peer} is not there")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_a_call_to_a_worker_that_was_replaced_meanwhile_fails_at_once() -> None:
    caller = Caller(WorkerId("trainer", 0, 0), Stale(), Unreachable(), call_timeout=60.0)
    try:
        ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False), [0]), (), {})
        with pytest.raises(WorkerLost, match="started again"):
            ref.result(WAIT_TIMEOUT)
    finally:
        caller.close()


class Still(Stale):
    """A directory that does not change."""

    def find(self, role: str, rank: int) -> Peer:
        """Always the same."""
        return Peer(NEW, "there")


class Leading(Unreachable):
    """A transport that has one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Connection:
        return self.connection


class Answering:
    """A connection to a worker that answers each request with the same, and what it was asked."""

    def __init__(self, answer: Parcel) -> None:
        self.answer, self.asked = answer, list[str]()

    def call(self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None) -> None:
        """Answer at once."""
        self.asked.append(decode_request(parcel.head).method)
        done(self.answer)

    def keep(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is nothing to close."""


def test_a_worker_is_asked_once_for_its_agent_of_torch_rpc() -> None:
    connection = Answering(Parcel(OK + dump((NEW, "tcp://127.0.0.1:1"), "a result")[0]))
    caller = Caller(WorkerId("trainer", 0, 0), Still(), Leading(connection), call_timeout=60.0)
    assert [caller.open_rpc("actor", 0) for _ in range(2)] == [(NEW, "tcp://127.0.0.1:1")] * 2
    assert connection.asked == [OPEN_RPC]
    caller.close()


class FakeTransport(Unreachable):
    """A transport to two workers, which answer when the test says so."""

    name = "post"

    def __init__(self) -> None:
        self.unreachable: set[int] = set()
        self.open: dict[int, list[Callable[[Parcel], None]]] = {0: [], 1: []}
        self.patience: list[float | None] = []

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Any:
        if peer.rank in self.unreachable:
            raise ChannelError(f"{peer} is not there")
        fake_transport = self

        class Box:
            def call(
                self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
            ) -> Callable[[], None] | None:
                fake_transport.open[peer.rank].append(done)
                fake_transport.patience.append(patience)
                return (lambda: done(RESULT)) if patience is not None else None

            def keep(self) -> None:
                """Nothing waits."""

            def close(self) -> None:
                """Nothing to close."""

        return Box()


class FakePeers(Stale):
    """A directory that says what it is told to."""

    def __init__(self) -> None:
        self.place = Peer(OLD, "old")
        self._listeners: list[Callable[[], None]] = []

    def find(self, role: str, rank: int) -> Peer:
        """As told."""
        return self.place

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change."""
        self._listeners.append(listener)

    def say(self, place: Peer) -> None:
        """Say this from now on."""
        self.place = place
        for listener in self._listeners:
            listener()


class Pair(FakePeers):
    """A directory of two ranks that serve."""

    generation = 0

    def size(self, role: str) -> int:
        """Two."""
        return 2

    def find(self, role: str, rank: int) -> Peer:
        """Always the same."""
        return Peer(WorkerId(role, rank, 0), "here", self.generation)


class Debugged(Pair):
    """A directory of two ranks, of which a debugger may hold the second one."""

    held = False

    def find(self, role: str, rank: int) -> Peer:
        return replace(super().find(role, rank), held=self.held and rank == 1)


def caller_of(
    directory: Debugged, transport: FakeTransport, clock: FakeClock
) -> tuple[Caller, Callable[[], None]]:
    """A caller, and what tells it that the directory has changed."""
    changed: list[Callable[[], None]] = []
    directory.when_changed = changed.append  # type: ignore[method-assign, assignment]
    me = WorkerId("trainer", 0, 0)
    caller = Caller(me, directory, transport, call_timeout=60.0, scheduler=FakeScheduler(clock))
    return caller, changed[0]


def test_the_deadline_of_a_call_begins_again_while_a_rank_of_its_role_is_debugged_and_after_that() -> None:
    clock, directory = FakeClock(), Debugged()
    caller, changed = caller_of(directory, FakeTransport(), clock)
    began = clock.now
    ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False)), (), {})

    def run_until(when: float) -> None:
        caller._scheduler.at(when, lambda: None)
        while clock.now < when:
            assert clock.run_next()

    def tell(*, held: bool) -> None:
        directory.held = held
        changed()
        run_until(clock.now + 0.01)

    run_until(began + 30)
    tell(held=True)
    run_until(began + 150)
    assert not ref.done()
    tell(held=False)
    # It was renewed at 120 s, and is at 180 s, as it was debugged since.
    run_until(began + 239)
    assert not ref.done()
    run_until(began + 241)
    with pytest.raises(InvocationTimeout):
        ref.result(0)


def test_a_call_that_is_answered_at_its_deadline_is_not_open_while_a_rank_is_debugged() -> None:
    clock, fake_transport, directory = FakeClock(), FakeTransport(), Debugged()
    directory.held = True
    caller, changed = caller_of(directory, fake_transport, clock)
    ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False)), (), {})
    changed()
    while caller._calls("actor"):
        assert clock.run_next(), "until its time is over"
    for rank in (0, 1):
        fake_transport.open[rank].pop()(RESULT)
    assert ref.done()
    clock.run_next()
    assert not caller._calls("actor"), "the role could not grow"


def test_a_callback_runs_in_another_thread_than_the_one_that_brings_the_answer() -> None:
    fake_transport, ran = FakeTransport(), queue.SimpleQueue[threading.Thread]()
    caller = Caller(WorkerId("trainer", 0, 0), Pair(), fake_transport, call_timeout=60.0)
    try:
        ref = caller.invoke(caller.method("actor", "step", Invocation(target=0)), (), {})
        ref.add_done_callback(lambda _: ran.put(threading.current_thread()))
        fake_transport.open[0].pop()(RESULT)
        assert ran.get(timeout=WAIT_TIMEOUT) is not threading.current_thread()
    finally:
        caller.close()


def test_the_span_of_a_call_is_written_once_though_two_answers_come_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_transport, kept = FakeTransport(), list[Callable[[], TraceSpan]]()
    caller = Caller(WorkerId("trainer", 0, 0), Pair(), fake_transport, call_timeout=60.0)
    spans: Any = SimpleNamespace(on=True, keep=kept.append)
    caller._spans, settle = spans, Call.settle

    def settled(call: Call, index: int, outcome: Parcel) -> None:
        settle(call, index, outcome)
        if index == 0:
            # Another thread has it before this one looks whether all have answered.
            fake_transport.open[1].pop()(RESULT)

    monkeypatch.setattr(Call, "settle", settled)
    try:
        caller.invoke(caller.method("actor", "step", Invocation(blocking=False)), (), {})
        fake_transport.open[0].pop()(RESULT)
    finally:
        caller.close()
    (make,) = kept
    assert make().workers == ("actor:0", "actor:1")


def test_a_call_of_any_worker_waits_for_one_that_will_serve_though_another_has_ended() -> None:
    class Half(Pair):
        serves = False

        def find(self, role: str, rank: int) -> Peer:
            """Rank 0 has ended, and rank 1 is starting."""
            found = super().find(role, rank)
            return found if rank and self.serves else replace(found, endpoint="", over=not rank)

    fake_transport, directory = FakeTransport(), Half()
    caller = Caller(WorkerId("trainer", 0, 0), directory, fake_transport, call_timeout=60.0)
    try:
        ref = caller.invoke(caller.method("actor", "step", Invocation(target="ANY", blocking=False)), (), {})
        assert ref.workers == ("actor:1",)
    finally:
        caller.close()


def test_only_who_waits_for_one_worker_and_nothing_else_waits_at_its_connection() -> None:
    fake_transport = FakeTransport()
    caller = Caller(WorkerId("trainer", 0, 0), Pair(), fake_transport, call_timeout=5.0)
    try:
        ref = caller.invoke(caller.method("actor", "step", Invocation(target=1)), (), {})
        assert fake_transport.patience == [5.0]
        assert ref.result() == 42, "what it waits with brings the answer"
        for options in (Invocation(), Invocation(target=1, blocking=False)):
            caller.invoke(caller.method("actor", "step", options), (), {})
        assert fake_transport.patience == [5.0, None, None, None]
    finally:
        caller.close()


def test_an_error_is_told_when_a_worker_that_could_not_be_reached_turns_out_to_live() -> None:
    """Until then that one may be dead, which would be the cause of the error."""
    clock, fake_transport = FakeClock(), FakeTransport()
    caller = Caller(
        WorkerId("trainer", 0, 0), Pair(), fake_transport, call_timeout=60.0, scheduler=FakeScheduler(clock)
    )
    began, fake_transport.unreachable = clock.now, {0}
    ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False)), (), {})
    fake_transport.open[1].pop()(failure(ValueError("bad")))
    while clock.now < began + 10 * GROUP_ERROR_DELAY:
        assert clock.run_next()
    assert not ref.done()
    fake_transport.unreachable = set()
    while not ref.done():
        assert clock.run_next()
    with pytest.raises(ValueError, match="bad"):
        ref.result(0)


def test_calls_that_are_open_when_their_caller_leaves_and_later_ones_fail() -> None:
    fake_transport = FakeTransport()
    caller = Caller(WorkerId("trainer", 0, 0), Pair(), fake_transport, call_timeout=60.0)
    step = caller.method("actor", "step", Invocation(blocking=False))
    ref, told = caller.invoke(step, (), {}), queue.SimpleQueue[Any]()
    waiting = threading.Thread(target=lambda: told.put(ref.exception()))
    waiting.start()
    fake_transport.open[0].pop()(RESULT)
    caller.close()
    words = "this process has left the job, so the call is not answered"
    assert str(told.get(timeout=10.0)) == words
    waiting.join(WAIT_TIMEOUT)
    with pytest.raises(CallError, match=words):
        caller.invoke(step, (), {}).result(10.0)


class Replaced(Debugged):
    """A directory of two ranks, of which the first may get another worker."""

    incarnation = 0

    def find(self, role: str, rank: int) -> Peer:
        return Peer(WorkerId(role, rank, 0 if rank else self.incarnation), "here")


def test_a_call_that_is_over_at_its_deadline_is_not_looked_at_any_more() -> None:
    """It has failed in one worker, and the other one could not be reached."""
    clock, fake_transport, directory = FakeClock(), FakeTransport(), Replaced()
    fake_transport.unreachable = {0}
    caller, changed = caller_of(directory, fake_transport, clock)
    ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False)), (), {})
    fake_transport.open[1].pop()(failure(ValueError("bad")))
    while not ref.done():
        assert clock.run_next()
    directory.incarnation = 1
    changed()
    steps = clock.steps
    while clock.run_next():
        assert clock.steps < steps + 100


def test_a_call_that_is_refused_says_for_which_generation_it_was_made() -> None:
    clock, fake_transport, directory = FakeClock(), FakeTransport(), Pair()
    directory.generation = 1
    caller = Caller(
        WorkerId("trainer", 0, 0),
        directory,
        fake_transport,
        call_timeout=60.0,
        scheduler=FakeScheduler(clock),
    )
    ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False)), (), {})
    for rank in (0, 1):
        fake_transport.open[rank].pop()(Parcel(encode_refusal(2)))
    directory.generation = 2
    while not ref.done():
        assert clock.run_next()
    with pytest.raises(WorkerLost, match="has formed generation 2, and the call was made for 1"):
        ref.result(0)


def test_a_call_whose_last_answers_come_at_once_is_made_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads have each brought the last one."""
    both, settle = threading.Barrier(2, timeout=WAIT_TIMEOUT), InvocationRef.settle

    def settle_together(ref: InvocationRef[Any], index: int, outcome: Any) -> None:
        settle(ref, index, outcome)
        both.wait()

    monkeypatch.setattr(InvocationRef, "settle", settle_together)
    clock, fake_transport = FakeClock(), FakeTransport()
    caller = Caller(
        WorkerId("trainer", 0, 0), Pair(), fake_transport, call_timeout=60.0, scheduler=FakeScheduler(clock)
    )
    began = clock.now
    caller.invoke(caller.method("actor", "step", Invocation(idempotent=True, retries=3)), (), {})
    error = failure(RuntimeError("connection reset by peer"), INTERRUPTED)
    threads = [threading.Thread(target=fake_transport.open[rank][0], args=(error,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_TIMEOUT)
    while clock.now == began:
        assert clock.run_next()
    assert [len(fake_transport.open[rank]) for rank in (0, 1)] == [2, 2]


class Silent:
    """A connection to a worker that never answers."""

    def call(self, parcel: Any, done: Any, patience: float | None = None) -> None:
        """Nothing comes back."""

    def keep(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to end."""


def test_a_call_that_is_sent_to_a_worker_just_when_it_is_lost_fails_and_is_not_waited_for() -> None:
    """A thread has read the directory before the worker died, and sends after that was dealt with."""
    directory, transport = FakePeers(), Leading(Silent())
    caller = Caller(WorkerId("trainer", 0, 0), directory, transport, call_timeout=60.0)
    method = caller.method("actor", "step", Invocation(blocking=False), [0])
    try:
        first = caller.invoke(method, (), {})
        directory.say(Peer(OLD, gone=True))
        with pytest.raises(
            WorkerLost, match="it died; mark the method idempotent=True to have it called again$"
        ):
            first.result(WAIT_TIMEOUT)
        directory.place = Peer(OLD, "old")
        with pytest.raises(WorkerLost, match="actor:0 was lost before it answered: it is gone; ") as lost:
            caller.invoke(method, (), {}).result(WAIT_TIMEOUT)
        assert lost.value.worker == "actor:0"
    finally:
        caller.close()


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (Peer(OLD, gone=True), "it died; mark the method idempotent=True to have it called again"),
        (Peer(OLD, over=True), "it has ended; it takes no calls any more; call other workers"),
        (
            Peer(NEW, "new", 1),
            "it was started again; mark the method idempotent=True to have it called again",
        ),
    ],
)
def test_a_loss_says_what_became_of_the_worker_and_what_to_do(now: Peer, reason: str) -> None:
    directory, fake_transport = FakePeers(), FakeTransport()
    caller = Caller(WorkerId("trainer", 0, 0), directory, fake_transport, call_timeout=60.0)
    try:
        ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False), [0]), (), {})
        directory.say(now)
        with pytest.raises(WorkerLost, match=f"actor:0 was lost before it answered: {reason}$") as lost:
            ref.result(WAIT_TIMEOUT)
        assert lost.value.worker == "actor:0"
    finally:
        caller.close()


def test_a_loss_of_an_idempotent_call_does_not_advise_what_was_done() -> None:
    directory, fake_transport = FakePeers(), FakeTransport()
    caller = Caller(WorkerId("trainer", 0, 0), directory, fake_transport, call_timeout=60.0)
    options = Invocation(blocking=False, idempotent=True, retries=0)
    try:
        ref = caller.invoke(caller.method("actor", "step", options, [0]), (), {})
        directory.say(Peer(OLD, gone=True))
        with pytest.raises(WorkerLost, match="it died; retries=0 is used up; unirun events tells why"):
            ref.result(WAIT_TIMEOUT)
    finally:
        caller.close()


class Ordered(Peers):
    """Two ranks that serve. The thread called `first` is held up between its two looks."""

    def __init__(self) -> None:
        self.between, self.go_on = threading.Event(), threading.Event()

    def size(self, role: str) -> int:
        """Two ranks."""
        return 2

    def find(self, role: str, rank: int) -> Peer:
        """The place where it serves."""
        if rank == 1 and threading.current_thread().name == "first" and not self.between.is_set():
            self.between.set()
            assert self.go_on.wait(WAIT_TIMEOUT)
        return Peer(WorkerId(role, rank, 0), "here")

    def when_changed(self, listener: Callable[[], None]) -> None:
        """It does not change."""


class Noting:
    """A transport that notes which method each worker is sent."""

    name = "noting"

    def __init__(self) -> None:
        self.sent: dict[int, list[bytes]] = {0: [], 1: []}

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Any:
        notes = self.sent[peer.rank]

        class Noted:
            def call(self, parcel: Parcel, done: object, patience: float | None = None) -> None:
                notes.append(decode_request(parcel.head).method.encode())

            def keep(self) -> None:
                """Nothing waits."""

            def close(self) -> None:
                """Nothing to close."""

        return Noted()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_group_calls_of_two_threads_come_in_one_order_to_all_workers() -> None:
    directory, transport = Ordered(), Noting()
    caller = Caller(WorkerId("trainer", 0, 0), directory, transport, call_timeout=60.0)

    def call(method: str) -> None:
        caller.invoke(caller.method("actor", method, Invocation(blocking=False)), (), {})

    first = threading.Thread(target=call, args=("one",), name="first")
    second = threading.Thread(target=call, args=("two",))
    try:
        first.start()
        assert directory.between.wait(WAIT_TIMEOUT)
        second.start()
        second.join(0.2)
        directory.go_on.set()
        first.join(WAIT_TIMEOUT)
        second.join(WAIT_TIMEOUT)
    finally:
        directory.go_on.set()
        caller.close()
    assert transport.sent == {0: [b"one", b"two"], 1: [b"one", b"two"]}
