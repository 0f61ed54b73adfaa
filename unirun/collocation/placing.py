"""From a job's spec to the ranks' places: what the planner is asked for, and what follows for each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fractions import Fraction
from functools import cache

from msgspec.structs import replace

from unirun.collocation.devices import device_types
from unirun.collocation.inventory import Inventory, Node, accelerators
from unirun.collocation.numa import Topology, near_cpus, told_topology
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning import plan, replan
from unirun.collocation.quiet import Quiet, quiet
from unirun.collocation.request import Request, RoleRequest, Ties
from unirun.collocation.slots import CPU, slots_of
from unirun.spec import JobSpec, RoleSpec

Cpus = tuple[int, ...] | None
"""The processors that a worker is bound to; None for no binding."""
TopologyOf = Callable[[Node], Topology]
"""Which processors of a node are near which of its devices."""
NO_TIES = Ties()


def place(
    spec: JobSpec,
    inventory: Inventory,
    *,
    topology: TopologyOf = told_topology,
    ties: Ties = NO_TIES,
) -> tuple[JobSpec, Placement]:
    """Who sits where, and the job with the ranks that there is room for. Raises `PlacementError`.

    A job that says nothing of places and has one node runs as under torchrun (`unirun.collocation.quiet`). `ties`
    are from its graph (`unirun.graph.weights`, `unirun.graph.tight_parts`). With ``numa_binding``, `topology` is asked
    for each node that has ranks on devices.
    """
    return _as_jobs(spec, inventory, topology, plan(request_of(spec, inventory, ties), inventory))


def place_again(
    spec: JobSpec,
    inventory: Inventory,
    previous: Placement,
    lost: Iterable[str],
    *,
    topology: TopologyOf = told_topology,
    ties: Ties = NO_TIES,
) -> tuple[JobSpec, Placement]:
    """The same after the nodes `lost`: who need not move stays as in `previous` (`unirun.collocation.planning.replan`).

    Raises `PlacementError` when those that are left are too few.
    """
    gone = frozenset((*lost, *previous.lost))
    placement = replan(request_of(spec, inventory, ties), inventory, previous, gone)
    names = tuple(node.name for node in inventory.nodes if node.name in gone)
    return _as_jobs(spec, inventory, topology, replace(placement, lost=names))


def _as_jobs(
    spec: JobSpec, inventory: Inventory, topology: TopologyOf, placement: Placement
) -> tuple[JobSpec, Placement]:
    """What a planner has found, with all that follows from it for workers."""
    alone = _alone(spec, inventory)
    cpus_of = _binding(spec, inventory, topology)
    assignments = []
    for each in placement.assignments:
        seen = alone.seen(each) if alone else each
        # LOCAL_RANK is 0 in all of them then: a mask for the whole role would put them on one device.
        mask = seen.own if spec.virtual_local_rank and seen.devices is not None else seen.devices
        cpus = cpus_of(seen)
        # Most are as the planner has them, and of those who stay it is the same one.
        as_is = (mask, cpus) == (seen.devices, seen.cpus)
        assignments.append(seen if as_is else replace(seen, devices=mask, cpus=cpus))
    unwanted = _unwanted(spec, inventory)
    excluded = tuple(node.name for node in inventory.nodes if node.name in unwanted)
    words = [alone.note(spec) if alone else placement.note]
    words += _own_masks(spec, assignments)
    words += [f"{', '.join(excluded)} excluded"] if excluded else []
    words += [f"{', '.join(placement.lost)} lost"] if placement.lost else []
    placement = replace(
        placement,
        assignments=tuple(assignments),
        note="; ".join(words),
        excluded=excluded,
        masks=_masks(spec, inventory),
    )
    roles = tuple(replace(role, count=len(placement.of_role(role.name))) for role in spec.roles)
    return replace(spec, roles=roles), placement


def _own_masks(spec: JobSpec, assignments: Sequence[Assignment]) -> list[str]:
    """A word to scripts that take ``cuda:{LOCAL_RANK}``: who sees only its own devices has them from 0 on."""
    if spec.virtual_local_rank:
        return []
    roles = dict.fromkeys(
        each.role
        for each in assignments
        if each.local_rank and each.devices is not None and len(each.devices) <= each.local_rank
    )
    roles |= dict.fromkeys(
        each.role
        for each in assignments
        if each.local_rank and each.devices == each.own and len(each.own) > 1
    )
    return [f"each rank of {', '.join(roles)} sees its own devices only, from cuda:0"] if roles else []


def _masks(spec: JobSpec, inventory: Inventory) -> dict[str, str]:
    known = device_types()
    types = {role: known[type] for role, type in slot_types(spec, inventory).items() if type in known}
    return {role: type.mask_variable for role, type in types.items() if type.mask_variable is not None}


def request_of(spec: JobSpec, inventory: Inventory, ties: Ties = NO_TIES) -> Request:
    """What the planner is asked for."""
    types = slot_types(spec, inventory)
    request = Request(
        roles=tuple(_role_request(role, types.get(role.name)) for role in spec.roles),
        collocated=spec.collocations,
        together=spec.host_collocations,
        apart=spec.separations,
        isolated=spec.isolations,
        ties=ties,
        spares=spec.spares,
        tainted=_unwanted(spec, inventory),
    )
    alone = _alone(spec, inventory)
    return alone.asked(request) if alone else request


def unknown_nodes(spec: JobSpec, inventory: Inventory) -> list[str]:
    """What to tell of the names in ``exclude_nodes`` that no node has.

    They are no fault, because a list of nodes that are to be avoided lasts longer than the nodes that one job gets. But
    with a slip of the pen the node that was meant is in use.
    """
    usable = [node.name for node in _usable(spec, inventory)]
    told = []
    for name in sorted({*spec.exclude_nodes} - _unwanted(spec, inventory)):
        close = get_close_matches(name, usable, n=1)
        told.append(
            f"no node is called {name}, so it is not excluded"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    return told


def slot_types(spec: JobSpec, inventory: Inventory) -> dict[str, str]:
    """By role, the type of its slots: the one that it names, else that of the nodes. Trainers are not in it."""
    usual = _usual(_usable(spec, inventory))
    return {role.name: role.device or usual for role in spec.roles if role.entry.kind != "trainer"}


def _usual(nodes: Sequence[Node]) -> str:
    """The type of the first device that there is."""
    return next((device.type for node in nodes for device in accelerators(node)), CPU)


def _alone(spec: JobSpec, inventory: Inventory) -> Quiet | None:
    nodes = _usable(spec, inventory)
    if len(inventory.nodes) != 1:
        # A node that is left of several is no reason to put more on it than there is room for.
        return None
    return quiet(spec, nodes, _usual(nodes))


def _usable(spec: JobSpec, inventory: Inventory) -> list[Node]:
    unwanted = _unwanted(spec, inventory)
    return [node for node in inventory.nodes if node.name not in unwanted]


def _unwanted(spec: JobSpec, inventory: Inventory) -> frozenset[str]:
    """The nodes that are excluded, without names of nodes that there are not."""
    return frozenset(spec.exclude_nodes).intersection(node.name for node in inventory.nodes)


def _role_request(role: RoleSpec, device: str | None) -> RoleRequest:
    return RoleRequest(
        name=role.name,
        count=role.count,
        least=role.count if role.least is None else role.least,
        device=device,
        slots=Fraction(role.slots).limit_denominator(1000),
        per_node=role.per_node,
        per_group=role.per_group,
        devices=role.devices,
    )


def _binding(spec: JobSpec, inventory: Inventory, topology: TopologyOf) -> Callable[[Assignment], Cpus]:
    """Which processors a rank is bound to, by its place: those that it has asked for, or those near its devices."""
    nodes = {node.name: node for node in inventory.nodes}
    pinned = {role.name for role in spec.roles if role.device == CPU}
    types = slot_types(spec, inventory)
    mode = spec.numa_binding

    @cache
    def topology_of(node: str) -> Topology:
        return topology(nodes[node])

    @cache
    def near(mode: str, devices: tuple[str, ...], there: Topology) -> tuple[int, ...]:
        # Ranks on nodes that are alike ask the same: a hundred thousand of them are answered in a moment.
        return tuple(sorted({cpu for device in devices for cpu in near_cpus(mode, device, there)}))

    def cpus_of(place: Assignment) -> Cpus:
        if place.role in pinned:
            return _processors(nodes[place.node], place)
        type = types.get(place.role, CPU)
        if mode is None or type == CPU:
            return None
        devices = place.own
        if not devices:
            # With fewer devices than ranks they are taken in turn.
            there = slots_of(nodes[place.node], type)
            devices = (there[place.slot % len(there)].index,)
        return near(mode, devices, topology_of(place.node))

    return cpus_of


def _processors(node: Node, place: Assignment) -> Cpus:
    """The processors that belong to the places of a rank: a place is one of them, shared when there are more ranks."""
    if not node.cpus or not place.own:
        return None
    return tuple(sorted({node.cpus[int(index) % len(node.cpus)] for index in place.own}))
