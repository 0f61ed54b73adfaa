"""What there is (the inventory) and who sits where (the placement)."""

from unirun.collocation.inventory import Device, Inventory, Node, count_slots, local_inventory, local_topology
from unirun.collocation.planner import Assignment, Placement, plan_placement

__all__ = [
    "Assignment",
    "Device",
    "Inventory",
    "Node",
    "Placement",
    "count_slots",
    "local_inventory",
    "local_topology",
    "plan_placement",
]
