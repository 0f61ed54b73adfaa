"""From a command line to a job with its places."""

from __future__ import annotations

import os
from collections.abc import Sequence

from unirun.cli.compose import job_spec
from unirun.cli.options import CommandLine
from unirun.cli.slips import misplaced
from unirun.cli.terminal import warn
from unirun.cli.torchrun_env import check_environment
from unirun.collocation import (
    Inventory,
    Placement,
    Ties,
    is_fake,
    local_inventory,
    local_topology,
    parse_fake,
    place,
    place_again,
    unknown_nodes,
)
from unirun.collocation.numa import told_topology
from unirun.collocation.placing import TopologyOf
from unirun.errors import UsageError
from unirun.graph import declared, tight_parts, weights
from unirun.spec import JobSpec
from unirun.spec.read import nearest
from unirun.values import Value


class PlannedJob(Value):
    """A job, its nodes, and who sits where."""

    spec: JobSpec
    inventory: Inventory
    placement: Placement
    topology: TopologyOf

    def without(self, lost: Sequence[str]) -> PlannedJob:
        """The job when nodes are `lost`. Raises `UsageError` for a node that there is not, `PlacementError`."""
        names = [node.name for node in self.inventory.nodes]
        for name in lost:
            if name not in names:
                raise UsageError(f"--lost: no node is called {name!r}", nearest(name, names))
        spec, placement = place_again(
            self.spec,
            self.inventory,
            self.placement,
            lost,
            topology=self.topology,
            ties=ties_of(self.spec),
        )
        return PlannedJob(spec, self.inventory, placement, self.topology)


def plan_job(line: CommandLine) -> PlannedJob:
    """The job that a command line describes, with who sits where; what looks like a slip goes to stderr.

    Raises `SpecError`, `UsageError`, `PlacementError`.
    """
    # Workers are started in it.
    os.getcwd()
    inventory = inventory_of(line)
    spec = job_spec(line, inventory)
    warnings = check_environment(os.environ)
    for warning in (*warnings, *misplaced(line), *unknown_nodes(spec, inventory), *endless(spec)):
        warn(warning)
    # Nodes that are not there have no files to be read.
    topology = told_topology if "inventory" in line.options else local_topology
    spec, placement = place(spec, inventory, topology=topology, ties=ties_of(spec))
    return PlannedJob(spec, inventory, placement, topology)


def endless(spec: JobSpec) -> list[str]:
    """A word on a job that does not end by itself, so that nobody waits for that."""
    servers = [name for name in spec.primary if spec.role(name).entry.kind == "workload"]
    if not servers:
        return []
    serve = "serves" if len(servers) == 1 else "serve"
    why = f"{' and '.join(servers)} {serve} calls and nothing ends that"
    return [f"this job runs until it is stopped (Ctrl-C, unirun stop): {why}; a --trainer would"]


def ties_of(spec: JobSpec) -> Ties:
    """What joins the roles of a job, by the edges that it declares."""
    graph = declared(spec)
    return Ties(weights(graph), tight_parts(graph))


def inventory_of(line: CommandLine) -> Inventory:
    """The nodes that ``--inventory`` describes; without it, this host. Raises `SpecError` or `UsageError`."""
    text = line.options.get("inventory")
    if text is None:
        return local_inventory()
    if not is_fake(text):
        raise UsageError(f"--inventory {text!r} is none that is known", "write fake:nodes=4,devices=8,numa=2")
    return parse_fake(text)
