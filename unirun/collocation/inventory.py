"""Values of placement: resources of nodes, the slots that ranks get of them, the request, and the result.

Values only; `host` reads those of this host.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from unirun.values import Value

NEARNESS = ("nvlink", "board", "switch", "switches", "bridge", "numa", "system")
"""The topology between two devices, from the nearest: joined by NVLink; on one board; under one PCIe switch; under
several; under one host bridge; on one NUMA node; on one host."""

MIG = "mig"
"""The type of a MIG instance, and of a GPU in MIG mode without instances: listed, but assigned to a role only when a
mask names it."""


CPU = "cpu"
"""The type of slots on processors."""


class Device(Value):
    """One accelerator. `index` is what a mask names; `pci` is its bus id in sysfs form.

    `memory` is in bytes, 0 when not known. `numa` is the nearest NUMA node, -1 when the kernel does not tell.
    `links` are (index of another device of the host, how near it is), the latter one of `NEARNESS`.
    """

    index: str
    name: str
    pci: str = ""
    type: str = "cuda"
    memory: int = 0
    uuid: str = ""
    numa: int = -1
    links: tuple[tuple[str, str], ...] = ()


NumaNode = tuple[int, tuple[int, ...]]
"""One NUMA node of a host: its number, and the usable processors in it."""


class Node(Value):
    """One host: the processors that this process may run on, and its devices.

    `memory` is what the job may use, in bytes, 0 when not known. `numa` are its NUMA nodes in the order of their
    numbers; empty when it has but one, or does not say.
    `component` is the component of a heterogeneous Slurm job that it belongs to; 0 in other jobs. `resources` are
    amounts of other things that ranks may need of it, by name.
    """

    name: str
    cpus: tuple[int, ...]
    devices: tuple[Device, ...] = ()
    memory: int = 0
    numa: tuple[NumaNode, ...] = ()
    component: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)

    def offer(self, resource: str) -> int | None:
        """The processors, bytes of memory, or amount of another resource that ranks may need; None when not known."""
        if resource == "memory":
            return self.memory or None
        return len(self.cpus) if resource == "cpus" else self.resources.get(resource, 0)


class Inventory(Value, dict=True, gc=True):
    """All nodes of a job."""

    nodes: tuple[Node, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(node.name for node in self.nodes)


def visible(devices: tuple[Device, ...], mask: str | None) -> tuple[Device, ...]:
    """The devices that are visible with `mask`, in its order, with the links between them.

    As in CUDA, an entry is an index or the beginning of a UUID, and the first unknown index ends the list. A mask by
    UUID is passed on as it is, so its entries are the devices' indices then; a part of a GPU that it names may be used.
    """
    if mask is None:
        return devices
    by_index = {device.index: device for device in devices}
    left: dict[str, Device] = {}
    """By the entry in the mask."""
    for entry in (part.strip() for part in mask.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            left[entry] = _by_uuid(devices, entry)
        elif entry in by_index:
            left[entry] = by_index[entry]
        else:
            break
    entry_of = {device.index: entry for entry, device in left.items()}
    return tuple(
        replace(
            device,
            index=entry,
            links=tuple((entry_of[peer], near) for peer, near in device.links if peer in entry_of),
        )
        for entry, device in left.items()
    )


def _by_uuid(devices: tuple[Device, ...], entry: str) -> Device:
    found = [device for device in devices if device.uuid.startswith(entry)]
    if len(found) == 1:
        return replace(found[0], type="cuda")
    return Device(entry, "NVIDIA", uuid=entry)


def accelerators(node: Node) -> tuple[Device, ...]:
    """The devices of `node` that may be assigned to roles."""
    return tuple(device for device in node.devices if device.type != MIG)


def count_slots(kind: str, inventory: Inventory) -> int:
    """The number of workers that ``--nproc-per-node`` `kind` means on the first node. Raises ValueError."""
    node = inventory.nodes[0]
    devices = accelerators(node)
    if kind == "cpu" or (kind == "auto" and not devices):
        return len(node.cpus)
    if kind in ("gpu", "auto"):
        if not devices:
            raise ValueError(f"node {node.name} has no GPU; use a number, 'cpu' or 'auto'")
        return len(devices)
    raise ValueError(f"unirun knows no way to count {kind!r} devices; use a number, 'cpu', 'gpu' or 'auto'")


Slot = tuple[str, int]
"""A device, or a CPU slot for one process: its name in a device mask, or the number of the CPU slot; and the nearest
NUMA node, 0 when it is not known."""


def slots_of(node: Node, type: str, crowd: int = 1) -> tuple[Slot, ...]:
    """The slots of `type` on `node`, in the node's order.

    There are `crowd` CPU slots per usable processor: a host may run more processes than it has processors.
    """
    if type != CPU:
        return tuple((device.index, max(device.numa, 0)) for device in node.devices if device.type == type)
    numa_of = {cpu: number for number, cpus in node.numa for cpu in cpus}
    numas = [numa_of.get(cpu, 0) for cpu in node.cpus] or [0]
    return tuple((str(number), numa) for number, numa in enumerate(numas * crowd))


def number_of_slots(node: Node, type: str, crowd: int = 1) -> int:
    """The number of slots that `slots_of` gives."""
    if type != CPU:
        return sum(device.type == type for device in node.devices)
    return max(len(node.cpus), 1) * crowd


# The placement of ranks: values that the planner returns, the launcher executes, and the store keeps.


class Assignment(Value):
    """The node and slots of one rank.

    `slot` is the number of its first slot among those of its type on the node, in the node's order (of roles that
    are collocated the same), -1 for a role that needs none. `devices` is the mask that the worker sees: the devices of
    its role on its node in the order of their local ranks, so that ``cuda:{LOCAL_RANK}`` is its own, where each rank
    has one device to itself, else those of this rank alone; empty when it is to see none, and None when the mask is
    left as it is. `cpus` are the processors it is bound to, None for no binding.

    `own` are the indices of its slots, and `share` is its part of each of them, at most 1. `numa` is the NUMA node
    that all of them are near to, -1 when they are near to several or it has none.
    """

    role: str
    rank: int
    node: str
    slot: int
    local_rank: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None
    own: tuple[str, ...] = ()
    share: float = 1.0
    numa: int = -1


class Placement(Value, dict=True, gc=True):
    """The assignments of all ranks of a job; `note` is the decision in words.

    `spares` are nodes held back, `excluded` those that the job shall not use, and `lost` those that it had, in the
    order of the inventory.
    `crossing` is what goes from node to node, in bytes per step, when every rank of a role talks as much with every
    rank of the other. `masks` has, by role, the variable that shows a worker its devices (``CUDA_VISIBLE_DEVICES``);
    roles whose devices have none are not in it.
    """

    assignments: tuple[Assignment, ...]
    note: str
    spares: tuple[str, ...] = ()
    crossing: float = 0.0
    excluded: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    masks: Mapping[str, str] = field(default_factory=dict)

    def of_role(self, role: str) -> tuple[Assignment, ...]:
        """The assignments of `role` in rank order."""
        return self._by_role.get(role, ())

    @cached_property
    def _by_role(self) -> dict[str, tuple[Assignment, ...]]:
        """Cached, because the master uses it in every step."""
        found: dict[str, list[Assignment]] = {}
        for each in self.assignments:
            found.setdefault(each.role, []).append(each)
        return {role: tuple(there) for role, there in found.items()}

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in use."""
        return tuple(dict.fromkeys(a.node for a in self.assignments))


# The request to the planner: values made from the spec and the graph of a job.


class RoleRequest(Value):
    """One role's ranks and what each of them needs.

    The planner places as many ranks as there is room for, `count` at most and `least` at least. A rank takes `slots`
    slots of `device` (``cpu``: a slot for one process; ``cuda``, or another type that the inventory knows), which are
    on one node; a fraction is a share of one slot. A role with `device` None needs no slot, only a node. `per_node` is
    how many ranks a node holds that holds any. `per_group` cuts the ranks into groups of that many consecutive ones,
    each on one node. `devices` are the only ones, by index, that the role may have on any node. With `component`, all
    its nodes are of that one. `needs` are what a rank needs of its node besides slots: `cpus` (a number, or "all" of
    the node), bytes of `memory`, and other resources by their names.
    """

    name: str
    count: int
    least: int
    device: str | None = "cpu"
    slots: Fraction = Fraction(1)
    per_node: int | None = None
    per_group: int | None = None
    devices: tuple[str, ...] | None = None
    component: int | None = None
    needs: Mapping[str, int | Literal["all"]] = field(default_factory=dict)


class Ties(Value):
    """Relations between roles from the graph. `weights` are bytes per step between two of them, over all edges.

    `parts` are groups of roles that wait for each other (sub-DAGs). A role in no group, or alone in one, waits for no
    other.
    """

    weights: Mapping[tuple[str, str], float] = field(default_factory=dict)
    parts: tuple[tuple[str, ...], ...] = ()


class PlacementRequest(Value):
    """All roles, in their order, and the constraints between them. Every group names roles of the job.

    `collocated`: the roles of a group share slots, rank by rank (device collocation). `together`: rank for rank, in
    proportion to their counts, the roles of a group are on one node, on different slots (host collocation). `apart`: no
    node holds ranks of two roles of a group (separation). `isolated`: no NUMA node does; they may share a host.
    `ties`: traffic between nodes is small, and roles that wait for each other are on few nodes. `spares` nodes are held
    back, and nodes in `tainted` are not used. Nodes that are `closed` keep the ranks that they have, and get no more.
    """

    roles: tuple[RoleRequest, ...]
    collocated: tuple[tuple[str, ...], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    isolated: tuple[tuple[str, ...], ...] = ()
    ties: Ties = Ties()
    spares: int = 0
    tainted: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
