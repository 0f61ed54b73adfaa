"""The processors that are near a device: the four modes of torchrun's ``--numa-binding``, as a pure function.

The modes are those of ``torch.numa.binding.AffinityMode`` (torch 2.13); the topology comes from sysfs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from unirun.collocation.inventory import Node, NumaNode
from unirun.collocation.limits import parse_cpu_list, read_integer, read_text
from unirun.errors import PlacementError
from unirun.values import Value


class Cpu(Value):
    """One logical processor: its NUMA node, its socket, and the processors that share its core and its L3."""

    id: int
    numa: int
    socket: int
    core: tuple[int, ...]
    cache: tuple[int, ...]


class Topology(Value, eq=False):
    """The processors that may be used, and the NUMA node of each device by its index (-1: not told).

    Compared by identity: nodes that are alike have one, and it is asked for every rank.
    """

    cpus: tuple[Cpu, ...]
    device_numa: dict[str, int]


def near_cpus(mode: str, device: str, topology: Topology) -> tuple[int, ...]:
    """The processors to which a worker on `device` is bound.

    ``node``: all of the device's NUMA node. ``socket``: all of the nodes of its socket. ``exclusive``: its share of
    the node's physical cores, divided among the node's devices. ``core-complex``: one L3 cache of the node, another
    one for each device as long as there are enough. Raises `PlacementError` when there is none left for it.
    """
    numa = topology.device_numa.get(device, -1)
    # Without NUMA support the kernel reports -1: the host is one NUMA node.
    numa = max(numa, 0)
    here = [cpu for cpu in topology.cpus if cpu.numa == numa]
    if mode == "socket":
        sockets = {cpu.socket for cpu in here}
        here = [cpu for cpu in topology.cpus if cpu.socket in sockets]
    peers = sorted((d for d, n in topology.device_numa.items() if max(n, 0) == numa), key=_device_order)
    index = peers.index(device) if device in peers else 0
    if mode == "exclusive":
        chosen = _share([cpu.core for cpu in here], index, max(len(peers), 1))
    elif mode == "core-complex":
        complexes = sorted({cpu.cache for cpu in here}, key=lambda cache: (-len(cache), cache))
        chosen = complexes[index % len(complexes)] if complexes else ()
    else:
        chosen = tuple(cpu.id for cpu in here)
    usable = {cpu.id for cpu in here}
    bound = tuple(sorted(set(chosen) & usable))
    if not bound:
        raise PlacementError(
            f"--numa-binding {mode}: no processor of NUMA node {numa} is left for device {device}",
            "use --numa-binding node"
            if mode != "node"
            else "leave --numa-binding out, or let the job use more",
            role="",
            needed=1,
            available=len(usable),
        )
    return bound


def _device_order(index: str) -> tuple[int, str]:
    return (int(index), "") if index.isdigit() else (1 << 30, index)


def _share(cores: Sequence[tuple[int, ...]], index: int, shares: int) -> tuple[int, ...]:
    """The `index`-th of `shares` even parts of the distinct `cores`; the first parts get what is left over."""
    distinct = sorted(set(cores))
    size, rest = divmod(len(distinct), shares)
    start = index * size + min(index, rest)
    end = start + size + (1 if index < rest else 0)
    return tuple(cpu for core in distinct[start:end] for cpu in core)


def read_topology(cpus: Sequence[int], device_pci: dict[str, str], root: Path = Path("/sys")) -> Topology:
    """The topology of this host; `device_pci` gives the PCI bus id of each device."""
    numa_of = {
        cpu: int(node.name.removeprefix("node"))
        for node in (root / "devices/system/node").glob("node[0-9]*")
        for cpu in parse_cpu_list((node / "cpulist").read_text())
    }
    found = []
    for cpu in cpus:
        base = root / f"devices/system/cpu/cpu{cpu}"
        found.append(
            Cpu(
                id=cpu,
                numa=numa_of.get(cpu, 0),
                socket=read_integer(base / "topology/physical_package_id", 0),
                core=parse_cpu_list(read_text(base / "topology/thread_siblings_list")) or (cpu,),
                cache=parse_cpu_list(read_text(base / "cache/index3/shared_cpu_list")) or (cpu,),
            )
        )
    devices = {
        index: read_integer(root / f"bus/pci/devices/{pci}/numa_node", -1)
        for index, pci in device_pci.items()
    }
    return Topology(tuple(found), devices)


def told_topology(node: Node) -> Topology:
    """The topology as an inventory has it: a NUMA node is a socket with one cache, and each processor a core.

    Of nodes that are alike it is the same object.
    """
    return _told(node.cpus, node.numa, tuple([(device.index, device.numa) for device in node.devices]))


@lru_cache(maxsize=128)
def _told(
    cpus: tuple[int, ...], numa: tuple[NumaNode, ...], devices: tuple[tuple[str, int], ...]
) -> Topology:
    parts = {part.id: part.cpus for part in numa} or {0: cpus}
    found = tuple(Cpu(cpu, numa, numa, (cpu,), there) for numa, there in parts.items() for cpu in there)
    return Topology(found, dict(devices))
