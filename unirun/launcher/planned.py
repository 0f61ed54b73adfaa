"""A job with its placement, ready to launch, as a value."""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec import to_builtins

from unirun.collocation import Inventory, Placement, place, place_again
from unirun.collocation.graph import declared
from unirun.collocation.placing import TopologyOf
from unirun.failover.state import ties_of
from unirun.spec.job import JobSpec
from unirun.values import Value
from unirun.wire.frames import from_json


class PlannedJob(Value):
    """A job's spec, the inventory of nodes, and the placement of the ranks."""

    spec: JobSpec
    inventory: Inventory
    placement: Placement

    def to_json(self) -> str:
        """Encode as JSON; `from_json` is the inverse."""
        return json.dumps(to_builtins(self))

    @classmethod
    def from_json(cls, text: str) -> PlannedJob:
        """Decode the result of `to_json`. Raises `FrameError`."""
        return from_json(cls, text)


def plan(spec: JobSpec, inventory: Inventory, topology: TopologyOf) -> PlannedJob:
    """Place the ranks of `spec` on `inventory`. Raises `SpecError`, `PlacementError`."""
    placed, placement = place(spec, inventory, topology=topology, ties=ties_of(declared(spec)))
    return PlannedJob(placed, inventory, placement)


def plan_without(planned: PlannedJob, lost: Sequence[str], topology: TopologyOf) -> PlannedJob:
    """Plan the same job again without the nodes `lost`. Raises `PlacementError`."""
    spec, placement = place_again(
        planned.spec,
        planned.inventory,
        planned.placement,
        lost,
        topology=topology,
        ties=ties_of(declared(planned.spec)),
    )
    return PlannedJob(spec, planned.inventory, placement)
