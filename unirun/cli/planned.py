"""From a command line to a job with its places."""

from __future__ import annotations

import os

from unirun.cli.compose import job_spec
from unirun.cli.options import CommandLine
from unirun.cli.slips import misplaced
from unirun.cli.torchrun_env import check_environment
from unirun.collocation import (
    Inventory,
    is_fake,
    local_inventory,
    local_topology,
    parse_fake,
    unknown_nodes,
)
from unirun.collocation.numa import told_topology
from unirun.collocation.placing import TopologyOf
from unirun.errors import UsageError
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.planned import PlannedJob, plan
from unirun.spec import JobSpec


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
    return plan(spec, inventory, topology_of(line))


def endless(spec: JobSpec) -> list[str]:
    """A word on a job that does not end by itself, so that nobody waits for that."""
    servers = [name for name in spec.primary if spec.role(name).entry.kind == "workload"]
    if not servers:
        return []
    serve = "serves" if len(servers) == 1 else "serve"
    why = f"{' and '.join(servers)} {serve} calls and nothing ends that"
    return [f"this job runs until it is stopped (Ctrl-C, unirun stop): {why}; a --trainer would"]


def inventory_of(line: CommandLine) -> Inventory:
    """The nodes that ``--inventory`` describes; without it, this host. Raises `SpecError` or `UsageError`."""
    text = line.options.get("inventory")
    if text is None:
        return local_inventory()
    if not is_fake(text):
        raise UsageError(f"--inventory {text!r} is none that is known", "write fake:nodes=4,devices=8,numa=2")
    return parse_fake(text)


def topology_of(line: CommandLine) -> TopologyOf:
    """Where slots are on their nodes: nodes that are made up have no files to be read."""
    return told_topology if "inventory" in line.options else local_topology
