"""The inventory of nodes, and the placement of ranks on them."""

from unirun.collocation.devices import DeviceType
from unirun.collocation.host import is_fake, local_inventory, local_topology, parse_fake
from unirun.collocation.inventory import (
    Assignment,
    Device,
    Inventory,
    Node,
    Placement,
    Ties,
    accelerators,
    count_slots,
)
from unirun.collocation.placing import place, place_again, slot_types, unknown_nodes

__all__ = [
    "Assignment",
    "Device",
    "DeviceType",
    "Inventory",
    "Node",
    "Placement",
    "Ties",
    "accelerators",
    "count_slots",
    "is_fake",
    "local_inventory",
    "local_topology",
    "parse_fake",
    "place",
    "place_again",
    "slot_types",
    "unknown_nodes",
]
