"""The connections that may prove the token: addresses take turns, known ones come first, and each takes no more than its part."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.wire import handshake
from unirun.wire.handshake import (
    CONNECTION_QUEUE_TIMEOUT,
    EACH,
    KNOWN,
    MIN_HANDSHAKE_SECONDS,
    ORIGINS,
    OVERDUE_POLL_INTERVAL,
    QUEUE,
    QUEUE_KNOWN,
    QUEUE_TOGETHER,
    RATE,
    RATE_TOGETHER,
    TOGETHER,
    Strangers,
)

OURS = "10.0.0.1"


class Listener:
    """A listener whose connections are numbers, and whose handshakes end when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.strangers: Strangers[int] = Strangers(
            lambda address: address == OURS, self.tell, lambda: self.now
        )
        self.numbers = itertools.count()
        self.begun: dict[int, str] = {}
        self.came: dict[int, str] = {}
        self.out: list[int] = []
        self.refused: list[str] = []
        """The words for refused connections, in their order."""
        self.told: list[tuple[str, int]] = []

    def tell(self, text: str, count: int) -> None:
        self.told.append((text, count))

    def refuse(self, number: int, why: str) -> None:
        whence = f" from {self.came[number]}" if self.came[number] else ""
        self.refused.append(f"a connection{whence} was refused: {why}")

    def connect(self, origin: str, count: int = 1) -> list[int]:
        """`count` connections from an address. Returns those of them that have begun their handshakes at once."""
        numbers = [next(self.numbers) for _ in range(count)]
        for number in numbers:
            self.came[number] = origin
            if (out := self.strangers.arrives(number, origin)) is not None:
                self.out.append(out)
                self.refuse(out, "too many connections of its kind wait")
            self.look()
        return [number for number in numbers if number in self.begun]

    def look(self) -> None:
        waiting = len([*self.strangers]) - len(self.begun)
        for number in self.strangers.overdue():
            self.out.append(number)
            if self.begun.pop(number, None) is None:
                self.refuse(number, "it has waited for its turn too long")
            else:
                self.refuse(number, "it has not proved the token yet, and others wait")
                # Its task ends a moment later, which changes nothing.
                self.strangers.ends(number, OSError())
                waiting -= 1
                assert waiting >= 0, "more are ended than others wait"
        while (begins := self.strangers.next()) is not None:
            self.begun[begins] = self.came[begins]

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + OVERDUE_POLL_INTERVAL, end)
            self.look()

    def end(self, *numbers: int, proved: bool = False) -> None:
        for number in numbers:
            del self.begun[number]
            if not proved:
                self.refuse(number, "gone")
            self.strangers.ends(number, None if proved else OSError("gone"))
        self.look()

    def begun_by(self, origin: str) -> int:
        return sum(each == origin for each in self.begun.values())


def test_an_address_has_so_many_handshakes_at_once_and_the_rest_waits() -> None:
    listener = Listener()
    assert len(listener.connect("1.1.1.1", EACH + 3)) == EACH
    assert listener.strangers.waiting
    assert listener.out == []


def test_what_waits_begins_when_a_handshake_has_ended_in_proof() -> None:
    """An address from which the token was proved is known from then on."""
    listener = Listener()
    first = listener.connect("1.1.1.1", EACH + KNOWN)
    listener.end(first[0], proved=True)
    assert listener.begun_by("1.1.1.1") == KNOWN


def test_more_connections_of_a_known_address_wait_than_of_another() -> None:
    listener = Listener()
    listener.connect(OURS, KNOWN + QUEUE + 1)
    assert listener.out == []
    listener.connect("1.1.1.1", EACH + QUEUE)
    assert listener.out == []
    assert listener.connect("1.1.1.1") == []
    assert len(listener.out) == 1


def test_the_connection_that_is_one_too_many_for_all_unknown_addresses_takes_the_place_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "QUEUE_TOGETHER", 3)
    monkeypatch.setattr(handshake, "TOGETHER", 0)
    listener = Listener()
    waits = [number for number in range(3) if listener.connect("1.1.1.1") == []]
    assert listener.out == []
    listener.connect("2.2.2.2")
    assert listener.out == waits[:1]


def test_an_address_that_is_not_known_begins_so_many_a_second() -> None:
    listener = Listener()
    for _ in range(100):
        listener.end(*listener.connect("1.1.1.1", 10))
        listener.pass_time(OVERDUE_POLL_INTERVAL)
        listener.end(*listener.begun)
    assert next(listener.numbers) == 1000
    left = len([*listener.strangers])
    assert 1000 - len(listener.out) - left <= EACH + RATE * listener.now + 1


def test_a_flood_from_one_address_leaves_another_its_place() -> None:
    listener = Listener()
    listener.connect("1.1.1.1", 10 * QUEUE)
    assert len(listener.connect("2.2.2.2", 2)) == 2


def test_floods_from_many_addresses_leave_the_jobs_own_hosts_their_places() -> None:
    listener = Listener()
    for number in range(500):
        listener.connect(f"1.1.{number // 250}.{number % 250}", 10)
    assert len(listener.connect(OURS, KNOWN)) == KNOWN


def test_an_address_that_is_new_has_its_turn_among_many_that_wait() -> None:
    listener = Listener()
    for number in range(40):
        listener.connect(f"1.1.1.{number}", 20)
    listener.connect("2.2.2.2")
    mine = max(listener.came)
    for _ in range(200):
        if mine in listener.begun:
            break
        listener.pass_time(OVERDUE_POLL_INTERVAL)
    assert mine in listener.begun
    assert listener.now < 3 * MIN_HANDSHAKE_SECONDS


def test_a_handshake_that_has_had_its_time_makes_room_for_another_of_its_address() -> None:
    listener = Listener()
    old = listener.connect("1.1.1.1", EACH)
    assert listener.connect("1.1.1.1") == []
    listener.pass_time(MIN_HANDSHAKE_SECONDS - OVERDUE_POLL_INTERVAL)
    assert listener.out == []
    listener.now = MIN_HANDSHAKE_SECONDS
    listener.look()
    assert listener.out == old[:1]


def test_a_known_address_has_room_for_more_handshakes_before_one_has_to_end() -> None:
    listener = Listener()
    # All connections wait before the first begins: the listener looks at them later.
    for number in range(KNOWN - 1):
        listener.strangers.arrives(number, OURS)
        listener.strangers.next()
    listener.strangers.arrives(KNOWN - 1, OURS)
    listener.now = MIN_HANDSHAKE_SECONDS
    assert listener.strangers.overdue() == []
    assert listener.strangers.next() == KNOWN - 1
    listener.strangers.arrives(KNOWN, OURS)
    assert listener.strangers.next() is None
    assert listener.strangers.overdue() == [0]


def test_an_address_that_has_proved_the_token_is_known_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when so many others came that the listener keeps nothing else about it."""
    monkeypatch.setattr(handshake, "ORIGINS", 2)
    listener = Listener()
    listener.end(*listener.connect("1.1.1.1"), proved=True)
    for number in range(4):
        listener.end(*listener.connect(f"2.2.2.{number}"))
    assert "1.1.1.1" not in listener.strangers._origins
    assert len(listener.connect("1.1.1.1", EACH + 1)) == EACH + 1


def test_a_silent_handshake_for_which_no_other_waits_goes_on() -> None:
    listener = Listener()
    listener.connect("1.1.1.1", EACH)
    listener.pass_time(2 * MIN_HANDSHAKE_SECONDS)
    assert listener.out == []


def test_a_connection_that_waits_too_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TOGETHER", 1)
    monkeypatch.setattr(handshake, "RATE_TOGETHER", 0.0)
    listener = Listener()
    assert len(listener.connect("1.1.1.1")) == 1
    assert listener.connect("2.2.2.2") == []
    listener.pass_time(CONNECTION_QUEUE_TIMEOUT - OVERDUE_POLL_INTERVAL)
    late = max(listener.came)
    assert late not in listener.out
    listener.pass_time(2 * OVERDUE_POLL_INTERVAL)
    assert late in listener.out


def test_hosts_of_one_network_of_ipv6_are_one_address() -> None:
    listener = Listener()
    begun = [listener.connect(f"2001:db8::{number:x}%eth0") for number in range(EACH + 1)]
    assert sum(map(len, begun)) == EACH
    assert len(listener.connect("2001:db8:0:1::1")) == 1
    begun = [listener.connect("1.1.1.1" if number % 2 else "::ffff:1.1.1.1") for number in range(EACH + 2)]
    assert sum(map(len, begun)) == EACH
    assert len(listener.connect("::ffff:1.1.1.2")) == 1


def test_how_often_addresses_connect_is_remembered_of_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "ORIGINS", 100)
    listener = Listener()
    for number in range(1000):
        listener.end(*listener.connect(f"1.{number // 250}.1.{number % 250}"))
        listener.pass_time(OVERDUE_POLL_INTERVAL)
    assert len(listener.strangers._origins) <= 100


def test_an_address_whose_handshakes_of_this_second_are_spent_is_not_forgotten_for_one_that_may_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "ORIGINS", 2)
    listener = Listener()
    listener.end(*listener.connect("1.1.1.1", EACH))
    listener.connect("2.2.2.2")
    listener.end(*listener.begun, proved=True)
    assert len(listener.connect("3.3.3.3")) == 1
    assert listener.connect("1.1.1.1") == []


Steps = list[tuple[str, Any, int]]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("connect"), st.sampled_from([OURS, "", *"abcdefgh"]), st.integers(1, 300)),
        st.tuples(st.just("end"), st.booleans(), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.floats(0, 2), st.just(0)),
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from((ORIGINS, 3)))
def test_whatever_happens_limits_hold_and_no_connection_is_forgotten(steps: Steps, origins: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "ORIGINS", origins)
        keeps_its_limits(steps)


def keeps_its_limits(steps: Steps) -> None:
    """Take the steps; limits hold after each of them."""
    listener = Listener()
    ended = []
    for kind, what, count in steps:
        if kind == "connect":
            listener.connect(what, count)
        elif kind == "end":
            some = list(listener.begun)[:count]
            ended += some
            listener.end(*some, proved=what)
        else:
            listener.pass_time(what)
        inside = [*listener.strangers]
        assert {*listener.strangers._addresses} == {*inside}, "nothing is kept of those that are out"
        assert sorted([*inside, *listener.out, *ended]) == sorted(listener.came)
        assert listener.begun.keys() <= {*inside}
        assert len(listener.strangers._origins) <= max(handshake.ORIGINS, len({*listener.came.values()}))
        for text, number in listener.told:
            assert text == listener.refused[number - 1]
        assert listener.strangers._refused == len(listener.refused)
        trusted = {name for name, each in listener.strangers._origins.items() if each.known}
        assert listener.strangers._proved & {listener.came[each] for each in inside} <= trusted
        for name in {*listener.came.values()}:
            waiting = sum(listener.came[each] == name for each in inside) - listener.begun_by(name)
            assert listener.begun_by(name) <= (KNOWN if name in trusted else EACH)
            assert waiting <= (QUEUE_KNOWN if name in trusted else QUEUE)
        unknown = [each for each in inside if listener.came[each] not in trusted]
        begun = [each for each in unknown if each in listener.begun]
        assert len(begun) <= TOGETHER
        assert len(unknown) - len(begun) <= QUEUE_TOGETHER
        assert listener.strangers._begun == len(begun)
        assert listener.strangers._queued == len(unknown) - len(begun)
    unknown_begun = [each for each in (*listener.begun, *ended) if listener.came[each] not in ("", OURS)]
    if not listener.strangers._proved:
        assert len(unknown_begun) <= TOGETHER + RATE_TOGETHER * listener.now + 1
