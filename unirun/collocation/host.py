"""The inventory of this host after its resource limits, and simulated nodes for plans and tests."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from unirun.collocation.devices import DeviceType, device_types
from unirun.collocation.inventory import Device, Inventory, Node, NumaNode, visible
from unirun.collocation.limits import (
    cgroup_limits,
    least,
    memory_field,
    parse_cpu_list,
    read_integer,
    read_text,
    slurm_devices,
    slurm_limits,
)
from unirun.errors import Fault, PlacementError, SpecError
from unirun.spec.read import parse_size
from unirun.values import Value, natural

# The processors that are near a device: the four modes of torchrun's ``--numa-binding``, as a pure function.
#
# The modes are those of ``torch.numa.binding.AffinityMode`` (torch 2.13); the topology comes from sysfs.


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
    return (1 << 30, index) if (number := natural(index)) is None else (number, "")


def _share(cores: Sequence[tuple[int, ...]], index: int, shares: int) -> tuple[int, ...]:
    """The `index`-th of `shares` even parts of the distinct `cores`; the first parts get what is left over."""
    distinct = sorted(set(cores))
    return tuple(cpu for at in _part(len(distinct), index, shares) for cpu in distinct[at])


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
    parts = dict(numa) or {0: cpus}
    found = tuple(Cpu(cpu, numa, numa, (cpu,), there) for numa, there in parts.items() for cpu in there)
    return Topology(found, dict(devices))


def local_inventory(environ: Mapping[str, str] | None = None) -> Inventory:
    """This host with the resources that control groups, Slurm and masks such as ``CUDA_VISIBLE_DEVICES`` allow."""
    environ = os.environ if environ is None else environ
    devices = local_devices(environ, device_types().values())
    return Inventory((read_node(socket.gethostname(), os.sched_getaffinity(0), devices, environ),))


def local_topology(node: Node) -> Topology:
    """The processors near each device of `node`, which is this host: from sysfs and the inventory."""
    found = read_topology(node.cpus, {device.index: device.pci for device in node.devices})
    known = {device.index: device.numa for device in node.devices if device.numa >= 0}
    return replace(found, device_numa=found.device_numa | known)


def local_devices(environ: Mapping[str, str], types: Iterable[DeviceType]) -> tuple[Device, ...]:
    """The devices of `types` that `environ` leaves; a type's own mask goes before what Slurm says."""
    found: list[Device] = []
    for kind in types:
        devices = kind.discover()
        mask = environ.get(kind.mask_variable) if kind.mask_variable else None
        if mask is None and kind.name == "cuda":
            mask = slurm_devices(environ, len(devices))
        found += visible(devices, mask)
    return tuple(found)


def read_node(
    name: str,
    affinity: set[int],
    devices: tuple[Device, ...],
    environ: Mapping[str, str],
    root: Path = Path("/"),
) -> Node:
    """The host with the filesystem at `root`, of which a process may run on the processors in `affinity`.

    Of several limits the least counts. Where a limit is a number of processors and not a set, as many are taken from
    every NUMA node as is its part, so that a device does not lose all that are near it.
    """
    limits = least(cgroup_limits(root), slurm_limits(environ))
    # A set without any processor of the affinity does not apply to this process.
    usable = tuple(sorted(affinity & limits.cpus if limits.cpus is not None else affinity)) or tuple(
        sorted(affinity)
    )
    numa_cpus = _numa_cpus(root)
    cpus = thin(usable, limits.cpu_count or len(usable), list(numa_cpus.values()))
    devices = tuple(
        replace(device, numa=read_integer(root / f"sys/bus/pci/devices/{device.pci}/numa_node", -1))
        if device.numa < 0 and device.pci
        else device
        for device in devices
    )
    # Memory reserved for huge pages cannot be allocated otherwise.
    memory = max(memory_field(root / "proc/meminfo", "MemTotal") - _hugepages(root), 0)
    return Node(
        name=name,
        cpus=cpus,
        devices=devices,
        memory=min((size for size in (memory, limits.memory) if size), default=0),
        numa=_numa_nodes(numa_cpus, frozenset(cpus), {device.numa for device in devices}),
    )


def thin(cpus: Sequence[int], count: int, nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """`count` of `cpus`, spread over the NUMA `nodes` (the processors of each) in proportion; ascending."""
    if count >= len(cpus):
        return tuple(cpus)
    home = {cpu: number for number, node in enumerate(nodes) for cpu in node}
    parts: dict[int, list[int]] = {}
    for cpu in cpus:
        parts.setdefault(home.get(cpu, -1), []).append(cpu)
    # By largest remainder (Hamilton), which gives every node its share, up or down to a whole processor.
    shares = {number: divmod(len(part) * count, len(cpus)) for number, part in parts.items()}
    left = count - sum(whole for whole, _ in shares.values())
    more = sorted(shares, key=lambda number: (-shares[number][1], number))[:left]
    return tuple(
        sorted(cpu for number, part in parts.items() for cpu in part[: shares[number][0] + (number in more)])
    )


def _numa_cpus(root: Path) -> dict[int, tuple[int, ...]]:
    """The processors of every NUMA node by its number."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = {int(folder.name.removeprefix("node")): folder / "cpulist" for folder in folders}
    return {number: parse_cpu_list(found[number].read_text()) for number in sorted(found)}


def _numa_nodes(
    numa_cpus: Mapping[int, tuple[int, ...]], usable: frozenset[int], near: set[int]
) -> tuple[NumaNode, ...]:
    """The NUMA nodes with usable processors or a device; empty when there is only one."""
    nodes = tuple(
        (number, tuple(cpu for cpu in cpus if cpu in usable))
        for number, cpus in numa_cpus.items()
        if usable.intersection(cpus) or number in near
    )
    return nodes if len(nodes) > 1 else ()


def _hugepages(root: Path) -> int:
    """Bytes in the pools of huge pages of all sizes."""
    total = 0
    for pool in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        size = int(pool.name.removeprefix("hugepages-").removesuffix("kB"))
        total += int((pool / "nr_hugepages").read_text()) * size * 1024
    return total


# Simulated nodes, for plans and tests: ``fake:nodes=4,devices=8,numa=2``.

PREFIX = "fake:"
_KEYS = ("nodes", "devices", "nvlink", "numa", "cpus", "memory", "type", "name")
_NUMBERS = {
    "nodes": (1, 1, 100_000),
    "devices": (0, 0, 1024),
    "nvlink": (0, 1, 1024),
    "numa": (1, 1, 1024),
    "cpus": (64, 1, 4096),
}
"""The default, the least and the most of each. Without ``nvlink`` it is as many as a NUMA node has."""
_NAMES = {"type": ("cuda", r"(?!cpu$)[a-z][a-z0-9_]{0,31}"), "name": ("node", r"[A-Za-z][A-Za-z0-9.-]{0,31}")}
"""The default and the form of each. Processors are no devices: ``cpus`` has their number."""
_WHOSE = {"type": "devices", "name": "nodes"}
_MEMORY = 512 * 10**9
_DEVICE_MEMORY = 80 * 2**30


def is_fake(text: str) -> bool:
    """Return True if `text`, as ``--inventory`` has it, describes simulated nodes."""
    return text.startswith(PREFIX)


def parse_fake(text: str) -> Inventory:
    """The nodes that `text` describes; a pure function of it. Raises `SpecError` with every fault.

    Keys, all but the first for each node: ``nodes`` (1), ``devices`` (0), ``numa`` nodes (1) over which processors,
    devices and memory are spread evenly, ``cpus`` (64), ``memory`` (512GB), ``type`` of the devices (cuda), ``name``
    (node), to which the node's number is added: ``node0``, or ``node00`` when there are more than ten. Devices have
    80 GiB. NVLink joins so many consecutive ones as ``nvlink`` says: 2 for bridges between pairs, ``devices`` for
    NVSwitch, 1 for none; without it, those of one NUMA node.
    """
    faults: list[Fault] = []
    values = _pairs(text.removeprefix(PREFIX), faults)
    numbers = {key: _number(key, values, faults) for key in _NUMBERS}
    names = {key: _name(key, values, faults) for key in _NAMES}
    memory = _size(values.get("memory"), faults)
    if numbers["numa"] > numbers["cpus"]:
        problem = f"{numbers['numa']} NUMA nodes of {numbers['cpus']} processors: each needs one"
        faults.append(Fault(f"{PREFIX}numa", problem, f"use numa={numbers['cpus']}, or fewer"))
    if faults:
        raise SpecError(faults)
    return _inventory(numbers, names, memory)


def _pairs(text: str, faults: list[Fault]) -> dict[str, str]:
    """The text of each key; faults are added to `faults`."""
    values: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        where = f"{PREFIX}{key}"
        if not part:
            if text.strip():
                faults.append(Fault(PREFIX, "there is nothing between two commas", "leave one out"))
        elif key not in _KEYS:
            faults.append(Fault(where, "unknown key", f"known: {', '.join(_KEYS)}"))
        elif not equals or not value:
            faults.append(Fault(where, "it has no value", f"write {key}=…"))
        elif key in values:
            faults.append(Fault(where, f"it is there twice: {values[key]} and {value}", "leave one out"))
        else:
            values[key] = value
    return values


def _number(key: str, values: dict[str, str], faults: list[Fault]) -> int:
    default, least, most = _NUMBERS[key]
    text = values.get(key)
    if text is None:
        return default
    if re.fullmatch(r"[0-9]{1,9}", text) and least <= int(text) <= most:
        return int(text)
    faults.append(Fault(f"{PREFIX}{key}", f"expected a whole number from {least} to {most}, found {text!r}"))
    return default


def _name(key: str, values: dict[str, str], faults: list[Fault]) -> str:
    default, pattern = _NAMES[key]
    text = values.get(key, default)
    if re.fullmatch(pattern, text):
        return text
    faults.append(Fault(f"{PREFIX}{key}", f"{text!r} is no {key} of {_WHOSE[key]}", f"write {key}={default}"))
    return default


def _size(text: str | None, faults: list[Fault]) -> int:
    try:
        return _MEMORY if text is None else parse_size(text)
    except ValueError as error:
        faults.append(Fault(f"{PREFIX}memory", str(error)))
        return _MEMORY


def _inventory(numbers: dict[str, int], names: dict[str, str], memory: int) -> Inventory:
    count, numa, cpus = numbers["nodes"], numbers["numa"], tuple(range(numbers["cpus"]))
    devices = _devices(numbers["devices"], numa, numbers["nvlink"], names["type"])
    nodes = tuple((n, tuple(_part(len(cpus), n, numa))) for n in range(numa))
    digits = len(str(count - 1))
    # All nodes share one tuple of devices, so that ten thousand nodes are created quickly.
    return Inventory(
        tuple(
            Node(
                f"{names['name']}{number:0{digits}}",
                cpus,
                devices,
                memory=memory,
                numa=nodes if numa > 1 else (),
            )
            for number in range(count)
        )
    )


def _devices(count: int, numa: int, nvlink: int, kind: str) -> tuple[Device, ...]:
    homes = [number for number in range(numa) for _ in _part(count, number, numa)]
    islands = [index // nvlink for index in range(count)] if nvlink else homes

    def nearness(one: int, other: int) -> str:
        if islands[one] == islands[other]:
            return "nvlink"
        return "numa" if homes[one] == homes[other] else "system"

    return tuple(
        Device(
            index=str(index),
            name=f"fake {kind}",
            pci=f"{index:04x}:00:00.0",
            type=kind,
            memory=_DEVICE_MEMORY,
            numa=home,
            links=tuple((str(peer), nearness(index, peer)) for peer in range(count) if peer != index),
        )
        for index, home in enumerate(homes)
    )


def _part(count: int, number: int, parts: int) -> range:
    """The `number`-th of `parts` even parts of ``range(count)``; the first parts get what is left over."""
    size, rest = divmod(count, parts)
    start = number * size + min(number, rest)
    return range(start, start + size + (1 if number < rest else 0))
