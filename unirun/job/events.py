"""What the master's state machine is told, and what it asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unirun.job.state import Verdict
from unirun.values import Value
from unirun.wire.messages import Message, Stop
from unirun.wire.reports import (
    FromWorker,
    Join,
    Notice,
    Sample,
    SpawnerReady,
    ViewWanted,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)
from unirun.wire.spawning import StoreEnded, StoreOpened


class AgentLost(Value):
    """The stream of a node's agent has ended."""

    node: str
    reason: str


class OwnerLost(Value):
    """The CLI that the job belongs to has died."""


class JoinTimedOut(Value):
    """The time in which every node had to join is over."""


class RejoinTimedOut(Value):
    """The time in which every node had to join a master that has come in another's place is over."""


class ViewDue(Value):
    """News for the workers has waited long enough."""


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
    | Sample
    | Stop
    | AgentLost
    | OwnerLost
    | JoinTimedOut
    | RejoinTimedOut
    | ViewDue
)


class ToAgent(Value):
    """Send `message` to the agent of `node`."""

    node: str
    message: Message


class ToAgents(Value):
    """Send `message` to the agents of all of these nodes."""

    nodes: Collection[str]
    message: Message


class ToWatchers(Value):
    """Send `message` to every CLI that follows the job."""

    message: Message


class Record(Value):
    """Write an event: what happened, what was decided, and why."""

    kind: str
    text: str


class Finish(Value):
    """The job is over: tell the agents and who follows it, and leave with the verdict's code."""

    verdict: Verdict


class KeepMetrics(Value):
    """Append what a worker has measured to the job's metrics."""

    role: str
    rank: int
    time: float
    values: Mapping[str, float]


class After(Value):
    """Come back with `event` after `delay` seconds."""

    delay: float
    event: Event


Command = ToAgent | ToAgents | ToWatchers | Record | Finish | KeepMetrics | After
