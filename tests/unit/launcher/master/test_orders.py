"""The actions and news that a step permits follow from the states before and after it, in every history."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.job import KILL, TERM
from tests.unit.failover.random_walk import RandomWalk
from unirun.failover.draft import (
    VIEW_DELAY,
    After,
    AgentLost,
    Command,
    Due,
    Event,
    Finish,
    KeepMetrics,
    Record,
    ToAgent,
    ToWatchers,
)
from unirun.failover.state import JOB_ENDS, ROLE_WORKS, Exit, JobState, RoleState, WorkerPhase, WorkerState
from unirun.wire.messages import (
    ExitAck,
    RoleChanged,
    RoleView,
    StartRole,
    StartWorker,
    Stop,
    StopWorkers,
    View,
    WorkerOutput,
    WorkerView,
)
from unirun.wire.reports import (
    FromWorker,
    GroupFormed,
    Join,
    Metrics,
    Notice,
    OpenStore,
    StoreEnded,
    WorkerExited,
    WorkerStarted,
)

Who = tuple[str, int, int]
WORDS = {
    WorkerPhase.WAITING: "starting",
    WorkerPhase.STARTING: "starting",
    WorkerPhase.ALIVE: "starting",
    WorkerPhase.RUNNING: "running",
    WorkerPhase.SERVING: "serving",
}


KINDS = {
    *("join", "formed", "store", "stop", "agent_lost", "notice", "running", "role", "restart"),
    *(
        "start",
        "exit",
        "failure",
        "cause",
        "started",
        "decision",
        "affected",
        "move",
        "stopping",
        "end",
        "taint",
    ),
}
"""The names of the events of the log, for readers."""


class Step:
    """One step: the states around it, and its commands by kind."""

    def __init__(self, before: JobState, event: Event, after: JobState, commands: list[Command]) -> None:
        self.before, self.event, self.after, self.commands = before, event, after, commands
        self.fresh = ordered(after) - ordered(before)
        self.orders = [(c.node, c.message) for c in commands if isinstance(c, ToAgent)]
        self.told = [c.message for c in commands if isinstance(c, ToWatchers)]
        self.records = [(c.kind, c.text) for c in commands if isinstance(c, Record)]

    def check(self) -> None:
        """Every command that is due, and no other."""
        self.check_starts()
        self.check_stores()
        self.check_stops()
        self.check_ends()
        self.check_views()
        self.check_watchers()
        assert self.due_records() <= {*self.records}
        assert {kind for kind, _ in self.records} <= KINDS

    def due_records(self) -> set[tuple[str, str]]:
        """The records that the log of events must have of this step."""
        due: set[tuple[str, str]] = set()
        match self.event:
            case Join(node, pid):
                due.add(("join", f"{node} joined (pid {pid})"))
            case FromWorker((name, rank, _), GroupFormed(generation)):
                if generation > self.before.roles[name].workers[rank].generation:
                    due.add(("formed", f"{name}:{rank} is in generation {generation}"))
            case StoreEnded(name, generation, _, reason):
                due.add(("store", f"the store of role {name}, generation {generation}: {reason}"))
            case Stop(_, reason):
                due.add(("stop", reason))
            case AgentLost(node, reason):
                if not self.before.given_up(node):
                    due.add(("agent_lost", f"{node}: {reason}"))
            case WorkerStarted((name, rank, incarnation) as worker, pid):
                known = self.before.roles[name].workers[rank]
                if incarnation and known.live and known.incarnation == incarnation:
                    due.add(("started", f"{worker} has process {pid}"))
            case Notice(source, text):
                due.add(("notice", f"{source}: {text}"))
        new = (
            self.after.forgotten
            + len(self.after.failures)
            - self.before.forgotten
            - len(self.before.failures)
        )
        assert new == sum(kind == "failure" for kind, _ in self.records)
        for name, role in self.after.roles.items():
            old = self.before.roles[name].phase
            if role.phase == "running" and old != "running":
                due.add(("running", f"role {name}: every rank runs"))
            if role.phase == "succeeded" and old != "succeeded":
                due.add(("role", f"role {name} succeeded"))
            if old == "restarting" and role.phase == "starting":
                due.add(("restart", f"role {name} starts as generation {role.generation}"))
            fresh = [f"{name}:{rank}" for each, rank, _ in self.fresh if each == name]
            if old == role.phase == "reforming" and fresh:
                text = f"{', '.join(sorted(fresh))} joins generation {role.generation} of role {name}"
                due.add(("restart", text))
        return due

    def check_starts(self) -> None:
        """Check that each rank that is to have a process now and had none is ordered, once, where its place is."""
        members: Counter[Who] = Counter()
        for node, order in self.orders:
            if isinstance(order, StartRole):
                assert order == self.start(node, order.role)
                members.update((order.role, m.rank, m.incarnation) for m in order.members)
        assert members == Counter(self.fresh)
        for name, rank, _ in self.fresh:
            worker, place = self.after.roles[name].workers[rank], self.after.placement.of_role(name)[rank]
            assert (worker.phase, worker.node, worker.own) == (WorkerPhase.STARTING, place.node, place.own)
            assert worker.generation == self.after.roles[name].opened

    def start(self, node: str, name: str) -> StartRole:
        """The order for `node`."""
        role, places = self.after.roles[name], self.after.placement.of_role(name)
        nodes = list(dict.fromkeys(place.node for place in places))
        here = [place for place in places if place.node == node]
        members = [
            StartWorker(p.rank, p.local_rank, role.workers[p.rank].incarnation, p.devices, p.cpus, p.share)
            for p in here
            if (name, p.rank, role.workers[p.rank].incarnation) in self.fresh
        ]
        return StartRole(
            role=name,
            generation=role.opened,
            restarts=role.restarts,
            world_size=len(places),
            local_world_size=len(here),
            group_rank=nodes.index(node),
            group_world_size=len(nodes),
            endpoint=self.after.agents[nodes[0]].endpoints[name],
            members=tuple(members),
            mask=self.after.placement.masks.get(name, ""),
        )

    def check_stores(self) -> None:
        """The store of a generation is asked of the node of rank 0."""
        asked = {}
        for node, order in self.orders:
            if isinstance(order, OpenStore):
                asked[order.role] = order.generation
                assert node == self.after.placement.of_role(order.role)[0].node
                assert order.generation == self.after.roles[order.role].generation
        for name, role in self.after.roles.items():
            if role.generation > self.before.roles[name].generation:
                assert name in asked, f"nobody serves generation {role.generation} of {name}"

    def check_stops(self) -> None:
        """Of a role that ends, or starts again, everybody who lives is told, where he is; nobody else."""
        stop = self.event if isinstance(self.event, Stop) else None
        signum, grace = TERM, self.after.spec.shutdown_timeout
        if stop is not None and self.before.asked_to_stop and self.before.phase == "stopping":
            signum, grace = KILL, 0.0
        elif stop is not None:
            signum, grace = stop.signal, grace if stop.grace is None else stop.grace
        stopped: Counter[tuple[str, str, int]] = Counter()
        for node, order in self.orders:
            if isinstance(order, StopWorkers):
                assert (order.signal, order.grace) == (signum, grace)
                stopped.update((order.role, node, rank) for rank in order.ranks)
        wanted: set[tuple[str, str, int]] = set()
        for name, role in self.after.roles.items():
            ends = role.phase not in ROLE_WORKS and self.before.roles[name].phase in ROLE_WORKS
            again = self.after.phase == "stopping" and self.before.phase != "stopping"
            if ends or again or (signum == KILL and stop is not None):
                wanted |= {(name, worker.node, worker.rank) for worker in role.live}
        leaves = isinstance(self.event, WorkerExited) and self.event.cause == "leaving"
        assert set(stopped) == wanted or stop is not None or leaves, f"{stopped} of {wanted}"
        assert all(count == 1 for count in stopped.values())

    def check_ends(self) -> None:
        """An end is told of, and its agent may forget it; at the job's end its verdict is carried out."""
        event = self.event
        if isinstance(event, WorkerExited) and event.cause != "leaving":
            known = self.before.roles[event.worker.role].workers[event.worker.rank]
            assert (known.node, ExitAck(event.worker)) in self.orders
            end = Exit(event.code, event.signal)
            note = f", {event.note}" if event.note else ""
            if known.live and known.incarnation == event.worker.incarnation:
                ends = {end, replace(end, early=event.code == 0)}
                told = {("exit", f"{event.worker} ended: {each}{note}") for each in ends}
                assert told & {*self.records}
        over = self.after.phase in JOB_ENDS
        verdicts = [command.verdict for command in self.commands if isinstance(command, Finish)]
        assert verdicts == ([self.after.verdict] if over else [])
        verdict = self.after.verdict
        if over:
            assert verdict is not None
            assert self.records[-1] == (
                "end",
                f"{verdict.phase}: {verdict.reason} (exit code {verdict.code})",
            )
        if verdict is not None and self.before.verdict is None:
            assert ("stopping", verdict.reason) in self.records

    def check_views(self) -> None:
        """Check that the news that workers may have of each other is told to all of them, now or in a moment."""
        views = {node: order for node, order in self.orders if isinstance(order, View)}
        nodes, true = self.after.agents.keys(), view_of(self.after)
        assert views.keys() <= nodes
        later = [c for c in self.commands if isinstance(c, After) and c.event == Due.VIEW]
        if self.after.view_due:
            assert later == [After(VIEW_DELAY, Due.VIEW)] or (self.before.view_due and later == [])
            return
        for told in views.values():
            assert known_of(told) == known_of(true)
            # What a lost node means for its roles is decided after its ranks were told to be lost.
            assert told.roles == true.roles or isinstance(self.event, AgentLost)
        if self.before.agents.keys() == nodes and self.after.phase not in JOB_ENDS and not self.after.away:
            same = known_of(view_of(self.before)) == known_of(true)
            assert same or views.keys() == nodes, "not everybody is told"

    def check_watchers(self) -> None:
        """Check that the watchers of the job are told how far roles are, and of each decision."""
        for name, role in self.after.roles.items():
            told = [m for m in self.told if isinstance(m, RoleChanged) and m.role == name]
            now, old = progress(role), progress(self.before.roles[name])
            changed = replace(now, total=0) != replace(old, total=0)
            assert told[-1:] == ([now] if told or changed else []), name
        if isinstance(self.event, WorkerStarted):
            worker = self.event.worker
            places = self.after.placement.of_role(worker.role)
            local = places[worker.rank].local_rank if worker.rank < len(places) else 0
            node = self.after.roles[worker.role].workers[worker.rank].node
            assert WorkerOutput(worker, local, node) in self.told
        if isinstance(self.event, Notice):
            assert self.told == [self.event]
        if isinstance(self.event, FromWorker) and isinstance(self.event.message, Metrics):
            metrics = [c for c in self.commands if isinstance(c, KeepMetrics)]
            who, figures = self.event.worker, self.event.message
            assert metrics == [KeepMetrics(who.role, who.rank, figures.time, figures.values)]
        decided = {text for kind, text in self.records if kind == "decision"}
        notices = {message.text for message in self.told if isinstance(message, Notice)}
        if self.after.verdict is None:
            assert decided <= notices


def ordered(state: JobState) -> set[Who]:
    """The ranks that were ever ordered, as far as the state has it."""
    return {
        (role.name, worker.rank, worker.incarnation)
        for role in state.roles.values()
        for worker in role.workers
        if worker.phase is not WorkerPhase.WAITING
    }


def progress(role: RoleState) -> RoleChanged:
    return RoleChanged(role.name, role.phase.value, role.generation, role.running, len(role.workers))


def seen(worker: WorkerState) -> str:
    if worker.phase is WorkerPhase.EXITED:
        return "ended" if worker.exit == Exit(code=0) else "lost"
    return WORDS[worker.phase]


def view_of(state: JobState) -> View:
    roles = []
    for name, role in state.roles.items():
        agent = state.agents.get(state.placement.of_role(name)[0].node)
        workers = tuple(WorkerView(w.rank, w.incarnation, seen(w), dict(w.addresses)) for w in role.workers)
        endpoint = agent.endpoints[name] if agent else ""
        roles.append(RoleView(name, len(workers), role.opened, endpoint, role.phase.value, workers))
    return View(tuple(roles))


def known_of(view: View) -> object:
    """The facts that workers act on: which of them are there, and in which generation."""
    return [(role.name, role.generation, role.workers) for role in view.roles]


@examples(40)
@given(st.integers(0, 2**32))
def test_each_step_orders_and_tells_what_follows_from_it_and_nothing_else(seed: int) -> None:
    walk = RandomWalk(seed)
    before = walk.job.state
    for event, after in walk.steps(120):
        Step(before, event, after, walk.job.commands).check()
        before = after
