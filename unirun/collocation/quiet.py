"""Jobs that say nothing of places and have one node, which run as under torchrun: how their ranks come by devices.

The planner places them as it does all others. Here is what it is asked for them, and what is taken from its answer
where a worker finds its device by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec.structs import replace

from unirun.collocation.inventory import Node
from unirun.collocation.placement import Assignment
from unirun.collocation.request import Request
from unirun.collocation.slots import CPU, Slot, slots_of
from unirun.spec import JobSpec
from unirun.values import Value


class Manner(Enum):
    """Who is given which devices."""

    PLACES = "the node has none"
    OWN = "each rank has one to itself, or with the ranks that share it"
    BY_LOCAL_RANK = "each worker sees all of them and takes that of its LOCAL_RANK"
    UNTOLD = "there are fewer than ranks, so nobody can tell which of them compute on what"


class Quiet(Value):
    """A job that says nothing of places, with all its ranks on `node`; `needed` of its `devices` would be in use."""

    manner: Manner
    node: Node
    devices: tuple[Slot, ...]
    needed: int

    def asked(self, request: Request) -> Request:
        """`request`, for devices only where they are given to ranks; else for places, of which there is no end.

        All ranks of a role are on the node, so they are one thing to be placed, however many there are.
        """
        roles = tuple(
            replace(
                role,
                device=role.device if self.manner is Manner.OWN or role.device is None else CPU,
                per_node=role.per_node or role.count,
            )
            for role in request.roles
        )
        return replace(request, roles=roles)

    def seen(self, place: Assignment) -> Assignment:
        """The place that the planner has found, as far as it is this rank's device that is known."""
        if place.slot < 0 or self.manner in (Manner.PLACES, Manner.OWN):
            return place
        if self.manner is Manner.UNTOLD:
            return replace(place, own=(), share=1.0, numa=-1)
        device = self.devices[place.local_rank]
        return replace(place, own=(device.index,), numa=device.numa)

    def note(self, spec: JobSpec) -> str:
        """What was decided, in words."""
        if self.manner is Manner.PLACES:
            return f"{self.node.name} has no accelerator: a slot is a place for one process"
        if self.manner is Manner.BY_LOCAL_RANK:
            return "one role: every worker sees all devices and chooses by LOCAL_RANK"
        if self.manner is Manner.UNTOLD:
            return (
                f"{self.needed} ranks on {len(self.devices)} devices: CUDA_VISIBLE_DEVICES is left as it is"
            )
        shared = "".join(f", {' and '.join(group)} share theirs" for group in spec.collocations)
        used = f"{self.needed} of {len(self.devices)} devices of {self.node.name} are in use"
        return f"{used}, one per rank{shared}"


def quiet(spec: JobSpec, nodes: Sequence[Node], usual: str) -> Quiet | None:
    """How a job comes by devices that does not say it; None when it does, or may use several `nodes`.

    `usual` is the type of device of a role that names none. Each rank is given one where roles must be told apart,
    which share a node, and there are enough; a role alone can choose by ``LOCAL_RANK``, as under torchrun, unless
    ``virtual_local_rank`` makes that 0 everywhere. A trainer needs none.
    """
    if len(nodes) != 1 or _says_where(spec):
        return None
    devices = () if usual == CPU else slots_of(nodes[0], usual)
    # Roles that share devices have the same number of ranks: the first one's count for all.
    sharing = {name for group in spec.collocations for name in group[1:]}
    needed = sum(
        role.count for role in spec.roles if role.name not in sharing and role.entry.kind != "trainer"
    )
    if not devices:
        manner = Manner.PLACES
    elif len(devices) < needed:
        manner = Manner.UNTOLD
    elif len(spec.roles) > 1 or spec.virtual_local_rank:
        manner = Manner.OWN
    else:
        manner = Manner.BY_LOCAL_RANK
    return Quiet(manner, nodes[0], devices, needed)


def _says_where(spec: JobSpec) -> bool:
    return bool(
        spec.host_collocations
        or spec.separations
        or spec.isolations
        or spec.spares
        or any(
            role.device or role.slots != 1 or role.per_group or role.devices or role.least is not None
            for role in spec.roles
        )
    )
