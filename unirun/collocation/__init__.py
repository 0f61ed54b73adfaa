"""What there is (the inventory) and who sits where (the placement)."""

from unirun.collocation.inventory import (
    NEARNESS,
    Device,
    Inventory,
    Node,
    NumaNode,
    count_slots,
    local_inventory,
    local_topology,
)
from unirun.collocation.planner import Assignment, Placement, plan_placement

__all__ = [
    "NEARNESS",
    "Assignment",
    "Device",
    "Inventory",
    "Node",
    "NumaNode",
    "Placement",
    "count_slots",
    "local_inventory",
    "local_topology",
    "plan_placement",
]
