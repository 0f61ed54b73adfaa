"""The resources of nodes: processors, memory, accelerators, and the slots that ranks get of them.

Values only; `host` reads those of this host.
"""

from __future__ import annotations

from functools import cached_property

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


class NumaNode(Value):
    """One NUMA node of a host: its number, the usable processors in it, and its memory in bytes."""

    id: int
    cpus: tuple[int, ...]
    memory: int = 0


class Node(Value):
    """One host: the processors that this process may run on, and its devices.

    `memory` and `hugepages` are in bytes, 0 when not known: what the job may use, and what is set aside for huge
    pages. `numa` are its NUMA nodes in the order of their numbers; empty when it has but one, or does not say.
    `component` is the component of a heterogeneous Slurm job that it belongs to; 0 in other jobs.
    """

    name: str
    cpus: tuple[int, ...]
    devices: tuple[Device, ...] = ()
    memory: int = 0
    hugepages: int = 0
    numa: tuple[NumaNode, ...] = ()
    component: int = 0


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


class Slot(Value):
    """A device, or a CPU slot for one process. `index` is its name in a device mask, or the number of the CPU slot.

    `numa` is the nearest NUMA node, 0 when it is not known.
    """

    node: str
    type: str
    index: str
    numa: int


def slots_of(node: Node, type: str, crowd: int = 1) -> tuple[Slot, ...]:
    """The slots of `type` on `node`, in the node's order.

    There are `crowd` CPU slots per usable processor: a host may run more processes than it has processors.
    """
    if type != CPU:
        return tuple(
            Slot(node.name, type, device.index, max(device.numa, 0))
            for device in node.devices
            if device.type == type
        )
    numa_of = {cpu: numa.id for numa in node.numa for cpu in numa.cpus}
    numas = [numa_of.get(cpu, 0) for cpu in node.cpus] or [0]
    return tuple(Slot(node.name, CPU, str(number), numa) for number, numa in enumerate(numas * crowd))


def number_of_slots(node: Node, type: str, crowd: int = 1) -> int:
    """The number of slots that `slots_of` gives."""
    if type != CPU:
        return sum(device.type == type for device in node.devices)
    return max(len(node.cpus), 1) * crowd
