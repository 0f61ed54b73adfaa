"""The messages that one worker gets of its caller, whatever happens to the connection between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from tests.sim.calls.threads import FakeScheduler
from tests.sim.fake_clock import FakeClock
from unirun.errors import CallError, ChannelError, EncodingError
from unirun.roles.calls import reliable
from unirun.roles.calls.codec import ACK, GIVE_UP, Request, decode_giving_up, decode_request, encode_address
from unirun.roles.calls.reliable import LARGE, MAX_RECONNECT_DELAY, ReliableConnection
from unirun.roles.transport.protocol import Connection, Parcel, Transport
from unirun.values import WorkerId

ME, WORKER = WorkerId("trainer", 0, 0), WorkerId("actor", 1, 2)


class RecordingConnection:
    """A connection that notes what goes over it."""

    def __init__(self, broken: Callable[[str], None], unsendable: list[int]) -> None:
        self.requests: list[Request] = []
        self._unsendable = unsendable
        self.waiting: dict[int, Callable[[Parcel], None]] = {}
        self.told: list[Callable[[Parcel], None]] = []
        """For the answers of requests that give up a call."""
        self.kept = 0
        self.patient: list[int] = []
        """The calls for whose answers the calling thread waits."""
        self._broken, self.open, self._closed = broken, True, False

    def cut(self) -> None:
        """It breaks. Until the peer hears of it, what it sends gets lost."""
        self.open = False
        self.waiting.clear()
        self._broken("cut")

    def call(self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None) -> None:
        assert not self._closed, "a call over a connection that was closed"
        request = decode_request(parcel.head)
        if bytes(request.body) == b"unsendable":
            self._unsendable.append(request.seq)
            raise EncodingError("it cannot be sent")
        if not self.open:
            return
        self.requests.append(request)
        if patience is not None:
            self.patient.append(request.seq)
        if request.method == GIVE_UP.decode():
            self.told.append(done)
        elif request.method != ACK.decode():
            self.waiting[request.seq] = done

    def keep(self) -> None:
        assert not self._closed
        self.kept += 1

    def close(self) -> None:
        self.open, self._closed = False, True


class Network:
    """Connects to the worker, when it can be reached."""

    name = "noted"

    def __init__(self) -> None:
        self.lines: list[RecordingConnection] = []
        self.unsendable: list[int] = []
        self.reachable = True
        self.refused = 0

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Connection:
        assert (peer, endpoint) == (WORKER, "there")
        if not self.reachable:
            self.refused += 1
            raise ChannelError("nobody answers")
        assert not any(line.open for line in self.lines), "a second connection beside the first"
        self.lines.append(RecordingConnection(broken, self.unsendable))
        return self.lines[-1]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def call_of(seq: int, joint: bool = False, generation: int = 0, body: bytes = b"") -> Any:
    """As much of a `Call` as a connection looks at. The thread that makes it waits for the answer."""
    return SimpleNamespace(
        seq=seq,
        joint=joint,
        generation=generation,
        prepared=SimpleNamespace(wire=b"step"),
        parcel=lambda index: Parcel(body),
        patience=5.0,
        fetch=None,
    )


def test_a_worker_is_told_which_call_nobody_waits_for() -> None:
    clock, network = FakeClock(), Network()
    transport: Any = network
    connection = ReliableConnection(
        WORKER,
        "there",
        me=encode_address(ME),
        transport=transport,
        scheduler=FakeScheduler(clock),
        answered=lambda *_: None,
        failed=lambda *_: None,
    )
    call = call_of(7)
    connection.send(call, 0)
    connection.forget(call, lost=True)
    connection.forget(call)
    while clock.run_next():
        pass
    told = [
        decode_giving_up(request.body)
        for request in network.lines[0].requests
        if request.method == GIVE_UP.decode()
    ]
    assert told == [(7, True)]


class Calls(RuleBasedStateMachine):
    """A peer, and everything that may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.network = FakeClock(), Network()
        self.answers: list[tuple[int, bytes]] = []
        self.failures: list[int] = []
        self.seq = 0
        self.open: dict[int, Any] = {}
        self.due: list[int] = []
        self.gone = False
        network: Any = self.network
        transport: Transport = network
        self.connection = ReliableConnection(
            WORKER,
            "there",
            me=encode_address(ME),
            transport=transport,
            scheduler=FakeScheduler(self.clock),
            answered=lambda call, index, parcel: self.answers.append((call.seq, parcel.head)),
            failed=self._failed,
        )

    def _failed(self, call: Any, index: int, error: CallError) -> None:
        assert isinstance(error, EncodingError)
        self.failures.append(call.seq)

    @property
    def line(self) -> RecordingConnection | None:
        lines = [line for line in self.network.lines if line.open]
        return lines[-1] if lines else None

    def drop_unsendable(self) -> None:
        """Calls that no connection takes are not open any more."""
        for seq in self.network.unsendable:
            self.open.pop(seq, None)

    def settle(self) -> None:
        """Let everything happen that is due."""
        while self.clock.run_next():
            if not self.network.reachable and self.network.refused > 20:
                return

    @rule(joint=st.booleans(), generation=st.integers(0, 3), unsendable=st.booleans())
    def send(self, joint: bool, generation: int, unsendable: bool) -> None:
        """One call more. The numbers of calls grow, but a call that waited may be sent after a later one."""
        self.seq += 1
        call = call_of(self.seq, joint, generation, b"unsendable" if unsendable else str(self.seq).encode())
        assert self.connection.send(call, 0) is not self.gone
        assert not self.gone or call.seq not in {r.seq for line in self.network.lines for r in line.requests}
        if not self.gone:
            self.open[self.seq] = (call, joint, generation)

    @precondition(lambda self: self.line is not None and self.line.waiting)
    @rule(data=st.data(), large=st.booleans())
    def answer(self, data: st.DataObject, large: bool) -> None:
        """The worker answers one of the calls that it has, known or forgotten."""
        assert self.line is not None
        seq = data.draw(st.sampled_from(sorted(self.line.waiting)))
        size = LARGE if large else 1
        parcel = Parcel(bytes([seq % 256]) * size)
        known, before = seq in self.open, len(self.answers)
        self.line.waiting.pop(seq)(parcel)
        assert self.answers[before:] == ([(seq, parcel.head)] if known else [])
        self.open.pop(seq, None)
        self.due.append(seq)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """The caller does not wait for an answer any more."""
        seq = data.draw(st.sampled_from(sorted(self.open)))
        connection: Any = self.connection._connection
        kept = connection.kept if connection is not None else 0
        self.connection.forget(self.open.pop(seq)[0])
        assert connection is None or connection.kept == kept + 1, "its arguments may be changed now"

    @precondition(lambda self: self.line is not None)
    @rule()
    def breaks(self) -> None:
        """The connection is gone."""
        assert self.line is not None
        self.line.cut()

    @rule(reachable=st.booleans())
    def network_changes(self, reachable: bool) -> None:
        """The worker can, or cannot, be reached."""
        self.network.reachable, self.network.refused = reachable, 0

    @rule()
    def time_passes(self) -> None:
        """As much as it takes; whoever can be reached has everything that is open then."""
        self.settle()
        if self.gone or not self.network.reachable:
            return
        self.drop_unsendable()
        assert sorted(self.failures) == sorted(self.network.unsendable), "each is told once"
        assert not self.open or self.line is not None, "nobody connects again"
        if self.line is not None:
            sent = [request.seq for request in self.line.requests if request.method == "step"]
            assert self.open.keys() <= {*sent}, "a call was not sent again"
        assert not self.connection.reconnecting

    @precondition(lambda self: not self.gone)
    @rule()
    def lose(self) -> None:
        """The worker is dead."""
        owed = self.connection.lose()
        assert [call.seq for call, _ in owed] == sorted(self.open), "what it owes, in order"
        self.open.clear()
        self.gone = True
        assert self.line is None, "its connection is closed"

    @invariant()
    def requests_are_what_was_asked_for(self) -> None:
        """Each call once on a connection, with what belongs to it; and as many are open as are."""
        self.drop_unsendable()
        for line in self.network.lines:
            steps = [request for request in line.requests if request.method == "step"]
            assert len({request.seq for request in steps}) == len(steps), "a call twice on one connection"
            for request in steps:
                assert (request.caller, bytes(request.body)) == (ME, str(request.seq).encode())
                if request.seq in self.open:
                    _, joint, generation = self.open[request.seq]
                    assert (request.joint, request.generation) == (joint, generation)
        for line in self.network.lines:
            acked = [seq for request in line.requests for seq in request.acks]
            assert {*acked} <= {*self.due}, "an ack without an answer"
            assert len({*acked}) == len(acked), "an ack twice over one connection"
        assert len(self.connection) == len(self.open)
        waited = [seq for line in self.network.lines for seq in line.patient]
        assert len({*waited}) == len(waited), "a thread waits again, and it is not the one that sends again"

    @invariant()
    def calls_that_are_sent_again_keep_their_order(self) -> None:
        """The worker runs them as they come."""
        for line in self.network.lines:
            sent = [request.seq for request in line.requests if request.method == "step"]
            assert sent == sorted(sent)

    def teardown(self) -> None:
        """Everybody can be reached again: what is open is with the worker, and with the next call it has all acks."""
        self.network.reachable = True
        self.time_passes()
        if not self.gone:
            self.send(joint=False, generation=0, unsendable=False)
            self.time_passes()
            acked = {seq for line in self.network.lines for request in line.requests for seq in request.acks}
            assert acked == {*self.due}, "the worker keeps a result for ever"
        self.connection.close()
        assert self.line is None


TestWhateverHappens = Calls.TestCase
TestWhateverHappens.settings = settings(examples(60), stateful_step_count=30)


def calls(*seqs: int) -> list[Any]:
    """Calls that are told apart by their numbers."""
    return [call_of(seq) for seq in seqs]


def test_a_call_that_is_over_before_it_could_be_sent_is_not_open_any_more() -> None:
    machine = Calls()
    (call,) = calls(1)
    call.parcel = lambda index: None
    machine.connection.send(call, 0)
    assert not machine.network.lines[0].requests
    assert len(machine.connection) == 0


def test_calls_that_came_out_of_order_are_sent_again_in_the_order_of_their_numbers() -> None:
    """One thread has numbered its calls first and sends them last."""
    machine = Calls()
    seqs = [1, 2, 3, 4, 5]
    random.Random(1).shuffle(seqs)
    for call in calls(*seqs):
        machine.connection.send(call, 0)
    first = machine.network.lines[0]
    assert [request.seq for request in first.requests] == seqs
    first.cut()
    machine.settle()
    again = machine.network.lines[1]
    assert [request.seq for request in again.requests] == [1, 2, 3, 4, 5]
    assert not again.patient, "a thread that sends a call again does not wait for its answer"


def test_who_cannot_be_reached_is_tried_again_at_growing_intervals() -> None:
    machine = Calls()
    machine.network.reachable = False
    (call,) = calls(1)
    machine.connection.send(call, 0)
    began, times = machine.clock.now, list[float]()
    for _ in range(9):
        refused = machine.network.refused
        while machine.network.refused == refused:
            assert machine.clock.run_next()
        times.append(machine.clock.now - began)
    assert times == pytest.approx([0, 0.02, 0.06, 0.14, 0.3, 0.62, 1.26, 2.26, 3.26])
    assert MAX_RECONNECT_DELAY == 1.0
    machine.network.reachable = True
    while not machine.network.lines:
        machine.clock.run_next()
    machine.network.lines[0].waiting.pop(1)(Parcel(b""))
    machine.network.lines[0].cut()
    machine.network.reachable, machine.network.refused = False, 0
    machine.clock.run_next()
    before, (call,) = machine.clock.now, calls(2)
    machine.connection.send(call, 0)
    while machine.network.refused < 3:
        machine.clock.run_next()
    assert machine.clock.now - before == pytest.approx(0.02), "an answer shows that it is well"


def test_a_call_to_who_cannot_be_reached_waits_for_the_next_try() -> None:
    machine = Calls()
    machine.network.reachable = False
    first, second = calls(1, 2)
    machine.connection.send(first, 0)
    machine.connection.send(second, 0)
    assert machine.network.refused == 1
    machine.network.reachable = True
    machine.settle()
    assert [request.seq for request in machine.network.lines[0].requests] == [1, 2]


def test_a_large_result_is_acked_at_once() -> None:
    machine = Calls()
    first, second = calls(1, 2)
    machine.connection.send(first, 0)
    machine.connection.send(second, 0)
    line = machine.network.lines[0]
    line.waiting.pop(1)(Parcel(b"x" * (LARGE - 1)))
    machine.settle()
    assert len(line.requests) == 2, "a small one waits for the next call"
    line.waiting.pop(2)(Parcel(b"x" * LARGE))
    machine.settle()
    assert [(request.method, request.acks) for request in line.requests[2:]] == [(ACK.decode(), (1, 2))]


def test_a_large_result_is_acked_once() -> None:
    """By the next call, if that comes first."""
    machine = Calls()
    first, second = calls(1, 2)
    machine.connection.send(first, 0)
    line = machine.network.lines[0]
    line.waiting.pop(1)(Parcel(b"x" * LARGE))
    machine.connection.send(second, 0)
    machine.settle()
    assert [(request.method, request.acks) for request in line.requests] == [("step", ()), ("step", (1,))]


def test_acks_that_a_broken_connection_has_lost_go_with_the_next_request() -> None:
    machine = Calls()
    first, second = calls(1, 2)
    machine.connection.send(first, 0)
    line = machine.network.lines[0]
    line.waiting.pop(1)(Parcel(b""))
    line.cut()
    machine.connection.send(second, 0)
    machine.settle()
    again = machine.network.lines[1]
    assert [(request.seq, request.acks) for request in again.requests] == [(2, (1,))]


def test_acks_of_a_call_that_cannot_be_sent_go_with_the_next_one() -> None:
    machine = Calls()
    first, third = calls(1, 3)
    machine.connection.send(first, 0)
    (line,) = machine.network.lines
    line.waiting.pop(1)(Parcel(b""))
    machine.connection.send(call_of(2, body=b"unsendable"), 0)
    machine.connection.send(third, 0)
    assert [(request.seq, request.acks) for request in line.requests] == [(1, ()), (3, (1,))]


def test_what_was_closed_is_sent_no_acks() -> None:
    machine = Calls()
    (call,) = calls(1)
    machine.connection.send(call, 0)
    (line,) = machine.network.lines
    line.waiting.pop(1)(Parcel(b"x" * LARGE))
    machine.connection.close()
    machine.settle()
    assert machine.network.lines == [line]
    assert len(line.requests) == 1


def test_acks_that_are_too_many_for_one_request_go_with_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reliable, "MAX_ACKS", 2)
    machine = Calls()
    for call in calls(1, 2, 3):
        machine.connection.send(call, 0)
    (line,) = machine.network.lines
    for seq in (1, 2, 3):
        line.waiting.pop(seq)(Parcel(b""))
    for call in calls(4, 5, 6):
        machine.connection.send(call, 0)
    assert [request.acks for request in line.requests[3:]] == [(1, 2), (3,), ()]


@pytest.mark.parametrize("told_before", [False, True])
def test_a_call_that_nobody_waits_for_is_given_up_though_the_connection_breaks(told_before: bool) -> None:
    """Otherwise the worker begins its part of a call that has lost another worker, and waits in it alone."""
    machine = Calls()
    (call,) = calls(1)
    machine.connection.send(call, 0)
    (line,) = machine.network.lines
    if not told_before:
        line.cut()
    machine.connection.forget(call, lost=True)
    if told_before:
        machine.settle()
        line.cut()
    machine.settle()
    again = machine.network.lines[1]
    assert [decode_giving_up(request.body) for request in again.requests] == [(1, True)]
    again.told.pop()(Parcel(b""))
    (later,) = calls(2)
    machine.connection.send(later, 0)
    assert again.requests[-1].acks == (1,), "its answer went over the first one, and the worker keeps it"
