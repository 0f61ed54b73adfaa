"""The addresses of this host, by interfaces that are not there."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from unirun.errors import RendezvousError
from unirun.launcher import interfaces
from unirun.launcher.interfaces import choose, interface_of, is_own, own_addresses, reachable_address

ADDRESSES = {
    "lo": ("127.0.0.1", "::1"),
    "down0": ("10.9.0.1",),
    "eth0": ("fe80::1%eth0", "fd00::5", "192.168.1.5"),
    "ib0": ("169.254.3.3", "10.0.3.7"),
    "link0": ("fe80::2%link0",),
}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interfaces of `ADDRESSES`, of which one is down. Each has a hardware address, too."""

    def addresses() -> dict[str, list[SimpleNamespace]]:
        return {
            name: [
                SimpleNamespace(family=psutil.AF_LINK, address="00:11:22:33:44:55"),
                *(
                    SimpleNamespace(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each)
                    for each in found
                ),
            ]
            for name, found in ADDRESSES.items()
        }

    def stats() -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(isup=name != "down0") for name in ADDRESSES}

    monkeypatch.setattr(psutil, "net_if_addrs", addresses)
    monkeypatch.setattr(psutil, "net_if_stats", stats)


def test_addresses_are_those_of_interfaces_that_are_up_and_of_no_link_alone() -> None:
    assert own_addresses() == {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["192.168.1.5", "fd00::5"],
        "ib0": ["10.0.3.7"],
    }


@pytest.mark.parametrize(
    ("named", "address"),
    [
        ("eth0", "192.168.1.5"),
        ("10.0.3.7", "10.0.3.7"),
        ("10.0.0.0/8", "10.0.3.7"),
        # As users write the network of a host: its own address with the length of the prefix.
        ("10.0.3.1/16", "10.0.3.7"),
        ("fd00::/8", "fd00::5"),
        ("lo", "127.0.0.1"),
    ],
)
def test_an_interface_is_named_by_its_name_an_address_or_a_network(named: str, address: str) -> None:
    assert choose(named) == address


@pytest.mark.parametrize("named", ["down0", "10.9.0.1", "10.9.0.0/16", "link0", "eth1", ""])
def test_an_interface_that_others_do_not_reach_is_refused_with_those_that_there_are(named: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        choose(named)
    assert caught.value.remedy == "it has lo (127.0.0.1), eth0 (192.168.1.5), ib0 (10.0.3.7)"


def test_an_address_belongs_to_an_interface_that_is_up() -> None:
    assert interface_of("fd00::5") == "eth0"
    assert (is_own("10.0.3.7"), is_own("10.9.0.1"), is_own("10.0.3.8")) == (True, False, False)
    with pytest.raises(RendezvousError, match="no interface of .* has the address 10.9.0.1"):
        interface_of("10.9.0.1")


def test_without_a_route_an_address_that_is_no_loopback_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(addr: str) -> str:
        raise RendezvousError(f"no route to {addr}")

    monkeypatch.setattr(interfaces, "route_to", no_route)
    assert reachable_address() == "192.168.1.5"
    monkeypatch.setattr(interfaces, "own_addresses", lambda: {"lo": ["127.0.0.1", "::1"]})
    with pytest.raises(RendezvousError, match="no address that other hosts can reach"):
        reachable_address()
