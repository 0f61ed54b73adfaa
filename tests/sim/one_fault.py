"""A history in which one fault comes to one part of a job, at one moment; otherwise nothing goes wrong."""

from __future__ import annotations

import signal
from functools import partial

from msgspec.structs import replace

from tests.sim.node import NodeModel
from tests.sim.processes import Process, Who
from tests.sim.scenario import Behaviour, Scenario
from tests.sim.simulation import Simulation
from tests.sim.spawner import SpawnerModel
from unirun.collocation import Device, Inventory, Node, place
from unirun.failover.draft import Command, Event, Record
from unirun.failover.state import JobPhase, JobState, RolePhase
from unirun.launcher import events
from unirun.launcher.environment import FRESH
from unirun.launcher.events import AgentState
from unirun.spec.job import Entry, EntryKind, JobSpec, Probe, RoleSpec
from unirun.wire.messages import Stop
from unirun.wire.reports import WorkerError

KINDS: dict[str, tuple[EntryKind, ...]] = {
    "scripts": ("script",),
    "resilient": ("script",),
    "workload": ("workload", "trainer"),
    "trainer": ("workload", "trainer"),
    "service": ("script", "program"),
}
"""The roles of the job, by the kind of the role that the fault is about."""

NAMES = {"script": "scripts", "workload": "workload", "trainer": "trainer", "program": "service"}

RANK = 2
"""The rank that has the fault, on the second node. A trainer has one."""

PEER = 1
"""The rank whose loss others survive."""

FULL = "OSError: [Errno 28] No space left on device: 'checkpoint.pt'"
VAIN = "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /0/1"
HANGS = "hangs: no progress for 10 s"

SHORT_OUTAGE = 1.5
"""Seconds without a store: less than a lease."""

SETTLED = 100.0
"""Seconds after the fault after which all is as it should be, and the job may end."""

GRACE = 3.0

FOR_EVER = 1e6


def calm_scenario(kind: str, limit: int, *, call: bool, hosts: bool) -> Scenario:
    """A job on two nodes and a spare one, whose processes run until they are told to end. In a call, or another
    collective, the peers of a script that fails do so as well."""
    roles = tuple(_role(entry, limit) for entry in KINDS[kind])
    resilient = frozenset[str]()
    if kind == "resilient":
        roles, resilient = (replace(roles[0], name=kind),), frozenset([kind])
    primary = tuple(role.name for role in roles if role.entry.kind in ("script", "trainer"))
    spec = JobSpec("sim", "sim", roles, primary, shutdown_timeout=GRACE, join_timeout=30.0, spares=1)
    nodes = tuple(Node(f"n{number}", (0, 1), (Device("0", ""), Device("1", ""))) for number in range(3))
    spec, placement = place(spec, Inventory(nodes))
    quiet = Behaviour(fails=0.0, finishes=0.0, lifetime=1e6, stubborn=0.0, follows=0.0, recovers=0.0)
    scripts = Behaviour(**{**quiet.__dict__, "follows": float(call and not resilient)})
    behaviours = {role.name: scripts if role.entry.kind == "script" else quiet for role in roles}
    return Scenario(
        spec, placement, Inventory(nodes), behaviours, 0.0005, hosts=hosts, trouble=0.0, resilient=resilient
    )


def _role(entry: EntryKind, limit: int) -> RoleSpec:
    program = entry == "program"
    return RoleSpec(
        NAMES[entry],
        1 if entry == "trainer" else 4,
        Entry(entry, "main"),
        max_restarts=limit,
        restart="role" if entry == "script" else "process",
        slots=1 if entry in ("script", "workload") else 0,
        start_method="exec" if program else "fork",
        contract="none" if program else "torchrun",
        service=program,
        ports=("http",) if program else (),
        ready=Probe("tcp") if program else None,
        ready_timeout=20.0,
        alive=Probe("tcp", every=1.0, misses=2) if program else None,
    )


class OneFault(Simulation):
    """The history of `fault`, which comes to `part` at `moment`. The role of `kind` has a `limit` of restarts."""

    def __init__(
        self, part: str, fault: str, moment: str, *, kind: str, limit: int = 3, seed: int = 1
    ) -> None:
        self.part, self.fault, self.moment = part, fault, moment
        self.role = kind
        self.rank = 0 if kind == "trainer" else RANK
        self.came = False
        self._coming = self._told_to_end = self._others_died = False
        self.decisions: list[str] = []
        self.incarnations: dict[tuple[str, int], int] = {}
        super().__init__(seed, calm_scenario(kind, limit, call=moment == "in a call", hosts=part == "agent"))

    # the moment

    def born(self, process: Process) -> None:
        super().born(process)
        self._look()

    def checked_agent(self, node: NodeModel, before: AgentState, event: events.Event) -> None:
        super().checked_agent(node, before, event)
        self._look()

    def stepped(
        self, epoch: int, before: JobState, event: Event, after: JobState, commands: list[Command]
    ) -> None:
        super().stepped(epoch, before, event, after, commands)
        self.decisions += [
            each.text for each in commands if isinstance(each, Record) and each.kind == "decision"
        ]
        self._look()

    def _look(self) -> None:
        if self.moment == "stopping" and not self._told_to_end and self._all_run:
            self._told_to_end = True
            if self.fault == "SIGTERM ignored":
                self.victim[2].deaf = True
            self.clock.after(0.0, lambda: self.tell(Stop(signal.SIGTERM, "stop")))
        if not self.came and not self._coming and self._is_there():
            self._coming = True
            self.clock.after(0.0, self._come)

    def _come(self) -> None:
        self._coming = False
        if not self.came and self._is_there():
            self.came = True
            self.trace(f"the fault: {self.fault} of {self.part}, {self.moment}")
            self._hit()
            self.clock.after(SETTLED, self._settled)

    def _is_there(self) -> bool:
        """Return True if it is the moment."""
        match self.moment:
            case "starting":
                return self._starts()
            case "forming":
                return self._forms()
            case "stopping":
                return self.state.phase is JobPhase.STOPPING and self._is_told_to_end()
        return self._all_run

    def _starts(self) -> bool:
        if self.part == "master":
            return bool(self.masters) and self.masters[-1].leads
        if self.part == "store member":
            return bool(self.state.agents)
        if self.part == "rendezvous store":
            return self.role in self.stores
        if self.part in ("agent", "spawner") and self.fault == "SIGSTOP":
            return "n1" in self.state.agents
        found = self.find(self.role, self.rank)
        return found is not None and found[2].view is None

    def _forms(self) -> bool:
        if "survivor" in self.part:
            return self._formed_anew()
        found = self.find(self.role, self.rank)
        first = self.state.roles[self.role].phase is RolePhase.STARTING
        if self.role == "scripts":
            return first and found is not None and found[2].view is not None
        return (first or self.role == "resilient") and found is not None and found[2].waits is not None

    def _formed_anew(self) -> bool:
        """A peer has died; the others meet in the next generation."""
        if self._all_run and not self._others_died:
            self._others_died = True
            spawner, number, _ = self.victim_of(PEER)
            spawner.end(number, None, signal.SIGKILL)
        found = self.find(self.role, self.rank)
        store = self.stores.get(self.role)
        return found is not None and store is not None and store.generation == 1 and found[2].waits is store

    @property
    def _all_run(self) -> bool:
        roles = self.state.roles.values()
        met = self.role != "resilient" or all(
            found is not None and found[2].formed and found[2].waits is None
            for rank in range(self.size(self.role))
            for found in (self.find(self.role, rank),)
        )
        running = all(role.phase is RolePhase.RUNNING for role in roles)
        return met and running and self.state.phase is JobPhase.RUNNING

    def _is_told_to_end(self) -> bool:
        if (found := self.find(self.role, self.rank)) is None:
            return False
        spawner, number, _ = found
        worker = spawner.node.state.workers.get(number)
        return worker is not None and worker.sent is not None

    # the fault

    def find(self, role: str, rank: int) -> tuple[SpawnerModel, int, Process] | None:
        """The process of a rank that lives, with its spawner and its number there."""
        for node in self.nodes.values():
            for spawner in node.spawners.values():
                for number, process in spawner.processes.items():
                    if process.alive and process.who[:2] == (role, rank):
                        return spawner, number, process
        return None

    def victim_of(self, rank: int) -> tuple[SpawnerModel, int, Process]:
        """The process of a rank of the role, which lives."""
        found = self.find(self.role, rank)
        assert found is not None, f"{self.role}:{rank} does not live"
        return found

    @property
    def victim(self) -> tuple[SpawnerModel, int, Process]:
        """The process that has the fault."""
        return self.victim_of(self.rank)

    def answers(self, who: Who, *, ready: bool) -> bool:
        found = self.find(who[0], who[1])
        return found is not None and found[2].works

    def takes_port(self, who: Who) -> bool:
        return self.fault == "port taken" and who == (self.role, self.rank, 0)

    def _hit(self) -> None:
        match self.part:
            case "agent" | "spawner":
                self._hit_node(self.nodes["n1"])
            case "master":
                self._hit_master()
            case "store member":
                self._lose_store_for(SHORT_OUTAGE)
            case "rendezvous store":
                self._hit_rendezvous()
            case _:
                if "survivor" in self.part and self.moment == "in a call":
                    spawner, number, _ = self.victim_of(PEER)
                    spawner.end(number, None, signal.SIGKILL)
                self._hit_worker(*self.victim)

    def _hit_worker(self, spawner: SpawnerModel, number: int, process: Process) -> None:
        match self.fault:
            case "SIGKILL":
                spawner.end(number, None, signal.SIGKILL)
                self.peers_see(process)
            case "exit 1" | "port taken":
                spawner.end(number, 1, None)
                self.peers_see(process)
            case "exit 0":
                spawner.end(number, 0, None)
                if self.role != "service":
                    self._leave_peers_alone(process)
            case "disk full" if self.moment in ("saving", "starting", "stopping"):
                error = WorkerError(FULL, f"Traceback: {FULL}", self.wall(process.node))
                spawner.node.apply(events.LinkMessage(number, error))
                spawner.end(number, 1, None)
                self.peers_see(process)
            case "SIGSTOP" | "GIL held":
                process.stopped = process.deaf = True
                if self.role == "service":
                    return
                self.clock.after(10.0, lambda: spawner.node.apply(events.Hung(number, HANGS)))

    def _leave_peers_alone(self, process: Process) -> None:
        """A rank does not come: its peers wait in vain, in a collective until it has ended, else for long."""
        if self.moment == "in a call":
            self.peers_see(process)
        elif self.moment in ("starting", "forming"):
            for rank in range(self.size(self.role)):
                if rank != process.who[1]:
                    self.clock.after(30.0 + rank / 100, partial(self._wait_in_vain, rank))

    def _wait_in_vain(self, rank: int) -> None:
        if (found := self.find(self.role, rank)) is not None:
            spawner, number, process = found
            if self.role == "scripts" or process.waits is not None:
                spawner.follow(number, process, VAIN)

    def _hit_node(self, node: NodeModel) -> None:
        if self.part == "agent":
            self.troubled = self.clock.now + 60.0
            if self.fault in ("SIGSTOP", "GIL held"):
                node.hang(FOR_EVER)
            else:
                node.die(self.fault)
            return
        (spawner,) = (each for key, each in node.spawners.items() if key != FRESH)
        if self.fault == "SIGSTOP":
            spawner.hang(FOR_EVER)
        else:
            spawner.die()

    def _hit_master(self) -> None:
        (master,) = (each for each in self.masters if each.leads)
        self.troubled = self.clock.now + 60.0
        match self.fault:
            case "SIGSTOP" | "GIL held":
                master.hang(30.0)
            case "disk full":
                self._lose_store_for(SHORT_OUTAGE)
            case _:
                master.die(self.fault)

    def _lose_store_for(self, seconds: float) -> None:
        self.troubled = self.clock.now + 60.0
        self._away_until = self.clock.now + seconds
        for client in self._clients:
            client.away_until = self._away_until

    def _hit_rendezvous(self) -> None:
        store = self.stores[self.role]
        if self.fault != "SIGSTOP":
            store.spawner.store_dies(self.role, store)

    # the end

    def _settled(self) -> None:
        if self.finish is not None:
            return
        self.incarnations = self.seen()
        assert self._all_run, "the job does not go on"
        for name in self.state.spec.primary:
            for worker in self.state.roles[name].live:
                spawner, number, _ = self.find_now(name, worker.rank)
                spawner.end(number, 0, None)

    def find_now(self, role: str, rank: int) -> tuple[SpawnerModel, int, Process]:
        found = self.find(role, rank)
        assert found is not None, f"{role}:{rank} does not live"
        return found

    @property
    def generation(self) -> int:
        """The generation of the role."""
        return self.state.roles[self.role].generation

    def victim_is_named(self, *, inferred: bool) -> bool:
        """Return True if a failure is that of the rank that has the fault, as the inferred cause of others or not."""
        failures = self.state.failures
        return any(
            (f.worker.role, f.worker.rank, f.inferred) == (self.role, self.rank, inferred) for f in failures
        )

    def seen(self) -> dict[tuple[str, int], int]:
        """The incarnation of each rank."""
        roles = self.state.roles.values()
        return {(role.name, worker.rank): worker.incarnation for role in roles for worker in role.workers}
