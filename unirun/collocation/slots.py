"""The slots of a node: its devices of one type; on CPUs, one slot for each process that a processor may run."""

from __future__ import annotations

from unirun.collocation.inventory import Node
from unirun.values import Value

CPU = "cpu"


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
    """How many `slots_of` has."""
    if type != CPU:
        return sum(device.type == type for device in node.devices)
    return max(len(node.cpus), 1) * crowd
