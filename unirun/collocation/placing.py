"""From a job's spec to a placement: the request to the planner, then masks, CPUs and memory of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from itertools import islice
from math import lcm
from typing import Any, Literal

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
from unirun.collocation.planning.plan import find
from unirun.collocation.planning.problem import both, some
from unirun.errors import Fault, PlacementError
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import show_size
from unirun.spec.roles import LEAST_MEMORY
from unirun.values import Value

# The check that ranks which need processors and memory of their node do not need more than it has.
#
# The planner places ranks by their slots. This looks at the result, node by node: a job that has room on other nodes is
# refused as well, with a change of it that fits.

Resource = Literal["cpus", "memory"]
RESOURCES: tuple[Resource, ...] = ("cpus", "memory")
Place = Callable[[JobSpec], Placement | None]
"""A function that gives the planner's placement of a job, None when it does not fit."""

MAX_OFFERS = 4
"""At most so many changes that fit are named."""
MAX_NAMES_SHOWN = 6
"""At most so many roles are named, those that need most."""
MAX_NODES_SHOWN = 3
"""At most so many nodes with a shortage are named."""


class NodeShortage(Value):
    """Ranks that need more of a resource than `node` has: `counts` by role. `available` is what it has."""

    node: Node
    resource: Resource
    counts: Mapping[str, int]
    needed: int
    available: int


class JobAlternative(Value):
    """A job that fits, and how it differs, in words."""

    spec: JobSpec
    text: str


def check_needs(spec: JobSpec, placement: Placement, inventory: Inventory, place: Place) -> None:
    """Raise `PlacementError` where ranks need more processors or memory than their node has.

    `place` finds out whether a change of the job fits.
    """
    found = list(islice(shortages(spec, placement, inventory), MAX_NODES_SHOWN))
    if not found:
        return
    offers = list(islice(_offers(spec, placement, inventory, place), MAX_OFFERS))
    texts = tuple(offer.text for offer in offers)
    remedy = ", or ".join([f"{texts[0]} fits", *texts[1:]]) if texts else "use larger nodes"
    first = found[0]
    problems = [_said(spec, each) for each in found]
    raise PlacementError(
        "\n".join(problems),
        remedy,
        role=_largest(spec, first),
        needed=first.needed,
        available=first.available,
        constraint=first.resource,
        nearest=texts,
        faults=tuple(
            Fault(_largest(spec, each), problem, remedy)
            for each, problem in zip(found, problems, strict=True)
        ),
    )


def shortages(spec: JobSpec, placement: Placement, inventory: Inventory) -> Iterator[NodeShortage]:
    """The nodes of which ranks need more than there is, in the order of the inventory. Unknown memory is enough."""
    for resource in RESOURCES:
        roles = {role.name: role for role in spec.roles if getattr(role, resource) is not None}
        there: dict[str, Counter[str]] = {}
        for name in roles:
            for host, count in Counter(each.node for each in placement.of_role(name)).items():
                there.setdefault(host, Counter())[name] = count
        for node in inventory.nodes if there else ():
            counts = there.get(node.name, Counter())
            needed = sum(count * need_of(roles[name], resource, node) for name, count in counts.items())
            available = room_of(node, resource)
            if available is not None and needed > available:
                yield NodeShortage(node, resource, dict(counts), needed, available)


def need_of(role: RoleSpec, resource: Resource, node: Node) -> int:
    """The processors of `node`, or the bytes, that a rank of `role` needs there."""
    if resource == "memory":
        return role.memory or 0
    return len(node.cpus) if role.cpus == "all" else role.cpus or 0


def room_of(node: Node, resource: Resource) -> int | None:
    """The processors or bytes of `node`; None when they are not known."""
    return len(node.cpus) if resource == "cpus" else node.memory or None


def shown_need(role: RoleSpec) -> str:
    """``8 cpus, 64.0 GB``; empty for a role that names neither."""
    cpus = [] if role.cpus is None else [_amount("cpus", role.cpus)]
    return ", ".join([*cpus, *([] if role.memory is None else [show_size(role.memory)])])


def _amount(resource: Resource, number: int | str) -> str:
    if isinstance(number, str):
        return f"{number} cpus"
    return show_size(number) if resource == "memory" else some(number, "cpu")


def _largest(spec: JobSpec, short: NodeShortage) -> str:
    """The role whose ranks need most on the node."""
    needs = {
        name: count * need_of(spec.role(name), short.resource, short.node)
        for name, count in short.counts.items()
    }
    return max(needs, key=lambda name: needs[name])


def _said(spec: JobSpec, short: NodeShortage) -> str:
    """``engine and judge need 20 cpus of node0 (engine 2 × 8, judge 4 × 1), and it has 16``."""
    needs = {name: need_of(spec.role(name), short.resource, short.node) for name in short.counts}
    names = sorted(needs, key=lambda name: -short.counts[name] * needs[name])[:MAX_NAMES_SHOWN]
    each = [
        f"{name} {short.counts[name]} × {_amount(short.resource, needs[name])}"
        for name in short.counts
        if name in names
    ]
    each += [some(len(needs) - MAX_NAMES_SHOWN, "more role")] if len(needs) > MAX_NAMES_SHOWN else []
    who = both(needs) if len(needs) <= MAX_NAMES_SHOWN else f"{len(needs)} roles"
    verb = "needs" if len(short.counts) == 1 else "need"
    amount = _amount(short.resource, short.needed)
    memory = " of memory" if short.resource == "memory" else ""
    has = _amount(short.resource, short.available)
    if has == amount:
        # Sizes that differ by less than they are rounded.
        amount, has = f"{short.needed} B", f"{short.available} B"
    return f"{who} {verb} {amount}{memory} of {short.node.name} ({', '.join(each)}), and it has {has}"


def _offers(
    spec: JobSpec, placement: Placement, inventory: Inventory, place: Place
) -> Iterator[JobAlternative]:
    """Jobs that fit and differ little: with ranks on more nodes, with smaller needs, with fewer ranks."""

    def fits(changed: JobSpec) -> bool:
        found = place(changed)
        return found is not None and next(shortages(changed, found, inventory), None) is None

    short = next(shortages(spec, placement, inventory))
    role = spec.role(_largest(spec, short))
    if len(inventory.nodes) > 1:
        found = (offer for offer in _spread(spec, role, short.counts) if fits(offer.spec))
        yield from islice(found, MAX_OFFERS // 2)
    smaller = _smaller(spec, placement, inventory)
    if smaller is not None:
        yield smaller
    step = lcm(role.per_node or 1, role.per_group or 1)
    tries = (_with_role(spec, role, count=count) for count in _fewer(role.count, step))
    fewer = next((each for each in tries if fits(each)), None)
    if fewer is not None:
        yield JobAlternative(fewer, f"{role.name}={fewer.role(role.name).count}")


def _spread(spec: JobSpec, role: RoleSpec, counts: Mapping[str, int]) -> Iterator[JobAlternative]:
    """Jobs with fewer ranks of `role` on a node, without one of the other roles there, or both."""
    sizes = [(f"{role.name} per_node {size}", size) for size in _divisors(role.count, counts[role.name])]
    others = [(f"separating {role.name} and {other}", other) for other in counts if other != role.name]
    for text, size in sizes:
        yield JobAlternative(_with_role(spec, role, per_node=size), text)
    for text, other in others:
        apart = replace(spec, separations=(*spec.separations, (role.name, other)))
        yield JobAlternative(apart, text)
        for also, size in sizes:
            yield JobAlternative(_with_role(apart, role, per_node=size), f"{text} with {also}")


def _divisors(count: int, below: int) -> list[int]:
    return [size for size in range(below - 1, 0, -1) if count % size == 0][:MAX_OFFERS]


def _fewer(count: int, step: int) -> Sequence[int]:
    """Smaller counts: those just below `count`, then half of it, a quarter and so on."""
    near = [count - number * step for number in range(1, 2 * MAX_OFFERS + 1)]
    halves = [(count >> power) // step * step for power in range(1, count.bit_length())]
    return [each for each in dict.fromkeys([*near, *halves]) if each > 0]


def _smaller(spec: JobSpec, placement: Placement, inventory: Inventory) -> JobAlternative | None:
    """With smaller needs, of the role with the greatest in each case; ranks stay where they are then."""
    words: dict[str, str] = {}
    changed = spec
    while (short := next(shortages(changed, placement, inventory), None)) is not None:
        name = _largest(changed, short)
        role = changed.role(name)
        number = short.counts[name]
        others = short.needed - number * need_of(role, short.resource, short.node)
        left = (short.available - others) // number
        text = str(left)
        if short.resource == "memory":
            left, text = _whole_size(left)
        if left < (LEAST_MEMORY if short.resource == "memory" else 1):
            return None
        words[f"{name} {short.resource}"] = text
        changed = _with_role(changed, role, **{short.resource: left})
    return JobAlternative(changed, both(f"{what} {text}" for what, text in words.items()))


def _whole_size(size: int) -> tuple[int, str]:
    """A size of at most `size` that is short in a job file, and how it is written there: ``31GB``, ``512MB``."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if size >= 10 * unit:
            return size // unit * unit, f"{size // unit}{name}"
    return size, str(size)


def _with_role(spec: JobSpec, role: RoleSpec, **changes: Any) -> JobSpec:
    """`spec` with changes of one role; a smaller count is the least one as well where that was greater."""
    if "count" in changes and role.least is not None:
        changes["least"] = min(role.least, changes["count"])
    return replace(
        spec,
        roles=tuple(replace(each, **changes) if each.name == role.name else each for each in spec.roles),
    )


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
    return _as_jobs(spec, inventory, topology, ties, found)


def place_again(
    spec: JobSpec,
    inventory: Inventory,
    previous: Placement,
    lost: Iterable[str],
    *,
    topology: TopologyOf = told_topology,
    ties: Ties = NO_TIES,
) -> tuple[JobSpec, Placement]:
    """The placement after the loss of nodes: ranks stay as in `previous` unless they have to move (`planning.replan`).

    Raises `PlacementError` when the job does not fit on the nodes that are left.
    """
    gone = frozenset((*lost, *previous.lost))
    placement = replan(request_of(spec, inventory, ties), inventory, previous, gone)
    placement = _with_beside(spec, placement, previous, gone)
    names = tuple(node.name for node in inventory.nodes if node.name in gone)
    return _as_jobs(spec, inventory, topology, ties, replace(placement, lost=names))


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
    spec: JobSpec, inventory: Inventory, topology: TopologyOf, ties: Ties, placement: Placement
) -> tuple[JobSpec, Placement]:
    """The planner's placement with device masks, processors and notes; and the job with the counts of its roles.

    Raises `PlacementError` where a node has not the processors or the memory that its ranks need.
    """
    if any(role.cpus or role.memory for role in spec.roles):
        left = Inventory(tuple(node for node in inventory.nodes if node.name not in placement.lost))
        check_needs(spec, placement, left, lambda changed: _found(changed, left, ties))
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


def _found(spec: JobSpec, inventory: Inventory, ties: Ties) -> Placement | None:
    """The planner's placement; None when nothing fits, or the request has faults."""
    try:
        return find(request_of(spec, inventory, ties), inventory)
    except PlacementError:
        return None


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
            devices = (there[rank.slot % len(there)].index,)
        return near(mode, devices, topology_of(rank.node))

    return cpus_of


def _processors(node: Node, rank: Assignment) -> Cpus:
    """The processors of the CPU slots of a rank. With more slots than processors, slots share them round robin."""
    if not node.cpus or not rank.own:
        return None
    return tuple(sorted({node.cpus[int(index) % len(node.cpus)] for index in rank.own}))
