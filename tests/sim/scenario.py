"""The scenario of a seed: the job, the behaviour of its processes, and the accidents that happen to them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from unirun.collocation import Assignment, Device, Inventory, Node, Placement, place
from unirun.errors import PlacementError
from unirun.failover.draft import Due
from unirun.launcher.orders import CALLS
from unirun.observe.jobdir import JobDir
from unirun.spec.job import Entry, EntryKind, JobSpec, Probe, Restart, RoleSpec

JOB = JobDir(Path("/jobs/sim"))


@dataclass(frozen=True)
class Behaviour:
    """The behaviour of the processes of one role in this history."""

    fails: float
    """Chance that a worker fails of itself."""
    finishes: float
    """Chance that a worker ends well of itself."""
    lifetime: float
    stubborn: float
    """Chance that TERM is ignored."""
    follows: float
    """Chance that a worker fails when a peer of its role does."""
    recovers: float
    """Chance that a worker says that it is recoverable."""

    def lasting(self) -> Behaviour:
        """These, of workers that do not end soon."""
        return dataclasses.replace(self, fails=self.fails / 10, lifetime=20.0, follows=self.follows / 10)


@dataclass
class Scenario:
    """The scenario that a seed stands for: the job, the behaviour of its roles, and the accidents."""

    spec: JobSpec
    placement: Placement
    inventory: Inventory
    behaviours: dict[str, Behaviour]
    slow: float
    accidents: list[tuple[float, str]] = field(default_factory=list)
    absent: frozenset[str] = frozenset()
    crashes: float = 0.0
    """The factor on the chance, low by default, that a master dies around a write."""
    unknown: float = 0.0
    """Chance that the answer of the store to a write gets lost."""
    late: bool = False
    """True if such a write may be done much later."""
    piece_bytes: int = 1_000_000
    """Bytes in one transaction at most: a longer context is written in pieces."""
    skews: dict[str, float] = field(default_factory=dict)
    """Seconds by which the wall clock of each node is off."""
    disorder: float = 0.0
    """Chance that a view of changes comes twice."""
    hosts: bool = False
    """True if the nodes are hosts, so that there are beats."""
    rates: dict[str, float] = field(default_factory=dict)
    """The rate of the clock of each node."""
    resilient: frozenset[str] = frozenset()
    """The roles of scripts whose ranks enter a function that survives the loss of other ranks."""
    trouble: float = 1.0
    """The factor on the small chances of trouble that each process has: a fork that fails, a wait that is not woken."""
    stuck: float = 0.03
    """Chance that a worker does not come out of a generation that is over."""
    stores_end: float = 0.02
    """Chance that a rendezvous store ends of itself."""
    planted: str = ""
    """The place of a planted bug: a class of events, what a master begins with, or its writes."""

    def break_at(self, event: object) -> None:
        """Raise `Planted` where the bug is: of workers and nodes the first one meets it."""
        name = event if isinstance(event, str) else type(event).__name__
        rank, node = getattr(event, "rank", 0), getattr(event, "node", self.first)
        if name == self.planted and (rank, node) == (0, self.first):
            raise PlantedBug(f"a bug in {name}")

    @property
    def first(self) -> str:
        """The first node."""
        return self.placement.nodes[0]


class PlantedBug(Exception):
    """A bug in what decides, or in what writes."""


BUG_PLACES = (
    "begin",
    "write",
    "Join",
    "SpawnerReady",
    "WorkerStarted",
    "WorkerExited",
    "WorkerExited",
    "WorkerExited",
    "FromWorker",
    "StoreOpened",
    "StoreEnded",
    "AgentLost",
    Due.REJOIN,
    "Stop",
    Due.VIEW,
    "Drain",
    Due.GROWTH,
)

ACCIDENTS = (
    "stop",
    "stop_again",
    "stop_now",
    "owner",
    "agent_killed",
    "agent_killed",
    "agent_killed",
    "agent_signalled",
    "master_killed",
    "master_killed",
    "master_hangs",
    "master_cut_off",
    "store_away",
    "stop_unwritten",
    "node_comes",
    "node_drained",
    "agent_cut_off",
    "agent_hears_nothing",
    "agent_says_nothing",
    "agent_hangs",
    "clock_jumps",
    "spawner_hangs",
    "spawner_killed",
    "spawner_killed",
    "worker_hangs",
)


HOST_ACCIDENTS = (
    "cable_out_briefly",
    "cable_out_briefly",
    "cable_out",
    "cable_of_master_out",
    "way_out",
    "way_back_out",
    "way_there_out",
    "host_stopped",
    "host_of_master_stopped",
)
"""The accidents of nodes that are hosts."""


RESTLESS_ACCIDENTS = (
    "rank_straggles",
    "rank_straggles",
    "rank_straggles",
    "node_sickens",
    "growth_asked",
    "boundary",
    "node_comes",
    "node_drained",
)
"""The accidents by which ranks go elsewhere, or get more peers, though nothing has failed."""


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    names = ("actor", "rollout", "critic")[: rng.randint(1, 3)]
    nodes = tuple(f"n{i}" for i in range(rng.choice((1, 1, 2, 3, 4))))
    kinds = {name: _kind(rng) for name in names}
    roles = tuple(
        RoleSpec(
            name,
            rng.randint(1, 4),
            Entry(kinds[name], f"{name}.py"),
            env={"OMP_NUM_THREADS": "2"} if rng.random() < 0.2 else {},
            max_restarts=rng.choice((0, 0, 1, 2, 5)),
            least=1 if rng.random() < 0.4 else None,
            start_method="exec" if rng.random() < 0.2 else "fork",
            restart="process" if kinds[name] in CALLS else "role",
        )
        for name in names
    )
    primary = tuple(rng.sample(names, rng.randint(1, len(names)))) if rng.random() < 0.5 else names
    spec = JobSpec(
        name="sim",
        run_id="sim",
        roles=roles,
        primary=primary,
        shutdown_timeout=rng.choice((0.0, 0.2, 3.0, 30.0)),
        join_timeout=5.0,
    )
    inventory = _inventory(nodes, rng)
    spec, placement = _placed(spec, inventory, nodes, rng)
    behaviours = {
        name: Behaviour(
            fails=rng.choice((0.0, 0.0, 0.1, 0.4, 0.9)),
            finishes=0.05 if spec.role(name).entry.kind == "workload" else rng.choice((0.5, 0.9, 1.0)),
            lifetime=rng.choice((0.01, 0.5, 5.0)),
            stubborn=rng.choice((0.0, 0.0, 0.3)),
            follows=rng.choice((0.0, 0.5, 1.0))
            if spec.role(name).restart == "role"
            else rng.choice((0.0, 0.1)),
            recovers=rng.choice((0.5, 1.0, 1.0)),
        )
        for name in names
    }
    accidents = [
        (rng.uniform(0.0, rng.choice((0.1, 3.0, 12.0))), rng.choice(ACCIDENTS))
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4)))
    ]
    absent = frozenset(node for node in nodes if rng.random() < 0.04)
    slow = rng.choice((0.0005, 0.005, 0.05))
    crashes = rng.choice((0.0, 0.0, 1.0, 10.0))
    unknown = rng.choice((0.0, 0.0, 0.05, 0.3))
    wanted = {*placement.nodes, *placement.spares}
    inventory = Inventory(tuple(node for node in inventory.nodes if node.name in wanted))
    scenario = Scenario(spec, placement, inventory, behaviours, slow, accidents, absent, crashes, unknown)
    # Of these each history has one at most, so that it is not longer than others.
    match rng.choice(
        (
            *[""] * 8,
            "hosts",
            "late",
            "late",
            "pieces",
            "pieces",
            "skew",
            "skew",
            "planted",
            "disorder",
            *["moves"] * 4 * bool(inventory.nodes),
        )
    ):
        case "late":
            scenario.late, scenario.unknown = True, scenario.unknown or 0.05
        case "pieces":
            scenario.piece_bytes = rng.choice((100, 500, 2000))
        case "skew":
            scenario.skews = {node: rng.choice((-3600.0, -2.0, 0.0, 0.5, 3600.0)) for node in nodes}
        case "hosts":
            _make_hosts(scenario, rng)
        case "disorder":
            scenario.disorder = 0.2
        case "moves":
            scenario.behaviours = {
                name: dataclasses.replace(behaviour, lifetime=5.0) for name, behaviour in behaviours.items()
            }
            moves = (rng.choice(("node_comes", "node_drained")) for _ in range(rng.randint(2, 6)))
            scenario.accidents += [(rng.uniform(0.3, 6.0), move) for move in moves]
        case "planted":
            scenario.planted = rng.choice(BUG_PLACES)
    # Drawn apart, so that the rest of a history does not depend on it.
    services = random.Random(f"services {seed}")
    if services.random() < 0.5:
        _add_services(scenario, services)
        _give_slots(scenario, random.Random(f"slots {seed}"))
    levels = random.Random(f"levels {seed}")
    if levels.random() < 0.4:
        _add_levels(scenario, levels)
    resilient = random.Random(f"resilient {seed}")
    if resilient.random() < 0.3:
        _make_resilient(scenario, resilient)
    restless = random.Random(f"restless {seed}")
    if restless.random() < 0.12:
        _make_restless(scenario, restless)
    return scenario


def _make_restless(scenario: Scenario, rng: random.Random) -> None:
    """Nothing stays as it is: ranks straggle, or are stuck, nodes are sick, stores end, and roles may grow. Ranks run for
    long enough for that, and most often there is room for it."""
    scenario.stuck, scenario.stores_end = rng.choice((0.03, 0.5)), rng.choice((0.02, 0.3))
    for name, behaviour in scenario.behaviours.items():
        if not scenario.spec.role(name).service:
            scenario.behaviours[name] = dataclasses.replace(behaviour, lifetime=rng.choice((1.0, 5.0, 20.0)))
    scenario.spec = replace(
        scenario.spec,
        roles=tuple(
            role if role.service else replace(role, max_restarts=rng.choice((role.max_restarts, 9)))
            for role in scenario.spec.roles
        ),
    )
    if not scenario.hosts and rng.random() < 0.7:
        _give_room(scenario, rng)
    if scenario.inventory.nodes:
        roles = (_growing(role) if rng.random() < 0.5 else role for role in scenario.spec.roles)
        scenario.spec = replace(scenario.spec, roles=tuple(roles))
    for _ in range(rng.randint(2, 6)):
        scenario.accidents.append((rng.uniform(0.5, 8.0), rng.choice(RESTLESS_ACCIDENTS)))


def _give_room(scenario: Scenario, rng: random.Random) -> None:
    """The job is on nodes that have more slots than it needs."""
    wanted = sum(role.count for role in scenario.spec.roles if role.slots)
    count = rng.choice((2, 3, 4))
    devices = tuple(Device(str(number), "") for number in range(-(-wanted // count) + rng.randint(1, 2)))
    inventory = Inventory(tuple(Node(f"n{number}", (0, 1), devices) for number in range(count)))
    with contextlib.suppress(PlacementError):
        _place_on(scenario, replace(scenario.spec, spares=0), inventory)


def _growing(role: RoleSpec) -> RoleSpec:
    """The role with more ranks where there is room, if that can be."""
    if role.entry.kind not in ("script", "workload") or role.ports:
        return role
    return replace(role, least=1, most=role.count + 2, elastic=role.entry.kind == "workload")


def _make_resilient(scenario: Scenario, rng: random.Random) -> None:
    """Ranks of scripts survive the loss of others, and run for long enough for that."""
    scenario.resilient = frozenset(
        role.name for role in scenario.spec.roles if role.entry.kind == "script" and rng.random() < 0.7
    )
    roles = tuple(
        replace(role, max_restarts=rng.choice((1, 3, 9))) if role.name in scenario.resilient else role
        for role in scenario.spec.roles
    )
    scenario.spec = replace(scenario.spec, roles=roles)
    for name in sorted(scenario.resilient):
        behaviour = scenario.behaviours[name]
        scenario.behaviours[name] = dataclasses.replace(
            behaviour,
            lifetime=rng.choice((0.5, 5.0, 5.0)),
            finishes=rng.choice((1.0, 1.0, behaviour.finishes)),
            follows=rng.choice((0.0, 0.1)),
        )


def _add_levels(scenario: Scenario, rng: random.Random) -> None:
    """Budgets of the job and of ranks, windows, back-offs, and exit codes that no restart follows."""
    window, delay = rng.choice((0.0, 0.0, 100.0)), rng.choice((0.0, 0.0, 0.5))
    roles = []
    for role in scenario.spec.roles:
        codes = tuple(code for code in (1, 7, 137) if rng.random() < 0.1)
        role = replace(role, fatal_exit_codes=codes)
        if len(scenario.inventory.nodes) > 1 and rng.random() < 0.3:
            # Enough for ranks to fail three times on one node.
            role = replace(role, max_restarts=9)
        if not role.service:
            limit = rng.choice((None, None, 1, 2))
            role = replace(role, rank_restarts=limit, restart_window=window, restart_delay=delay)
        roles.append(role)
    scenario.spec = replace(
        scenario.spec,
        roles=tuple(roles),
        max_job_restarts=rng.choice((0, 1, 1, 2, 5)),
        restart_window=window,
        restart_delay=delay,
    )


def _add_services(scenario: Scenario, rng: random.Random) -> None:
    """Servers beside the roles, which start after each other."""
    names = ("engine", "router")[: rng.randint(1, 2)]
    nodes, added, places = scenario.placement.nodes, [], []
    for name in names:
        after = {"engine": rng.choice((0, 1))} if name == "router" and rng.random() < 0.7 else {}
        ready = Probe("tcp") if rng.random() < 0.8 else None
        asked = ready is not None and rng.random() < 0.5
        group = rng.choice((None, None, 2))
        service = RoleSpec(
            name,
            rng.randint(1, 3) * (group or 1),
            Entry("program", name),
            max_restarts=rng.choice((0, 1, 3, 10)),
            start_method="exec",
            restart="process",
            slots=0,
            contract="none",
            ports=("http", "dist")[: rng.randint(0, 2)],
            service=True,
            optional=rng.random() < 0.2,
            ready=ready,
            ready_timeout=rng.choice((2.0, 20.0)),
            alive=Probe("tcp", every=3.0, misses=rng.choice((1, 2))) if asked else None,
            group=group,
            after=after,
            restart_window=rng.choice((0.0, 5.0)),
            restart_delay=rng.choice((0.0, 0.5)),
        )
        local = dict.fromkeys(nodes, 0)
        for rank in range(service.count):
            node = rng.choice(nodes)
            places.append(Assignment(name, rank, node, -1, local[node]))
            local[node] += 1
        added.append(service)
        if ready is not None and service.ports and rng.random() < 0.4:
            added.append(_companion(scenario, service, places))
        scenario.behaviours[name] = Behaviour(
            fails=rng.choice((0.0, 0.1, 0.4)),
            finishes=rng.choice((0.0, 0.05)),
            lifetime=rng.choice((0.5, 5.0, 20.0)),
            stubborn=rng.choice((0.0, 0.3)),
            follows=0.0,
            recovers=1.0,
        )
    wait = {name: rng.choice((0, 1)) for name in names}
    roles = [replace(role, after=wait) if rng.random() < 0.5 else role for role in scenario.spec.roles]
    if rng.random() < 0.3:
        role = rng.choice(roles)
        roles[roles.index(role)] = replace(role, ports=("http",), least=None)
    first = rng.random() < 0.5
    scenario.spec = replace(scenario.spec, roles=(*added, *roles) if first else (*roles, *added))
    before = scenario.placement.assignments
    scenario.placement = replace(
        scenario.placement, assignments=(*places, *before) if first else (*before, *places)
    )


def _give_slots(scenario: Scenario, rng: random.Random) -> None:
    """Services take slots of nodes that have hardly more than they need, so that there may be no room for one when a node
    is lost; more of them are optional, and some wait for other roles."""
    if len(scenario.inventory.nodes) < 2 or rng.random() < 0.3:
        return
    optional = {
        role.name: role.optional or rng.random() < 0.6 for role in scenario.spec.roles if role.service
    }
    waits = {each.name: rng.random() < 0.3 for each in scenario.spec.roles}
    first = next(role.name for role in scenario.spec.roles if not role.service)
    restarts: tuple[Restart, ...] = ("process", "role")
    roles = []
    for role in scenario.spec.roles:
        # A companion is as optional as its engine.
        may_go = optional.get(role.beside or role.name, False)
        if role.service and role.beside is None:
            needed = any(first in other.after or role.name in other.after for other in scenario.spec.roles)
            role = replace(
                role,
                slots=1.0,
                after={first: 0} if waits[role.name] and not needed else role.after,
                restart=rng.choice(restarts) if not role.group else role.restart,
            )
        roles.append(replace(role, optional=may_go))
    spec = replace(scenario.spec, roles=tuple(roles), spares=0)
    for count in range(1, 24):
        devices = tuple(Device(str(number), "") for number in range(count))
        inventory = Inventory(tuple(replace(node, devices=devices) for node in scenario.inventory.nodes))
        with contextlib.suppress(PlacementError):
            _place_on(scenario, spec, inventory)
            break
    else:
        return
    if rng.random() < 0.7:
        scenario.accidents += ((rng.uniform(0.0, 8.0), "agent_killed") for _ in range(rng.choice((1, 1, 2))))


def _place_on(scenario: Scenario, spec: JobSpec, inventory: Inventory) -> None:
    """Place a job there. Raises `PlacementError`."""
    spec, found = place(spec, inventory)
    # In the order of the roles, as job files have companions last.
    ordered = (each for role in spec.roles for each in found.of_role(role.name))
    scenario.spec, scenario.inventory = spec, inventory
    scenario.placement = replace(found, assignments=tuple(ordered))


def _companion(scenario: Scenario, engine: RoleSpec, places: list[Assignment]) -> RoleSpec:
    """The role that brings weights into the engines, on each of their nodes."""
    name = f"{engine.name}-weights"
    nodes = dict.fromkeys(place.node for place in places if place.role == engine.name)
    places += (Assignment(name, rank, node, -1, 0) for rank, node in enumerate(nodes))
    scenario.behaviours[name] = Behaviour(
        fails=0.1, finishes=0.0, lifetime=5.0, stubborn=0.0, follows=0.0, recovers=1.0
    )
    return RoleSpec(
        name,
        len(nodes),
        Entry("module", name),
        max_restarts=10,
        restart="process",
        slots=0.0,
        service=True,
        optional=engine.optional,
        restart_window=60.0,
        beside=engine.name,
    )


def _make_hosts(scenario: Scenario, rng: random.Random) -> None:
    """The nodes are hosts. The job is on several of them, may go on without one, and runs for long enough for that."""
    scenario.hosts, nodes = True, tuple(f"n{n}" for n in range(rng.choice((3, 4))))
    devices = Device("0", ""), Device("1", "")
    inventory = Inventory(tuple(Node(name, (0, 1), devices) for name in nodes))
    scenario.rates = {node: rng.choice((0.99, 1.0, 1.01)) for node in nodes}
    for _ in range(rng.choice((1, 1, 2, 3))):
        scenario.accidents.append((rng.uniform(3.0, 12.0), rng.choice(HOST_ACCIDENTS)))
    roles = tuple(
        replace(role, count=min(role.count, 2), max_restarts=5, least=1) for role in scenario.spec.roles
    )
    spec = replace(scenario.spec, roles=roles, spares=1 if len(nodes) == 4 else 0)
    scenario.spec, scenario.placement = place(spec, inventory)
    wanted = {*scenario.placement.nodes, *scenario.placement.spares}
    scenario.inventory = Inventory(tuple(node for node in inventory.nodes if node.name in wanted))
    scenario.behaviours = {name: behaviours.lasting() for name, behaviours in scenario.behaviours.items()}


def _placed(
    spec: JobSpec, inventory: Inventory, nodes: tuple[str, ...], rng: random.Random
) -> tuple[JobSpec, Placement]:
    """As a planner has it, with nodes that are held back, perhaps; without an inventory anywhere."""
    for spares in range(rng.randint(0, len(inventory.nodes) - 1) if inventory.nodes else -1, -1, -1):
        with contextlib.suppress(PlacementError):
            return place(replace(spec, spares=spares), inventory)
    return spec, Placement(tuple(_places(spec, nodes, rng)), "simulated")


def _inventory(nodes: tuple[str, ...], rng: random.Random) -> Inventory:
    """The nodes with devices for some or all ranks; empty for a job that cannot be anywhere else."""
    if len(nodes) == 1 or rng.random() < 0.2:
        return Inventory(())
    devices = [Device(str(n), "") for n in range(12)]
    most = rng.choice((2, 4, 8, 12))
    counts = [most if rng.random() < 0.7 else rng.randint(1, most) for _ in nodes]
    return Inventory(tuple(Node(n, (0, 1), tuple(devices[:c])) for n, c in zip(nodes, counts, strict=True)))


def _kind(rng: random.Random) -> EntryKind:
    chance = rng.random()
    if chance < 0.1:
        return "program"
    return "script" if chance < 0.55 else "workload" if chance < 0.85 else "trainer"


def _places(spec: JobSpec, nodes: tuple[str, ...], rng: random.Random) -> list[Assignment]:
    """Ranks anywhere, so that a role may span nodes; slots count up on each node."""
    places = []
    slots = dict.fromkeys(nodes, 0)
    for role in spec.roles:
        local = dict.fromkeys(nodes, 0)
        for rank, node in enumerate(sorted(rng.choice(nodes) for _ in range(role.count))):
            places.append(Assignment(role.name, rank, node, slots[node], local[node]))
            slots[node] += 1
            local[node] += 1
    return places
