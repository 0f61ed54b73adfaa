"""Examinations of hosts that are all alike, to plant one fault in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from unirun.launcher.doctor.judge import Clock, Examination, Facts, HostReport, Link

FACTS = Facts(
    hostname="h",
    address="10.0.0.1",
    interface="eth0",
    python="3.11",
    torch="2.13.0",
    unirun="0.1.0",
    kernel="6.1.0",
    driver="570.1",
    gpus=("NVIDIA H100",) * 8,
    cpus=64,
    memory=512 << 30,
    shm=256 << 30,
    open_files=4096,
    lookup=0.001,
)

RTT, BANDWIDTH = 100e-6, 1e9


def host_names(count: int) -> list[str]:
    """``h1`` … ``h<count>``."""
    return [f"h{number}" for number in range(1, count + 1)]


def links(hosts: Sequence[str], link: Callable[[str, str], Link] | None = None) -> tuple[Link, ...]:
    """Both ways between all pairs."""
    make = link or (lambda one, other: Link(one, other, RTT, BANDWIDTH))
    return tuple(make(one, other) for one in hosts for other in hosts if one != other)


def healthy_hosts(count: int) -> Examination:
    """Hosts that nothing is wrong with."""
    reports = tuple(HostReport(name, FACTS, Clock(0.0, 1e-4), ("cwd", "home")) for name in host_names(count))
    return Examination(reports, links(host_names(count)))


def with_facts(found: Examination, name: str, **facts: Any) -> Examination:
    """`found` with other facts of one host."""
    return with_host(found, name, facts=replace(FACTS, **facts))


def with_host(found: Examination, name: str, **fields: Any) -> Examination:
    """`found` with other fields of the report of one host."""
    reports = tuple(replace(each, **fields) if each.name == name else each for each in found.hosts)
    return replace(found, hosts=reports)
