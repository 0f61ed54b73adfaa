"""The events that the master's state machine handles, and the commands that it returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unirun.collocation.graph import show_ranks
from unirun.failover.state import Verdict
from unirun.values import Value
from unirun.wire.messages import (
    Drain,
    Grow,
    Message,
    Offer,
    OpenStore,
    PassOn,
    Reserve,
    Shutdown,
    StartRole,
    Stop,
    StopWorkers,
    View,
)
from unirun.wire.reports import (
    FromWorker,
    Join,
    Notice,
    Placed,
    SpawnerReady,
    StoreEnded,
    StoreOpened,
    ViewWanted,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)


class AgentLost(Value):
    """The stream of a node's agent has ended."""

    node: str
    reason: str


class LossesDue(Value):
    """The time in which lost agents are gathered into one decision is over."""


class Arrived(Value):
    """A node that wants to join the running job has bound its endpoints."""

    offer: Offer


class GrowthDue(Value):
    """The time in which nodes that have come are gathered into one decision is over."""


class OwnerLost(Value):
    """The CLI that the job belongs to has died."""


class JoinTimedOut(Value):
    """The time in which every node had to join is over."""


class RejoinTimedOut(Value):
    """The time in which every node had to join a master that has come in another's place is over."""


class StartDue(Value):
    """The back-off of a program that has ended is over."""


class ViewDue(Value):
    """The time in which changes are gathered into one view is over."""


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
    | Drain
    | Grow
    | Arrived
    | GrowthDue
    | AgentLost
    | LossesDue
    | OwnerLost
    | JoinTimedOut
    | RejoinTimedOut
    | Placed
    | StartDue
    | ViewDue
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


class Finish(Value):
    """The job is over: tell the agents and the watchers, and exit with the verdict's code."""

    verdict: Verdict


class KeepMetrics(Value):
    """Append the metrics of a worker to the job's metrics."""

    role: str
    rank: int
    time: float
    values: Mapping[str, float]


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
        case PassOn(signum):
            return (f"{node} passes signal {signum} on to its workers",)
        case Shutdown():
            return (f"{node} ends its workers and leaves",)
    return None
