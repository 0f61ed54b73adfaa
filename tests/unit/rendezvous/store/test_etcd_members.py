"""The order in which the members of etcd are tried, and the words for one that does not answer."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from unirun.errors import StoreAway
from unirun.rendezvous.store import _etcd_cluster
from unirun.rendezvous.store._etcd_cluster import RANGE, TXN, Cluster, said
from unirun.rendezvous.store.protocol import EtcdAddress


@pytest.mark.parametrize("own", ["127.0.0.1:2379", "[::1]:2379"])
def test_a_member_on_this_host_is_tried_first(own: str) -> None:
    others = ("192.0.2.1:2379", "member.invalid:2379")
    cluster = Cluster(EtcdAddress((*others, own)), None)
    assert cluster._order == [own, *others]
    cluster.close()


def test_the_reason_of_a_connection_is_told_without_its_steps() -> None:
    steps = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to"
    assert said(f"{steps} remote host: Connection refused") == "connection refused"
    assert said("etcdserver: request timed out") == "etcdserver: request timed out"


class NoAnswer(grpc.RpcError):  # type: ignore[misc]
    """The error of a call that was not answered in time."""

    def code(self) -> grpc.StatusCode:
        """As gRPC has it."""
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        """As gRPC has it."""
        return "Deadline Exceeded"


class SlowMembers(Cluster):
    """Three members, each of which takes `greets` seconds to be found and `takes` seconds for a transaction."""

    def __init__(self) -> None:
        super().__init__(EtcdAddress(("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"), timeout=5.0), None)
        self.now = 0.0
        self.greets = dict.fromkeys(self.address.endpoints, 0.01)
        self.takes = dict.fromkeys(self.address.endpoints, 0.01)
        self.asked: list[str] = []

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def _send(self, member: str, method: str, request: Any, timeout: float) -> Any:
        self.asked.append(member)
        needed = (self.greets if method == RANGE else self.takes)[member]
        self.now += min(needed, timeout)
        if needed > timeout:
            raise NoAnswer
        return "done"


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> SlowMembers:
    made = SlowMembers()
    passing = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    monkeypatch.setattr(_etcd_cluster, "time", passing)
    return made


def test_a_member_that_has_ended_its_answers_is_tried_last(members: SlowMembers) -> None:
    one, two, three = members.address.endpoints
    assert members.call(TXN, None) == "done"
    assert members.asked == [one, one]
    for silent, expected in ((one, [one, two, two]), (two, [two, three, three])):
        members.asked.clear()
        members.greets[silent] = members.takes[silent] = math.inf
        assert members.call(TXN, None) == "done"
        assert members.asked == expected
    members.asked.clear()
    members.greets[one] = members.takes[one] = 0.01
    members.greets[three] = members.takes[three] = math.inf
    began = members.now
    assert members.call(TXN, None) == "done"
    assert members.asked == [three, one, one]
    assert members.now - began < 2.0
    assert members._troubles.keys() == {two, three}, "one has answered since"


def test_a_thread_whose_token_has_expired_leaves_the_next_one_to_others(members: SlowMembers) -> None:
    member = members.connect()
    members._token = "next"
    members._log_out("expired")
    assert (members._token, members._member) == ("next", member)
    members._log_out("next")
    left: list[str | None] = [members._token, members._member]
    assert left == [None, None]


class NoUser(NoAnswer):
    """The error of a call that was sent without a token."""

    def code(self) -> grpc.StatusCode:
        """As gRPC has it."""
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        """As etcd has it."""
        return "etcdserver: user name is empty"


def test_a_call_without_the_token_that_another_thread_has_just_dropped_is_sent_again(
    members: SlowMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    members._login, members._token = (lambda: None), "expired"
    members.connect()

    def send(member: str, method: str, request: object, timeout: float) -> object:
        if method == TXN and members._token == "expired":
            # Between the look for a member and the call.
            members._log_out("expired")
        if method not in (TXN, RANGE):
            return SimpleNamespace(token="next")
        if members._token is None:
            raise NoUser
        return "done"

    monkeypatch.setattr(members, "_send", send)
    assert members.call(TXN, None) == "done"
    assert members._token == "next"


@pytest.mark.parametrize("seconds", [0.9, 1.5, 1.9])
def test_members_that_are_all_slow_have_more_time_each(members: SlowMembers, seconds: float) -> None:
    members.takes = dict.fromkeys(members.address.endpoints, seconds)
    assert members.call(TXN, None) == "done"
    assert members.now < 4.0


@pytest.mark.parametrize("seconds", [0.4, 0.9])
def test_members_that_are_all_slow_are_found(members: SlowMembers, seconds: float) -> None:
    members.greets = dict.fromkeys(members.address.endpoints, seconds)
    assert members.connect() in members.address.endpoints


def test_members_none_of_which_answers_are_away_at_the_deadline(members: SlowMembers) -> None:
    members.greets = dict.fromkeys(members.address.endpoints, math.inf)
    with pytest.raises(StoreAway, match="has not answered for 5 s") as away:
        members.call(TXN, None)
    assert members.now == pytest.approx(5.0, abs=0.2)
    assert all(each in str(away.value) for each in members.address.endpoints)
