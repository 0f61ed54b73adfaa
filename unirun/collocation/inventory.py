"""What a node has: processors and accelerators. NVML is asked directly, so no torch and no CUDA context."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from unirun.collocation.numa import Topology, read_topology


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `index` is what a mask names; `pci` is its bus id in sysfs form.

    `memory` is in bytes, 0 when not known. `numa` is the NUMA node that it is near to, -1 when the kernel does not say.
    `links` are (index of another device of the host, how near it is), one of `NEARNESS` each.
    """

    index: str
    name: str
    pci: str = ""
    type: str = "cuda"
    memory: int = 0
    uuid: str = ""
    numa: int = -1
    links: tuple[tuple[str, str], ...] = ()


NEARNESS = ("nvlink", "board", "switch", "switches", "bridge", "numa", "system")
"""How near two devices are, from the nearest: joined by NVLink; on one board; under one PCIe switch; under several;
under one host bridge; on one NUMA node; anything else."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node of a host: its number, the usable processors in it, and its memory in bytes."""

    id: int
    cpus: tuple[int, ...]
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One host: the processors that this process may run on, and its devices.

    `memory` and `hugepages` are in bytes, 0 when not known: what the job may use, and what is set aside for huge
    pages. `numa` are its NUMA nodes in the order of their numbers; empty when it has but one, or does not say.
    """

    name: str
    cpus: tuple[int, ...]
    devices: tuple[Device, ...] = ()
    memory: int = 0
    hugepages: int = 0
    numa: tuple[NumaNode, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes of a job."""

    nodes: tuple[Node, ...]


def local_inventory(environ: Mapping[str, str] | None = None) -> Inventory:
    """This host. A ``CUDA_VISIBLE_DEVICES`` that is already set, by Slurm say, limits the devices."""
    environ = os.environ if environ is None else environ
    devices = visible(nvml_devices(), environ.get("CUDA_VISIBLE_DEVICES"))
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return Inventory((Node(socket.gethostname(), cpus, devices),))


def local_topology(inventory: Inventory) -> Topology:
    """Which processors of this host are near which of its devices, from sysfs."""
    node = inventory.nodes[0]
    return read_topology(node.cpus, {device.index: device.pci for device in node.devices})


def nvml_devices() -> tuple[Device, ...]:
    """Every NVIDIA device of this host; none when there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_device(index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _device(index: int) -> Device:
    import pynvml as nvml

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    # NVML writes the PCI domain with eight digits, sysfs with four.
    pci = str(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    return Device(
        index=str(index),
        name=str(nvml.nvmlDeviceGetName(handle)),
        pci=pci[-12:],
    )


def visible(devices: tuple[Device, ...], mask: str | None) -> tuple[Device, ...]:
    """The devices that `mask` leaves, in its order. As in CUDA, the first unknown entry ends the list."""
    if mask is None:
        return devices
    by_index = {device.index: device for device in devices}
    left = []
    for item in (part.strip() for part in mask.split(",")):
        if item.startswith(("GPU-", "MIG-")):
            # A mask by UUID is passed on as it is; its entries are opaque here.
            left.append(Device(item, "NVIDIA", ""))
        elif item in by_index:
            left.append(by_index[item])
        else:
            break
    return tuple(left)


def count_slots(kind: str, inventory: Inventory) -> int:
    """How many workers ``--nproc-per-node`` `kind` means on the first node. Raises ValueError."""
    node = inventory.nodes[0]
    if kind == "cpu" or (kind == "auto" and not node.devices):
        return len(node.cpus)
    if kind in ("gpu", "auto"):
        if not node.devices:
            raise ValueError(f"node {node.name} has no GPU; use a number, 'cpu' or 'auto'")
        return len(node.devices)
    raise ValueError(f"unirun knows no way to count {kind!r} devices; use a number, 'cpu', 'gpu' or 'auto'")
