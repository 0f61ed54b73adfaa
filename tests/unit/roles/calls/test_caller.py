"""What a caller does when the directory changes between two looks of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from unirun.errors import ChannelError, WorkerLost
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.directory import Place
from unirun.roles.calls.envelope import decode_request
from unirun.roles.calls.policy import Invocation
from unirun.roles.transport.protocol import Address, Channel, Parcel

SOON = 10.0
OLD, NEW = Address("actor", 0, 0), Address("actor", 0, 1)


class Stale:
    """A directory that has changed, and said so, just after the caller's first look."""

    def __init__(self) -> None:
        self._looks = iter([Place(OLD, "old")])

    def size(self, role: str) -> int:
        """Of any role."""
        return 1

    def find(self, role: str, rank: int) -> Place:
        """The old place once."""
        return next(self._looks, Place(NEW, "new", 1))

    def when_changed(self, listener: Callable[[], None]) -> None:
        """It does not change again."""


class Unreachable:
    """A transport whose worker is dead."""

    name = "unreachable"

    def connect(self, peer: Address, endpoint: str, broken: Callable[[str], None]) -> Channel:
        raise ChannelError(f"{peer} is not there")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_a_call_to_a_worker_that_was_replaced_meanwhile_fails_at_once() -> None:
    caller = Caller(Address("trainer", 0, 0), Stale(), Unreachable(), call_timeout=60.0)
    try:
        ref = caller.invoke(caller.method("actor", "step", Invocation(blocking=False), [0]), (), {})
        with pytest.raises(WorkerLost, match="started again"):
            ref.result(10.0)
    finally:
        caller.close()


class Still(Stale):
    """A directory that does not change, in which rank 0 serves and rank 1 does not yet."""

    def find(self, role: str, rank: int) -> Place:
        """Always the same."""
        return Place(NEW, "there") if rank == 0 else Place(Address(role, rank, 0))


class Noted(Unreachable):
    """A transport that notes whom it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Address, str]] = []

    def connect(self, peer: Address, endpoint: str, broken: Callable[[str], None]) -> Channel:
        self.asked.append((peer, endpoint))
        channel: Any = object()
        return channel  # type: ignore[no-any-return]


def test_an_address_is_told_with_a_channel_to_it() -> None:
    transport: Any = Noted()
    caller = Caller(Address("trainer", 0, 0), Still(), transport, call_timeout=60.0)
    assert [caller.connected("actor", 0) for _ in range(2)] == [NEW, NEW]
    assert transport.asked == [(NEW, "there")], "once"
    with pytest.raises(WorkerLost, match="actor:1 does not serve calls now") as lost:
        caller.connected("actor", 1)
    assert lost.value.worker == "actor:1"


def test_an_address_that_nobody_answers_at_is_not_told() -> None:
    transport: Any = Unreachable()
    caller = Caller(Address("trainer", 0, 0), Still(), transport, call_timeout=60.0)
    with pytest.raises(ChannelError, match="actor:0 is not there"):
        caller.connected("actor", 0)
    caller.close()


class Silent:
    """A channel to a worker that never answers."""

    def call(self, parcel: Any, done: Any, patience: float | None = None) -> None:
        """Nothing comes back."""

    def close(self) -> None:
        """Nothing to end."""


class Told(Stale):
    """A directory that says what it is told to."""

    def __init__(self) -> None:
        self.place = Place(OLD, "old")
        self._listeners: list[Callable[[], None]] = []

    def find(self, role: str, rank: int) -> Place:
        """As told."""
        return self.place

    def when_changed(self, listener: Callable[[], None]) -> None:
        """When it is told something."""
        self._listeners.append(listener)

    def tell(self, place: Place) -> None:
        """Say this from now on."""
        self.place = place
        for listener in self._listeners:
            listener()


def test_a_call_that_is_sent_to_a_worker_just_when_it_is_lost_fails_and_is_not_waited_for() -> None:
    """A thread has read the directory before the worker died, and sends after that was dealt with."""
    directory, transport = Told(), Noted()
    channel: Any = Silent()
    anything: Any = transport
    anything.connect = lambda *_: channel
    caller = Caller(Address("trainer", 0, 0), directory, anything, call_timeout=60.0)
    method = caller.method("actor", "step", Invocation(blocking=False), [0])
    try:
        first = caller.invoke(method, (), {})
        directory.tell(Place(OLD, gone=True))
        with pytest.raises(WorkerLost, match="it died"):
            first.result(10.0)
        directory.place = Place(OLD, "old")
        with pytest.raises(WorkerLost, match="it is gone"):
            caller.invoke(method, (), {}).result(10.0)
    finally:
        caller.close()


class Ordered:
    """Two ranks that serve. The thread called `first` is held up between its two looks."""

    def __init__(self) -> None:
        self.between, self.go_on = threading.Event(), threading.Event()

    def size(self, role: str) -> int:
        """Two ranks."""
        return 2

    def find(self, role: str, rank: int) -> Place:
        """Where it serves."""
        if rank == 1 and threading.current_thread().name == "first" and not self.between.is_set():
            self.between.set()
            assert self.go_on.wait(SOON)
        return Place(Address(role, rank, 0), "here")

    def when_changed(self, listener: Callable[[], None]) -> None:
        """It does not change."""


class Noting:
    """A transport that notes which method each worker is sent."""

    name = "noting"

    def __init__(self) -> None:
        self.sent: dict[int, list[bytes]] = {0: [], 1: []}

    def connect(self, peer: Address, endpoint: str, broken: Callable[[str], None]) -> Any:
        notes = self.sent[peer.rank]

        class Noted:
            def call(self, parcel: Parcel, done: object, patience: float | None = None) -> None:
                notes.append(decode_request(parcel.head).method.encode())

            def close(self) -> None:
                """Nothing to close."""

        return Noted()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_group_calls_of_two_threads_come_in_one_order_to_all_workers() -> None:
    directory, transport = Ordered(), Noting()
    caller = Caller(Address("trainer", 0, 0), directory, transport, call_timeout=60.0)

    def call(method: str) -> None:
        caller.invoke(caller.method("actor", method, Invocation(blocking=False)), (), {})

    first = threading.Thread(target=call, args=("one",), name="first")
    second = threading.Thread(target=call, args=("two",))
    try:
        first.start()
        assert directory.between.wait(SOON)
        second.start()
        second.join(0.2)
        directory.go_on.set()
        first.join(SOON)
        second.join(SOON)
    finally:
        directory.go_on.set()
        caller.close()
    assert transport.sent == {0: [b"one", b"two"], 1: [b"one", b"two"]}
