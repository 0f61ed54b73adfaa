"""The offers of nodes before they are a part of a job, and reasons against one."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.collocation.inventory import Node
from unirun.errors import Fault
from unirun.wire.frames import from_json
from unirun.wire.messages import Dismissed, Offer


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


def false_name(offer: Offer, peer: str) -> Dismissed | None:
    """The refusal of a node whose certificate is that of the node `peer`; empty for a stream without TLS."""
    if peer in ("", offer.node):
        return None
    return Dismissed(f"its certificate is that of node {peer}, and it says that it is {offer.node}")


def taken_or_full(offer: Offer, names: Collection[str], count: int, most: int | None) -> Dismissed | None:
    """The refusal of a node whose name is one of `names`, or that comes into a job which has `count` nodes, and may
    have `most`."""
    if offer.node in names:
        return Dismissed(f"the job has a node called {offer.node}", "give it another name: --node-name")
    if most is not None and count >= most:
        return Dismissed(f"the job has {most} nodes, the most that it may have", "see --nnodes")
    return None


def inventory_of(offers: Sequence[Offer]) -> Inventory:
    """The nodes as they describe themselves. Raises `FrameError`."""
    return Inventory(tuple(replace(from_json(Node, each.inventory), name=each.node) for each in offers))
