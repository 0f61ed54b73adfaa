"""From a job's spec to the ranks' places: what the planner is asked for, and what follows for each worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from unirun.collocation.inventory import Inventory, Node, accelerators
from unirun.collocation.numa import Topology
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planner import plan_placement
from unirun.collocation.planning import plan
from unirun.collocation.request import Request, RoleRequest
from unirun.collocation.slots import CPU
from unirun.spec import JobSpec, RoleSpec


def place(
    spec: JobSpec,
    inventory: Inventory,
    *,
    topology: Topology | None = None,
    weights: Mapping[tuple[str, str], float] | None = None,
) -> tuple[JobSpec, Placement]:
    """Who sits where, and the job with the ranks that there is room for. Raises `PlacementError`.

    A job that says nothing of places runs on the first node, as under torchrun (`plan_placement`). `weights` are bytes
    per step between roles (`unirun.graph.weights`).
    """
    if len(inventory.nodes) == 1 and not _says_where(spec):
        return spec, plan_placement(spec, inventory, topology)
    placement = plan(request_of(spec, inventory, weights or {}), inventory)
    nodes = {node.name: node for node in inventory.nodes}
    bound = {role.name for role in spec.roles if role.device == CPU}
    assignments = tuple(
        replace(a, cpus=_processors(nodes[a.node], a)) if a.role in bound else a
        for a in placement.assignments
    )
    placement = replace(placement, assignments=assignments)
    roles = tuple(replace(role, count=len(placement.of_role(role.name))) for role in spec.roles)
    return replace(spec, roles=roles), placement


def request_of(spec: JobSpec, inventory: Inventory, weights: Mapping[tuple[str, str], float]) -> Request:
    """What the planner is asked for. A role that names no type of device has what the nodes have; a trainer, none."""
    found = [device.type for node in inventory.nodes for device in accelerators(node)]
    usual = found[0] if found else CPU
    return Request(
        roles=tuple(_role_request(role, usual) for role in spec.roles),
        collocated=spec.collocations,
        together=spec.host_collocations,
        apart=spec.separations,
        isolated=spec.isolations,
        weights=weights,
        spares=spec.spares,
    )


def _role_request(role: RoleSpec, usual: str) -> RoleRequest:
    return RoleRequest(
        name=role.name,
        count=role.count,
        least=role.count if role.least is None else role.least,
        device=None if role.entry.kind == "trainer" else role.device or usual,
        slots=Fraction(role.slots).limit_denominator(1000),
        per_node=role.per_node,
        per_group=role.per_group,
        devices=role.devices,
    )


def _says_where(spec: JobSpec) -> bool:
    return bool(
        spec.host_collocations
        or spec.separations
        or spec.isolations
        or spec.spares
        or any(
            role.device or role.slots != 1 or role.per_group or role.devices or role.least is not None
            for role in spec.roles
        )
    )


def _processors(node: Node, place: Assignment) -> tuple[int, ...] | None:
    """The processors that belong to the places of a rank: a place is one of them, shared when there are more ranks."""
    if not node.cpus or not place.own:
        return None
    return tuple(sorted({node.cpus[int(index) % len(node.cpus)] for index in place.own}))
