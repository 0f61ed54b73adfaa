"""A pair of hosts, on the loopback interface."""

from __future__ import annotations

import socket

import pytest

from unirun.errors import RendezvousError
from unirun.launcher.doctor import probe
from unirun.launcher.doctor.probe import own_address, read_facts

NONCE = b"0123456789abcdef"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth is measured for a moment."""
    monkeypatch.setattr(probe, "BANDWIDTH_SECONDS", 0.01)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_pair_is_measured_both_ways(address: str) -> None:
    port = probe.listen(address, NONCE)
    rtt, sent, received = probe.measure(address, port, NONCE, bandwidth=True)
    assert 0 < rtt < 1
    assert sent > 1e6
    assert received > 1e6


def test_without_bandwidth_there_is_a_round_trip_only() -> None:
    port = probe.listen("127.0.0.1", NONCE)
    rtt, sent, received = probe.measure("127.0.0.1", port, NONCE, bandwidth=False)
    assert rtt > 0
    assert (sent, received) == (0.0, 0.0)


def test_who_does_not_know_the_nonce_is_dropped_and_the_peer_is_served() -> None:
    port = probe.listen("127.0.0.1", NONCE)
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(b"x" * len(NONCE))
        assert stranger.recv(1) == b""
    assert probe.measure("127.0.0.1", port, NONCE, bandwidth=False)[0] > 0


def test_the_port_is_closed_after_the_last_connection() -> None:
    port = probe.listen("127.0.0.1", NONCE)
    probe.measure("127.0.0.1", port, NONCE, bandwidth=False)
    with pytest.raises((OSError, RendezvousError)):
        probe.measure("127.0.0.1", port, NONCE, bandwidth=False)


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(RendezvousError, match="192\\.0\\.2\\.77 cannot be listened on"):
        probe.listen("192.0.2.77", NONCE)


def test_the_address_is_that_of_the_named_interface() -> None:
    assert own_address("lo", None) == "127.0.0.1"


def test_the_address_is_the_one_from_which_the_head_is_reached() -> None:
    assert own_address(None, "127.0.0.1") == "127.0.0.1"


def test_the_facts_of_this_host() -> None:
    facts = read_facts("lo", None)
    assert facts.hostname == socket.gethostname()
    assert (facts.address, facts.interface) == ("127.0.0.1", "lo")
    assert facts.python.count(".") == 1
    assert facts.torch
    assert facts.memory >= facts.shm > 0
