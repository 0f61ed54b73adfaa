"""What there is (the inventory) and who sits where (the placement)."""

from unirun.collocation.inventory import Device, Inventory, Node, count_slots, local_inventory
from unirun.collocation.planner import Assignment, Placement, plan_placement

__all__ = [
    "Assignment",
    "Device",
    "Inventory",
    "Node",
    "Placement",
    "count_slots",
    "local_inventory",
    "plan_placement",
]
