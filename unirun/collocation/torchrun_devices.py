"""Devices as torchrun assigns them: for jobs on one node that have no placement options.

The planner places these jobs as all others. This module changes the request for them, and the assignments of workers
that choose a device themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec.structs import replace

from unirun.collocation.inventory import CPU, Node, Slot, slots_of
from unirun.collocation.placement import Assignment
from unirun.collocation.request import Request
from unirun.spec.job import JobSpec
from unirun.values import Value


class Mode(Enum):
    """The way in which ranks get their devices."""

    NONE = "the node has no devices"
    MASKED = "the device mask of each rank has its own device"
    BY_LOCAL_RANK = "every worker sees all devices, and uses the one with the index LOCAL_RANK"
    UNKNOWN = "there are fewer devices than ranks, so only the workers know which they use"


class TorchrunDevices(Value):
    """The devices of a job whose ranks are all on `node`. It needs `needed` of its `devices` for one per rank."""

    mode: Mode
    node: Node
    devices: tuple[Slot, ...]
    needed: int

    def request(self, request: Request) -> Request:
        """`request` with devices only where ranks get one each, else with CPU slots, of which any number may be used.

        All ranks of a role are on the node, so they are one cell, however many they are.
        """
        roles = tuple(
            replace(
                role,
                device=role.device if self.mode is Mode.MASKED or role.device is None else CPU,
                per_node=role.per_node or (None if role.device is None else role.count),
            )
            for role in request.roles
        )
        return replace(request, roles=roles)

    def assigned(self, planned: Assignment) -> Assignment:
        """`planned` by the planner, with the device that the rank uses, as far as that is known."""
        if planned.slot < 0 or self.mode in (Mode.NONE, Mode.MASKED):
            return planned
        if self.mode is Mode.UNKNOWN:
            return replace(planned, own=(), share=1.0, numa=-1)
        device = self.devices[planned.local_rank]
        return replace(planned, own=(device.index,), numa=device.numa)

    def note(self, spec: JobSpec) -> str:
        """The decision in words."""
        if self.mode is Mode.NONE:
            return f"{self.node.name} has no accelerator: each rank has a CPU slot"
        if self.mode is Mode.BY_LOCAL_RANK:
            return "one role: every worker sees all devices and chooses by LOCAL_RANK"
        if self.mode is Mode.UNKNOWN:
            return (
                f"{self.needed} ranks on {len(self.devices)} devices: CUDA_VISIBLE_DEVICES is left as it is"
            )
        shared = "".join(f", {' and '.join(group)} share theirs" for group in spec.collocations)
        used = f"{self.needed} of {len(self.devices)} devices of {self.node.name} are in use"
        return f"{used}, one per rank{shared}"


def torchrun_devices(spec: JobSpec, nodes: Sequence[Node], usual: str) -> TorchrunDevices | None:
    """The devices of a job without placement options on one node; None for other jobs.

    `usual` is the type of device of a role that names none. Ranks get a device each when there are several roles, which
    share a node, and enough devices. A role alone can choose by ``LOCAL_RANK``, as under torchrun, unless
    ``virtual_local_rank`` makes that 0 everywhere. Roles without slots need no device, and change nothing.
    """
    if len(nodes) != 1 or _has_placement_options(spec):
        return None
    devices = () if usual == CPU else slots_of(nodes[0], usual)
    # Roles that share devices have the same number of ranks: the first one's count for all.
    sharing = {name for group in spec.collocations for name in group[1:]}
    takers = [role for role in spec.roles if role.takes_slots]
    needed = sum(role.count for role in takers if role.name not in sharing)
    # Beside a trainer a role is one of several, though the trainer needs no device.
    trained = any(role.entry.kind == "trainer" for role in spec.roles)
    if not takers:
        return None
    if not devices:
        mode = Mode.NONE
    elif len(devices) < needed:
        mode = Mode.UNKNOWN
    elif len(takers) > 1 or trained or spec.virtual_local_rank:
        mode = Mode.MASKED
    else:
        mode = Mode.BY_LOCAL_RANK
    return TorchrunDevices(mode, nodes[0], devices, needed)


def _has_placement_options(spec: JobSpec) -> bool:
    return bool(
        spec.host_collocations
        or spec.separations
        or spec.isolations
        or spec.spares
        or any(
            role.device or role.slots != 1 or role.per_group or role.devices or role.least is not None
            for role in spec.roles
            if role.takes_slots
        )
    )
