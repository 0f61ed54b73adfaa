"""Who sits where. A pure function from a spec and an inventory to a placement, which is a plain value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from unirun.collocation.inventory import Inventory
from unirun.collocation.numa import Topology, near_cpus
from unirun.collocation.placement import Assignment, Placement
from unirun.errors import PlacementError
from unirun.spec import JobSpec, RoleSpec


def plan_placement(spec: JobSpec, inventory: Inventory, topology: Topology | None = None) -> Placement:
    """Place every rank of `spec` on the first node of `inventory`, roles in their order, ranks in theirs.

    Devices are handed out one per rank when the job has several roles and there are enough for all of them; roles
    that are collocated share theirs, and a trainer needs none. With one role, workers see all devices and choose by
    ``LOCAL_RANK``, as under torchrun. With fewer devices than ranks nobody can tell which ranks compute on them, so
    the mask is left alone and the note says so. ``virtual_local_rank`` shows each worker its own device only, as its
    device 0.

    With ``numa_binding``, `topology` says which processors are near the device of a rank (the device with the
    number of its slot, modulo their count). Raises `PlacementError` when none is left for one, or when a role
    may not have all its ranks on one node.
    """
    node = inventory.nodes[0]
    for role in spec.roles:
        if role.per_node is not None and role.per_node < role.count:
            nodes = -(-role.count // role.per_node)
            raise PlacementError(
                f"role {role.name} has {role.count} ranks with {role.per_node} on a node: that takes {nodes} nodes, "
                "and there is 1",
                f"this version runs on one node: use per_node {role.count}, or leave it out",
                role=role.name,
                needed=role.count,
                available=role.per_node,
            )
    first = _first_slots(spec)
    ranks = sum(role.count for role in _owners(spec))
    devices = [device.index for device in node.devices]
    hand_out = bool(devices) and len(devices) >= ranks and (len(spec.roles) > 1 or spec.virtual_local_rank)
    if not devices:
        note = f"{node.name} has no accelerator: a slot is a place for one process"
    elif hand_out:
        shared = "".join(f", {' and '.join(group)} share theirs" for group in spec.collocations)
        note = f"{ranks} of {len(devices)} devices of {node.name} are in use, one per rank{shared}"
    elif len(devices) >= ranks:
        note = "one role: every worker sees all devices and chooses by LOCAL_RANK"
    else:
        note = f"{ranks} ranks on {len(devices)} devices: CUDA_VISIBLE_DEVICES is left as it is"
    assignments = tuple(_assign(spec, node.name, first, devices if hand_out else None))
    if spec.numa_binding and topology is not None:
        mode = spec.numa_binding
        near = [near_cpus(mode, devices[a.slot % len(devices)], topology) for a in assignments]
        assignments = tuple(replace(a, cpus=cpus) for a, cpus in zip(assignments, near, strict=True))
    return Placement(assignments, note)


def _owners(spec: JobSpec) -> list[RoleSpec]:
    """The roles that take devices: of those that share them, the first."""
    later = {name for group in spec.collocations for name in sorted(group, key=_order(spec))[1:]}
    return [role for role in spec.roles if role.name not in later and role.entry.kind != "trainer"]


def _order(spec: JobSpec) -> Callable[[str], int]:
    return [role.name for role in spec.roles].index


def _first_slots(spec: JobSpec) -> dict[str, int]:
    """The slot of each role's rank 0; a trainer comes after all that need devices."""
    found: dict[str, int] = {}
    slot = 0
    for role in _owners(spec):
        group = next((group for group in spec.collocations if role.name in group), (role.name,))
        found |= dict.fromkeys(group, slot)
        slot += role.count
    return found | {role.name: slot for role in spec.roles if role.name not in found}


def _assign(
    spec: JobSpec, node: str, first: Mapping[str, int], devices: list[str] | None
) -> Iterator[Assignment]:
    for role in spec.roles:
        slot = first[role.name]
        served = None if role.entry.kind == "trainer" else devices
        mask = None if served is None else tuple(served[slot : slot + role.count])
        for rank in range(role.count):
            own = mask if mask is None or not spec.virtual_local_rank else mask[rank : rank + 1]
            yield Assignment(role.name, rank, node, slot + rank, rank, own)
