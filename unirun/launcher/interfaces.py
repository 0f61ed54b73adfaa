"""Addresses of this host: which of them other hosts of the job can reach."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from unirun.errors import RendezvousError

_ANY_PORT = 9
"""Connecting a UDP socket sends nothing, so the port does not matter."""


def route_to(addr: str) -> str:
    """The address of this host from which packets to the numeric address `addr` are sent. Raises `RendezvousError`."""
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((addr, _ANY_PORT))
            return str(sock.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"no interface of {socket.gethostname()} routes to {addr}: {(error.strerror or str(error)).lower()}",
            "name another one with --interface",
        ) from error


def resolve(host: str) -> str:
    """The first numeric address of `host`, IPv4 before IPv6. Raises `RendezvousError`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(f"{host} has no address: {error.strerror}", "is its name right?") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def own_addresses() -> dict[str, list[str]]:
    """The addresses of each interface that is up; IPv4 before IPv6, none of a link alone."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [each.address for each in entries if each.family in (socket.AF_INET, socket.AF_INET6)]
        usable = [
            each for each in addresses if not ipaddress.ip_address(each.partition("%")[0]).is_link_local
        ]
        if name in up and usable:
            found[name] = sorted(usable, key=lambda each: ":" in each)
    return found


def choose(interface: str) -> str:
    """The address of this host that `interface` names: an interface, an address or a network (``10.0.0.0/8``).

    Raises `RendezvousError`.
    """
    known = own_addresses()
    if interface in known:
        return known[interface][0]
    network = None
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(interface, strict=False)
    for address in (each for addresses in known.values() for each in addresses):
        if network is not None and ipaddress.ip_address(address) in network:
            return address
    raise RendezvousError(
        f"{socket.gethostname()} has no interface {interface}",
        f"it has {', '.join(f'{name} ({found[0]})' for name, found in known.items())}",
    )


def interface_of(addr: str) -> str:
    """The name of the interface that has `addr`. Raises `RendezvousError`."""
    for name, addresses in own_addresses().items():
        if addr in addresses:
            return name
    raise RendezvousError(f"no interface of {socket.gethostname()} has the address {addr}", "see --interface")


def reachable_address() -> str:
    """The address of this host that others most likely reach: that of the default route, else any that is no loopback.

    The host's own name is not looked up, as it is often an alias of loopback. Raises `RendezvousError`.
    """
    for anywhere in ("192.0.2.1", "2001:db8::1"):
        with contextlib.suppress(RendezvousError):
            return route_to(anywhere)
    for addresses in own_addresses().values():
        for address in addresses:
            if not ipaddress.ip_address(address).is_loopback:
                return address
    raise RendezvousError(
        f"{socket.gethostname()} has no address that other hosts can reach", "name an interface: --interface"
    )


def is_own(addr: str) -> bool:
    """Return True if the numeric address `addr` is one of this host."""
    return any(addr in addresses for addresses in own_addresses().values())
