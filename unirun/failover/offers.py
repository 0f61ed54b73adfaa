"""The offers of nodes before they are a part of a job, reasons against one, and the task of one that is let in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from msgspec import to_builtins
from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.collocation.inventory import Node
from unirun.errors import Fault
from unirun.spec.job import JobSpec
from unirun.values import Value
from unirun.wire.frames import from_json
from unirun.wire.messages import EtcdMember, Offer


class AgentTask(Value):
    """The input of the agent of `node`, one of `nodes`; it may be on another host than the command.

    Workers start in the directory `cwd`. The roles' rendezvous stores listen at `addr`, an address of the agent's host;
    that of the first role has `port` (0: any free one). `etcd` are the members of the job's own etcd, if it has one.
    """

    spec: JobSpec
    node: str
    nodes: tuple[str, ...]
    cwd: str
    addr: str
    port: int = 0
    etcd: tuple[EtcdMember, ...] = ()

    def to_json(self) -> str:
        """The task as text; `from_json` of `unirun.wire.frames` reads it."""
        return to_json(to_builtins(self)).decode()


def versions() -> dict[str, str]:
    """The versions that must be the same on all hosts of a job. A missing package has none."""
    # Imported here: a job of one host does not ask.
    from importlib import metadata

    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name, package in (("torch", "torch"), ("unirun", "torch-unirun")):
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def misfits(offers: Sequence[Offer], ours: Mapping[str, str]) -> list[Fault]:
    """The nodes whose versions are not `ours`, and those that have said themselves why they cannot take part."""
    found = []
    for offered in offers:
        found += [Fault(offered.node, problem, remedy) for problem, remedy in offered.faults]
        for name, version in ours.items():
            theirs = offered.versions.get(name, "")
            if theirs != version:
                problem = f"it has {name} {theirs}, here it is {version}" if theirs else f"it has no {name}"
                found.append(Fault(offered.node, problem, f"install {name} {version} there"))
    return found


def inventory_of(offers: Sequence[Offer]) -> Inventory:
    """The nodes as they describe themselves. Raises `FrameError`."""
    return Inventory(tuple(replace(from_json(Node, each.inventory), name=each.node) for each in offers))
