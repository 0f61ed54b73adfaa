"""A step of the master: the events that come in, the draft of the job that they change, the commands that go out."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import field, to_builtins
from msgspec.structs import replace

from unirun.errors import IllegalTransition
from unirun.failover.diagnosis import record_of
from unirun.failover.phases import PhaseEvent, is_allowed
from unirun.failover.state import (
    Failure,
    JobState,
    RoleState,
    SentView,
    Verdict,
    WorkerPhase,
    WorkerState,
    brief,
)
from unirun.spec.job import JobSpec
from unirun.values import RankAddress, Value, WorkerId, show_ranks
from unirun.wire.messages import (
    FIRST,
    Drain,
    Grow,
    Inject,
    Offer,
    PassOn,
    Reserve,
    RoleBrief,
    RoleChanged,
    RoleView,
    Shutdown,
    StartRole,
    Stop,
    StopWorkers,
    View,
    Welcome,
    WorkerOutput,
    WorkerView,
    whole,
)
from unirun.wire.reports import (
    FromWorker,
    Join,
    Message,
    Notice,
    OpenStore,
    Placed,
    Sick,
    SpawnerReady,
    StoreEnded,
    StoreOpened,
    ViewWanted,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

# The views of the job that workers and visitors get: the view of all roles, or its changes since the last one, and the
# part of the spec that concerns them.


def whole_view(state: JobState, number: int) -> View:
    """The whole view. Workers that are as at the start of the job are left out.

    The generation of a role is that whose store is there.
    """
    roles = (
        _role_view(role, endpoint(state, name), [worker for worker in role.workers if _seen(worker) != FIRST])
        for name, role in state.roles.items()
    )
    return View(tuple(roles), number)


def news_of(state: JobState, told: SentView) -> tuple[RoleView, ...]:
    """The roles that have changed since the view `told`, each with the workers that have changed."""
    endpoints = endpoints_of(state)
    found = []
    for name, role in state.roles.items():
        before = told.roles[name]
        if before is role and told.endpoints[name] == endpoints[name]:
            continue
        pairs = role.workers.since(before.workers)
        changed = [now for was, now in pairs if was is None or _seen(was) != _seen(now)]
        if (
            changed
            or before.grows != role.grows
            or _head(before, told.endpoints[name]) != _head(role, endpoints[name])
        ):
            found.append(_role_view(role, endpoints[name], changed))
    return tuple(found)


def endpoints_of(state: JobState) -> Mapping[str, str]:
    """The address of the store of each role."""
    return {name: endpoint(state, name) for name in state.roles}


def endpoint(state: JobState, role: str) -> str:
    """The address of the role's store: at the node of its rank 0. Empty when that node is not there, and for a role
    of programs, which has none."""
    agent = state.agents.get(leader(state, role))
    return agent.endpoints.get(role, "") if agent else ""


def leader(state: JobState, role: str) -> str:
    """The node of the role's rank 0."""
    return state.placement.of_role(role)[0].node


def _role_view(role: RoleState, endpoint: str, workers: Iterable[WorkerState]) -> RoleView:
    return RoleView(
        role.name,
        *_head(role, endpoint),
        workers=tuple(WorkerView(worker.rank, *_seen(worker)) for worker in workers),
        grows=role.grows,
    )


def _head(role: RoleState, endpoint: str) -> tuple[int, int, str, str]:
    return len(role.workers), role.opened, endpoint, role.phase.value


def _seen(worker: WorkerState) -> tuple[int, str, dict[str, str], RankAddress | None]:
    return worker.incarnation, _phase(worker), dict(worker.addresses), worker.place


def _phase(worker: WorkerState) -> str:
    match worker.phase:
        case WorkerPhase.RUNNING | WorkerPhase.SERVING:
            return worker.phase.value
        case WorkerPhase.EXITED:
            return "ended" if worker.exit is not None and worker.exit.ok else "lost"
        case _:
            return "starting"


def welcome(view: View, spec: JobSpec) -> Welcome:
    """The answer to a worker's `Hello`, and to a visitor."""
    briefs = (
        RoleBrief(
            role.name,
            role.entry.kind,
            role.entry.target,
            role.count,
            role.per_node,
            role.group or 1,
            role.most,
        )
        for role in spec.roles
    )
    return Welcome(
        view=whole(view),
        config=json.dumps(dict(spec.config)),
        name=spec.name,
        roles=tuple(briefs),
        collocations=spec.collocations,
        call_timeout=spec.call_timeout,
        transport=spec.transport,
        channels={c.name: (c.publisher, *c.receivers) for c in spec.channels},
    )


def addresses_of(view: View, spec: JobSpec) -> dict[str, list[dict[str, Any]]]:
    """The addresses in `view`, by role in rank order, for the file that programs read. A rank is `ready` when its probe
    says so; without one, when it runs."""
    roles = {role.name: role for role in spec.roles if role.ports}
    return {
        role.name: [
            {
                "rank": worker.rank,
                "incarnation": worker.incarnation,
                "host": worker.place.host,
                "ports": dict(zip(roles[role.name].ports, worker.place.ports, strict=True)),
                "addr": worker.place.addr(),
                "ready": worker.phase == ("serving" if roles[role.name].ready else "running"),
            }
            for worker in role.workers
            if worker.place is not None and roles[role.name].head(worker.rank) == worker.rank
        ]
        for role in view.roles
        if role.name in roles
    }


# The events that the master's state machine handles, and the commands that it returns.


class AgentLost(Value):
    """The stream of a node's agent has ended."""

    node: str
    reason: str


class Due(StrEnum):
    """A time that is over: the master has asked for it with `After`."""

    LOSSES = "lost agents were gathered for one decision"
    GROWTH = "nodes that have come were gathered for one decision"
    VIEW = "changes were gathered for one view"
    START = "the back-off of a program is over"
    JOIN = "every node had to join by now"
    REJOIN = "every node had to join this master, which has come in another's place, by now"


class Arrived(Value):
    """A node that wants to join the running job has bound its endpoints."""

    offer: Offer


class Absent(Value):
    """A node that has come into the running job had to join by now."""

    node: str


class Straggles(Value):
    """A rank makes the others wait, and its role wants such ranks elsewhere. `why` is for people."""

    worker: WorkerId
    why: str


class CutOff(Value):
    """Connections of `node` to `other` get no answer, though the master hears both."""

    node: str
    other: str


class OwnerLost(Value):
    """The CLI that the job belongs to has died."""


Event = (
    Join
    | SpawnerReady
    | ViewWanted
    | WorkerStarted
    | WorkerRunning
    | WorkerExited
    | FromWorker
    | StoreOpened
    | StoreEnded
    | Notice
    | Stop
    | PassOn
    | Inject
    | Drain
    | Grow
    | Arrived
    | Absent
    | AgentLost
    | Due
    | OwnerLost
    | Placed
    | Sick
    | Straggles
    | CutOff
)


class ToAgent(Value):
    """Send `message` to the agent of `node`. `cause` is the id of the event that it follows from."""

    node: str
    message: Message
    cause: str = ""


class ToAgents(Value):
    """Send `message` to the agents of all of these nodes."""

    nodes: Collection[str]
    message: Message


class ToWatchers(Value):
    """Send `message` to every CLI that follows the job."""

    message: Message


class ToVisitors(Value):
    """Send `view` to every process outside the job that calls its workers."""

    view: View


class ToGuest(Value):
    """Send `message` to a node that wants to join the job."""

    node: str
    message: Message


class Record(Value):
    """Write to the event log what happened or was decided (see `unirun.observe.status.LoggedEvent`)."""

    kind: str
    text: str
    id: str = ""
    cause: str = ""
    about: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


class Finish(Value):
    """The job is over: tell the agents and the watchers, and exit with the verdict's code."""

    verdict: Verdict


class KeepMetrics(Value):
    """Append the metrics of a worker to the job's metrics."""

    role: str
    rank: int
    time: float
    values: Mapping[str, float | None]


class After(Value):
    """Deliver `event` after `delay` seconds."""

    delay: float
    event: Event


Command = ToAgent | ToAgents | ToWatchers | ToVisitors | ToGuest | Record | Finish | KeepMetrics | After


def order_text(node: str, message: Message) -> tuple[str, ...] | None:
    """The text of an order to the agent of `node`, and the ranks that it is about; None if it is no order."""
    match message:
        case OpenStore(role, generation):
            return f"{node} serves the store of role {role}, generation {generation}", role
        case Reserve(role, ranks):
            who = f"{role}:{show_ranks(ranks)}"
            return f"{node} chooses the ports of {who}", who
        case StartRole(role=role, generation=generation, members=members):
            who = f"{role}:{show_ranks([member.rank for member in members])}"
            return f"{node} starts {who} in generation {generation}", who
        case StopWorkers(role, ranks, signum, grace):
            who = f"{role}:{show_ranks(ranks)}"
            return f"{node} ends {who} with signal {signum}, and SIGKILL after {grace:g} s", who
        case Inject(role, rank):
            who = f"{role}:{rank}"
            return f"{node} injects {message} into {who}", who
        case PassOn(signum):
            return (f"{node} passes signal {signum} on to its workers",)
        case Shutdown():
            return (f"{node} ends its workers and leaves",)
    return None


VIEW_DELAY, VIEW_DELAY_PER_AGENT = 0.1, 0.0002
"""Seconds in which changes are gathered into one view, unless a worker waits for it: at least, and for each agent."""

GROWTH_DELAY = 1.0
"""Seconds in which nodes that have come are gathered into one decision: roles that grow start again."""

NOT_STARTED = WorkerState(0, "")
"""The worker before the first one of a rank."""

CAUSES = frozenset(
    {
        "start",
        "ready",
        "exit",
        "agent_lost",
        "drain",
        "store",
        "stop",
        "inject",
        "decision",
        "restart",
        "stopping",
    }
)
"""The kinds of events that others follow from."""


class JobDraft:
    """The job as the functions of a step change it, and the commands that they ask for.

    Functions are given names and ranks, and read from the draft how these stand: a value that was read before a `put`
    may be out of date after it. `state` changes by `put` alone, which lets no phase change that
    `unirun.failover.phases` does not allow.

    `cause` is the id of the event that what comes next follows from. A role and the job keep the id of the event that
    has brought them into their phase: what their workers and agents say later follows from that.
    """

    def __init__(self, state: JobState, now: float) -> None:
        self._state = state
        self._replaced: dict[str, RoleState] = {}
        self.now = now
        self.commands: list[Command] = []
        self.cause = ""
        self._recorded = state.recorded

    @property
    def state(self) -> JobState:
        """The job as it is now."""
        return self._state

    def done(self) -> tuple[JobState, list[Command]]:
        """The state after this step, and what is to be done. Watchers are told of the roles that were put, where the
        phase, the generation or the number of running workers has changed."""
        for name, before in self._replaced.items():
            role = self._state.roles[name]
            same = before.phase is role.phase and before.generation == role.generation
            if not same or before.running != role.running:
                self.send(ToWatchers(role_changed(role)))
        return replace(self._state, recorded=self._recorded), self.commands

    def put(self, new: JobState | RoleState, event: PhaseEvent | None = None) -> None:
        """Replace the job, or one of its roles with its workers. Raises `IllegalTransition` if a phase changes for
        which no row of `unirun.failover.phases` has this `event`."""
        if isinstance(new, RoleState):
            before = self._state.roles[new.name]
            _check_role(before, new, event)
            self._put_role(before, new)
            return
        _check(self._state, new, event, "the job")
        if new.roles is not self._state.roles:
            for name, role in new.roles.items():
                _check_role(self._state.roles[name], role, event)
        self._state = new

    def put_worker(self, role: str, worker: WorkerState, event: PhaseEvent | None = None) -> None:
        """Replace one worker of `role`. As `put`, which has to look for the workers that have changed."""
        before = self._state.roles[role]
        _check(before.workers[worker.rank], worker, event, role, worker.rank)
        self._put_role(before, before.with_worker(worker))

    def _put_role(self, before: RoleState, role: RoleState) -> None:
        turned = before.phase is not role.phase or before.generation != role.generation
        if turned and self.cause:
            role = replace(role, cause=self.cause)
        self._replaced.setdefault(role.name, before)
        self._state = self._state.with_role(role)

    def send(self, *commands: Command) -> None:
        """Ask for `commands`, after those that were asked for before."""
        self.commands.extend(commands)

    def tell_now(self) -> None:
        """Send the changes since the last view to the agents and to visitors, and a whole view to the agents that have
        none it follows on.

        While nodes are away after a takeover, the state of their workers is not known, and no view is sent.
        """
        state = self.state
        if not state.agents or state.away:
            return
        told = state.told
        news = news_of(state, told) if told else ()
        number = told.number + bool(news) if told else 1
        uninformed = state.uninformed if told else state.agents.keys()
        if told and news:
            changes = View(news, number, told.number)
            self.send(ToVisitors(changes))
            if others := tuple(node for node in state.agents if node not in uninformed):
                self.send(ToAgents(others, changes))
        if uninformed and (some := tuple(node for node in state.agents if node in uninformed)):
            view = whole_view(state, number)
            self.send(ToAgents(some, view))
            if not told:
                self.send(ToVisitors(view))
        told = SentView(number, state.roles, endpoints_of(state))
        self.put(replace(state, view_due=False, told=told, uninformed=frozenset()))

    def tell_soon(self) -> None:
        """Send the changes as `tell_now` does, after a delay in which more of them are gathered."""
        if not self.state.view_due:
            self.put(replace(self.state, view_due=True))
            delay = max(VIEW_DELAY, VIEW_DELAY_PER_AGENT * len(self.state.agents))
            self.send(After(delay, Due.VIEW))

    def grow_soon(self) -> None:
        """Decide about the growth of roles if nodes have come, after a delay in which more may come."""
        if self.state.newcomers or any(role.grows for role in self.state.roles.values()):
            self.send(After(GROWTH_DELAY, Due.GROWTH))

    def stop(
        self,
        role: str,
        signum: int,
        grace: float,
        after: float = 0.0,
        *,
        ranks: Collection[int] | None = None,
    ) -> None:
        """Order the end of all live workers of `role`, or of those of these `ranks`, in `after` seconds."""
        found: dict[str, list[int]] = {}
        for worker in self.role(role).live:
            if ranks is None or worker.rank in ranks:
                found.setdefault(worker.node, []).append(worker.rank)
        for node, there in found.items():
            self.order(node, StopWorkers(role, tuple(there), int(signum), grace, after))

    def order(self, node: str, message: Message) -> None:
        """Ask an agent for something that follows from the present cause."""
        self.send(ToAgent(node, message, self.cause))

    def role(self, name: str) -> RoleState:
        """The role called `name`."""
        if name not in self._state.roles:
            raise IllegalTransition(f"there is no role {name}")
        return self._state.roles[name]

    def find(self, who: WorkerId) -> WorkerState | None:
        """The live worker that is meant, or None when the message is about one that has ended."""
        role, rank, incarnation = who
        found = self.role(role)
        if not 0 <= rank < len(found.workers):
            spec = self._state.role_spec(role)
            if not 0 <= rank < max(spec.count, spec.most or 0):
                raise IllegalTransition(f"there is no worker {who}")
            # The role has become smaller.
            return None
        worker = found.workers[rank]
        if incarnation > worker.incarnation:
            raise IllegalTransition(f"{who} has no incarnation {incarnation} yet")
        return worker if incarnation == worker.incarnation and worker.live else None

    def fail(self, *failures: Failure) -> None:
        """Remember failures, and write their records to the event log.

        One about which nothing is decided any more has no traceback there: in a large role there may be thousands.
        """
        noticed = [brief(replace(each, noticed=self.now)) for each in failures]
        self.put(self.state.with_failures(*noticed))
        for each in noticed:
            found = record_of(each)
            if not each.decision:
                found = replace(found, traceback="", tail="")
            who = f"{found.role}:{found.rank}"
            text = f"{who} on {found.node} failed: {found.cause}"
            self.record("failure", text, who, found.node, details={"failure": to_builtins(found)})

    def record(self, kind: str, text: str, *about: str, details: Mapping[str, Any] | None = None) -> None:
        """Write an event about these workers, roles and nodes to the event log."""
        self._recorded += 1
        event = f"{self.state.epoch}-{self._recorded}"
        self.send(Record(kind, text, event, self.cause, about, details or {}))
        if kind in CAUSES:
            self.cause = event


Phased = TypeVar("Phased", JobState, RoleState, WorkerState)
"""One that has a phase."""


def _check_role(before: RoleState, role: RoleState, event: PhaseEvent | None) -> None:
    _check(before, role, event, role.name)
    if role.workers is not before.workers:
        for was, worker in role.workers.since(before.workers):
            _check(was or NOT_STARTED, worker, event, role.name, worker.rank)


def _check(before: Phased, new: Phased, event: PhaseEvent | None, name: str, *rank: int) -> None:
    """Raise `IllegalTransition` if the phase of `name`, or of one of its ranks, must not change so."""
    if new.phase is not before.phase and not is_allowed(before.phase, event, new.phase):
        who = ":".join(map(str, (name, *rank)))
        raise IllegalTransition(
            f"{who} is {before.phase}, and must not become {new.phase}: {event or 'for no reason'}"
        )


def role_changed(role: RoleState) -> RoleChanged:
    """The message about a role for the CLIs that follow the job."""
    return RoleChanged(role.name, role.phase.value, role.generation, role.running, len(role.workers))


def is_member(state: JobState, role: RoleState, worker: WorkerState) -> bool:
    """Return True if `worker` is not probed: the first rank of its group says when all are ready."""
    return role.probed and state.role_spec(role.name).head(worker.rank) != worker.rank


def output_of(state: JobState, role: str, rank: int) -> WorkerOutput:
    """The message about a worker that has a process, for the CLIs that follow the job."""
    places = state.placement.of_role(role)
    # A role that becomes smaller has workers without a place until they have ended.
    local_rank = places[rank].local_rank if rank < len(places) else 0
    worker = state.roles[role].workers[rank]
    quiet = worker.phase is WorkerPhase.SERVING and state.role_spec(role).service
    return WorkerOutput(WorkerId(role, rank, worker.incarnation), local_rank, worker.node, quiet)
