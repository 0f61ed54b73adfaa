"""The slots of a node: its devices of a type; on CPUs, places for one process each."""

from __future__ import annotations

from unirun.collocation.inventory import Node
from unirun.values import Value

CPU = "cpu"


class Slot(Value):
    """A place on a node. `index` is what a device mask names; of a CPU place it is its number.

    `numa` is the nearest NUMA node, 0 when the kernel does not tell.
    """

    node: str
    type: str
    index: str
    numa: int


def slots_of(node: Node, type: str, crowd: int = 1) -> tuple[Slot, ...]:
    """The slots of `type` on `node`, in the node's order.

    There is one place per usable processor, `crowd` times over: more processes than processors may run on a host.
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
