"""From a job's spec to a placement: the request to the planner, then masks, CPUs and memory of each worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fractions import Fraction
from functools import cache

from msgspec.structs import replace

from unirun.collocation.devices import TorchrunDevices, device_types, torchrun_devices
from unirun.collocation.host import Topology, near_cpus, told_topology
from unirun.collocation.inventory import (
    CPU,
    Assignment,
    Inventory,
    Node,
    Placement,
    PlacementRequest,
    RoleRequest,
    Ties,
    accelerators,
    slots_of,
)
from unirun.collocation.planning import plan, replan
from unirun.collocation.planning.problem import MAX_NAMES_SHOWN, both
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import show_size, some


def shown_need(role: RoleSpec) -> str:
    """``8 cpus, 64.0 GB``; empty for a role that names neither."""
    cpus = [] if role.cpus is None else [some(role.cpus, "cpu")]
    return ", ".join([*cpus, *([] if role.memory is None else [show_size(role.memory)])])


Cpus = tuple[int, ...] | None
"""The processors that a worker is bound to; None for no binding."""
TopologyOf = Callable[[Node], Topology]
"""A function that gives the processors near each device of a node."""
NO_TIES = Ties()


def place(
    spec: JobSpec,
    inventory: Inventory,
    *,
    topology: TopologyOf = told_topology,
    ties: Ties = NO_TIES,
) -> tuple[JobSpec, Placement]:
    """The placement of a job, and the job with as many ranks as there is room for. Raises `PlacementError`.

    A job without placement options on one node gets its devices as under torchrun (`devices`). `ties` come from the
    job's graph (`graph.weights`, `graph.tight_parts`). With ``numa_binding``, `topology` is called for each node that
    has ranks on devices.
    """
    found = _with_beside(spec, plan(request_of(spec, inventory, ties), inventory))
    return _as_jobs(spec, inventory, topology, found)


def place_again(
    spec: JobSpec,
    inventory: Inventory,
    previous: Placement,
    lost: Iterable[str],
    *,
    closed: Iterable[str] = (),
    topology: TopologyOf = told_topology,
    ties: Ties = NO_TIES,
) -> tuple[JobSpec, Placement]:
    """The placement after the loss of nodes: ranks stay as in `previous` unless they have to move (`planning.replan`).
    Nodes that are `closed` get no more ranks.

    Raises `PlacementError` when the job does not fit on the nodes that are left.
    """
    gone = frozenset((*lost, *previous.lost))
    request = replace(request_of(spec, inventory, ties), closed=frozenset(closed))
    placement = replan(request, inventory, previous, gone)
    placement = _with_beside(spec, placement, previous, gone)
    names = tuple(node.name for node in inventory.nodes if node.name in gone)
    return _as_jobs(spec, inventory, topology, replace(placement, lost=names))


def _with_beside(
    spec: JobSpec,
    placement: Placement,
    previous: Placement | None = None,
    gone: Collection[str] = (),
) -> Placement:
    """`placement` with the roles that are beside others: one rank on each node of the other role.

    They need nothing, so that the planner does not place them. A rank stays on its node as long as that is there, also
    when all ranks of the other role have left it or have ended: a role that has fewer ranks starts again as a whole.
    """
    assignments = list(placement.assignments)
    for role in spec.roles:
        if role.beside is None:
            continue
        before = [each.node for each in previous.of_role(role.name)] if previous else []
        others = [each.node for each in placement.of_role(role.beside) if each.node not in gone]
        nodes = [*dict.fromkeys(others)] or [name for name in placement.nodes if name not in gone][:1]
        new = iter([node for node in nodes if node not in before])
        kept = [node if node not in gone else next(new, nodes[0]) for node in before] if nodes else before
        places = enumerate([*kept, *(new if others else ())])
        assignments += (Assignment(role.name, rank, node, slot=-1, local_rank=0) for rank, node in places)
    return replace(placement, assignments=tuple(assignments))


def _as_jobs(
    spec: JobSpec, inventory: Inventory, topology: TopologyOf, placement: Placement
) -> tuple[JobSpec, Placement]:
    """The planner's placement with device masks, processors and notes; and the job with the counts of its roles."""
    as_torchrun = _as_torchrun(spec, inventory)
    cpus_of = _binding(spec, inventory, topology)
    # With an empty mask, two roles never use one device by accident. A trainer's mask is left as it is.
    blind = {role.name for role in spec.roles if not role.slots}
    accelerated = {node.name for node in inventory.nodes if accelerators(node)}
    assignments = []
    for each in placement.assignments:
        rank = as_torchrun.assigned(each) if as_torchrun else each
        # With virtual_local_rank every LOCAL_RANK is 0: with a mask for the whole role all would use one device.
        mask = rank.own if spec.virtual_local_rank and rank.devices is not None else rank.devices
        mask = () if rank.role in blind and rank.node in accelerated else mask
        cpus = cpus_of(rank)
        # Ranks that stay keep their values, so that callers can compare by identity.
        unchanged = (mask, cpus) == (rank.devices, rank.cpus)
        assignments.append(rank if unchanged else replace(rank, devices=mask, cpus=cpus))
    unwanted = _unwanted(spec, inventory)
    excluded = tuple(node.name for node in inventory.nodes if node.name in unwanted)
    words = [as_torchrun.note(spec) if as_torchrun else placement.note]
    words += _without_slots(blind)
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
    roles = tuple(_placed(role, len(placement.of_role(role.name))) for role in spec.roles)
    return replace(spec, roles=roles), placement


def _placed(role: RoleSpec, count: int) -> RoleSpec:
    """The role with `count` ranks, which may become as many as it was to have."""
    return replace(role, count=count, most=None if role.least is None else max(role.count, role.most or 0))


def _without_slots(names: Collection[str]) -> list[str]:
    """A note on the roles that need no slot; of many their number."""
    if not names:
        return []
    told = both(sorted(names)) if len(names) <= MAX_NAMES_SHOWN else f"{len(names)} roles"
    return [f"{told} {'needs' if len(names) == 1 else 'need'} no slot"]


def _own_masks(spec: JobSpec, assignments: Sequence[Assignment]) -> list[str]:
    """A note on roles in which ``cuda:{LOCAL_RANK}`` is wrong: their ranks see their own devices only, from 0 on."""
    if spec.virtual_local_rank:
        return []
    roles = dict.fromkeys(
        each.role
        for each in assignments
        if each.local_rank and each.devices and len(each.devices) <= each.local_rank
    )
    roles |= dict.fromkeys(
        each.role
        for each in assignments
        if each.local_rank and each.devices == each.own and len(each.own) > 1
    )
    return [f"each rank of {', '.join(roles)} sees its own devices only, from cuda:0"] if roles else []


def _masks(spec: JobSpec, inventory: Inventory) -> dict[str, str]:
    known = device_types()
    usual = _usual(_usable(spec, inventory))
    types = {role.name: usual for role in spec.roles if not role.slots} | slot_types(spec, inventory)
    variables = {role: known[type].mask_variable for role, type in types.items() if type in known}
    return {role: variable for role, variable in variables.items() if variable is not None}


def request_of(spec: JobSpec, inventory: Inventory, ties: Ties = NO_TIES) -> PlacementRequest:
    """The request to the planner, without the roles that are beside others."""
    types = slot_types(spec, inventory)
    beside = {role.name for role in spec.roles if role.beside}
    if beside:
        weights = {pair: weight for pair, weight in ties.weights.items() if beside.isdisjoint(pair)}
        parts = tuple(tuple(name for name in part if name not in beside) for part in ties.parts)
        ties = Ties(weights, parts)
    request = PlacementRequest(
        roles=tuple(
            _role_request(role, types.get(role.name)) for role in spec.roles if role.name not in beside
        ),
        collocated=spec.collocations,
        together=spec.host_collocations,
        apart=spec.separations,
        isolated=spec.isolations,
        ties=ties,
        spares=spec.spares,
        tainted=_unwanted(spec, inventory),
    )
    as_torchrun = _as_torchrun(spec, inventory)
    return as_torchrun.request(request) if as_torchrun else request


def unknown_nodes(spec: JobSpec, inventory: Inventory) -> list[str]:
    """Warnings about names in ``exclude_nodes`` that no node has.

    They are no error, because a list of nodes to avoid is used for many jobs, which get different nodes. But after a
    typing error, the node that was meant is in use.
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
    """By role, the type of its slots: its own, else the usual type of the nodes. Roles without slots are not in it."""
    usual = _usual(_usable(spec, inventory))
    return {role.name: role.device or usual for role in spec.roles if role.takes_slots}


def _usual(nodes: Sequence[Node]) -> str:
    """The type of the first accelerator, or ``cpu`` when there are none."""
    return next((device.type for node in nodes for device in accelerators(node)), CPU)


def _as_torchrun(spec: JobSpec, inventory: Inventory) -> TorchrunDevices | None:
    nodes = _usable(spec, inventory)
    if len(inventory.nodes) != 1:
        # When others are excluded or lost, the node that is left must not get more ranks than it has room for.
        return None
    return torchrun_devices(spec, nodes, _usual(nodes))


def _usable(spec: JobSpec, inventory: Inventory) -> list[Node]:
    unwanted = _unwanted(spec, inventory)
    return [node for node in inventory.nodes if node.name not in unwanted]


def _unwanted(spec: JobSpec, inventory: Inventory) -> frozenset[str]:
    """The names in ``exclude_nodes`` that nodes have."""
    return frozenset(spec.exclude_nodes).intersection(node.name for node in inventory.nodes)


def _role_request(role: RoleSpec, device: str | None) -> RoleRequest:
    return RoleRequest(
        name=role.name,
        count=role.count,
        least=role.count if role.least is None else role.least,
        device=device,
        slots=Fraction(role.slots or 1).limit_denominator(1000),
        per_node=role.per_node,
        per_group=role.per_group,
        devices=role.devices,
        component=role.component,
        needs={
            name: need for name, need in (("cpus", role.cpus), ("memory", role.memory)) if need is not None
        },
    )


def _binding(spec: JobSpec, inventory: Inventory, topology: TopologyOf) -> Callable[[Assignment], Cpus]:
    """A function that gives the processors to bind a rank to: its slots if they are CPUs, or those near its devices."""
    nodes = {node.name: node for node in inventory.nodes}
    pinned = {role.name for role in spec.roles if role.device == CPU}
    types = slot_types(spec, inventory)
    mode = spec.numa_binding

    @cache
    def topology_of(node: str) -> Topology:
        return topology(nodes[node])

    @cache
    def near(mode: str, devices: tuple[str, ...], there: Topology) -> tuple[int, ...]:
        # Cached, because many ranks have the same devices on nodes of the same topology.
        return tuple(sorted({cpu for device in devices for cpu in near_cpus(mode, device, there)}))

    def cpus_of(rank: Assignment) -> Cpus:
        if rank.role in pinned:
            return _processors(nodes[rank.node], rank)
        type = types.get(rank.role, CPU)
        if mode is None or type == CPU:
            return None
        devices = rank.own
        if not devices:
            # With fewer devices than ranks, assume round robin.
            there = slots_of(nodes[rank.node], type)
            devices = (there[rank.slot % len(there)][0],)
        return near(mode, devices, topology_of(rank.node))

    return cpus_of


def _processors(node: Node, rank: Assignment) -> Cpus:
    """The processors of the CPU slots of a rank. With more slots than processors, slots share them round robin."""
    if not node.cpus or not rank.own:
        return None
    return tuple(sorted({node.cpus[int(index) % len(node.cpus)] for index in rank.own}))
