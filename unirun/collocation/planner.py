"""Who sits where. A pure function from a spec and an inventory to a placement, which is a plain value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unirun.collocation.inventory import Inventory
from unirun.collocation.numa import Topology, near_cpus
from unirun.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank on one slot.

    `slot` counts the places of the node, in role order. `devices` is the mask that the worker sees: the
    devices of its role on its node in rank order, so that ``cuda:{LOCAL_RANK}`` is its own; None when the
    mask is left as it is. `cpus` are the processors it is bound to, None for no binding.
    """

    role: str
    rank: int
    node: str
    slot: int
    local_rank: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Every rank of a job with its place; `note` says why devices were, or were not, handed out."""

    assignments: tuple[Assignment, ...]
    note: str

    def of_role(self, role: str) -> tuple[Assignment, ...]:
        """The assignments of `role` in rank order."""
        return tuple(a for a in self.assignments if a.role == role)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in use."""
        return tuple(dict.fromkeys(a.node for a in self.assignments))


def plan_placement(spec: JobSpec, inventory: Inventory, topology: Topology | None = None) -> Placement:
    """Place every rank of `spec` on the first node of `inventory`, roles in their order, ranks in theirs.

    Devices are handed out one per rank when the job has several roles and there are enough for all of them.
    With one role, workers see all devices and choose by ``LOCAL_RANK``, as under torchrun. With fewer devices
    than ranks nobody can tell which ranks compute on them, so the mask is left alone and the note says so.
    ``virtual_local_rank`` shows each worker its own device only, as its device 0.

    With ``numa_binding``, `topology` says which processors are near the device of a rank (the device with the
    number of its slot, modulo their count). Raises `PlacementError` when none is left for one.
    """
    node = inventory.nodes[0]
    ranks = sum(role.count for role in spec.roles)
    devices = [device.index for device in node.devices]
    hand_out = bool(devices) and len(devices) >= ranks and (len(spec.roles) > 1 or spec.virtual_local_rank)
    if not devices:
        note = f"{node.name} has no accelerator: a slot is a place for one process"
    elif hand_out:
        note = f"{ranks} of {len(devices)} devices of {node.name} are in use, one per rank"
    elif len(devices) >= ranks:
        note = "one role: every worker sees all devices and chooses by LOCAL_RANK"
    else:
        note = f"{ranks} ranks on {len(devices)} devices: CUDA_VISIBLE_DEVICES is left as it is"
    assignments = tuple(_assign(spec, node.name, devices if hand_out else None))
    if spec.numa_binding and topology is not None:
        mode = spec.numa_binding
        near = [near_cpus(mode, devices[a.slot % len(devices)], topology) for a in assignments]
        assignments = tuple(replace(a, cpus=cpus) for a, cpus in zip(assignments, near, strict=True))
    return Placement(assignments, note)


def _assign(spec: JobSpec, node: str, devices: list[str] | None) -> Iterator[Assignment]:
    slot = 0
    for role in spec.roles:
        mask = None if devices is None else tuple(devices[slot : slot + role.count])
        for rank in range(role.count):
            own = mask if mask is None or not spec.virtual_local_rank else mask[rank : rank + 1]
            yield Assignment(role.name, rank, node, slot, rank, own)
            slot += 1
