"""Addresses are printed as users write them, and are the same after a way through JSON."""

from __future__ import annotations

import json

import pytest
from msgspec import to_builtins

from unirun.rendezvous.election import Leader
from unirun.wire.address import Address, TcpAddress, UnixAddress
from unirun.wire.frames import from_json

TCP = TcpAddress("10.0.0.1", 4711, "n0")
IPV6 = TcpAddress("fe80::1", 4711, "n0")


@pytest.mark.parametrize(
    ("address", "text"), [(UnixAddress("/x", "h"), "/x"), (TCP, "10.0.0.1:4711"), (IPV6, "[fe80::1]:4711")]
)
def test_an_address_is_printed_as_users_write_it(address: Address, text: str) -> None:
    assert str(address) == text


@pytest.mark.parametrize("address", [UnixAddress("/x", "h"), TCP, IPV6])
def test_the_address_of_a_leader_is_the_same_after_a_way_through_json(address: Address) -> None:
    leader = Leader(3, address, 7)
    assert from_json(Leader, json.dumps(to_builtins(leader))) == leader


def test_commands_print_what_kind_of_address_a_leader_has() -> None:
    assert Leader(3, TCP, 7).to_json() == {
        "epoch": 3,
        "address": "tcp:10.0.0.1:4711",
        "host": "n0",
        "pid": 7,
    }
    assert Leader(3, UnixAddress("/x", "h"), 7).to_json()["address"] == "unix:/x"
