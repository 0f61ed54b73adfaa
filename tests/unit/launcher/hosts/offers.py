"""Offers of nodes, and the plan of a job for those that have made one."""

from __future__ import annotations

from msgspec.json import encode as to_json

from unirun.collocation import Inventory
from unirun.collocation.host import told_topology
from unirun.collocation.inventory import Node
from unirun.failover.offers import versions
from unirun.launcher.planned import PlannedJob, plan
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import TcpAddress
from unirun.wire.messages import Offer

OURS = versions()
HEAD = TcpAddress("10.0.0.1", 29400, "h0")


def offer(node: str, rank: int = -1, versions: dict[str, str] | None = None, **more: object) -> Offer:
    """The offer of a node with two CPU slots."""
    inventory = to_json(Node(node, (0, 1))).decode()
    return Offer(node, node, rank, inventory, OURS | (versions or {}), **more)  # type: ignore[arg-type]


def made(inventory: Inventory) -> PlannedJob:
    """A job with a rank on each node but one called `out`."""
    count = len({*inventory.names} - {"out"})
    roles = (RoleSpec("actor", count, Entry("script", "a.py"), per_node=1),)
    spec = JobSpec("job", "run", roles, ("actor",), exclude_nodes=("out",))
    return plan(spec, inventory, told_topology)
