"""What the master's state machine is told, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unirun.master.state import Verdict
from unirun.wire.messages import Message, Stop
from unirun.wire.reports import (
    Join,
    Notice,
    Sample,
    SpawnerReady,
    WorkerCalls,
    WorkerExited,
    WorkerFormed,
    WorkerMetrics,
    WorkerRunning,
    WorkerServing,
    WorkerStarted,
)
from unirun.wire.spawning import StoreEnded, StoreOpened


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The stream of a node's agent has ended."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The CLI that the job belongs to has died."""


@dataclass(frozen=True, slots=True)
class JoinTimedOut:
    """The time in which every node had to join is over."""


@dataclass(frozen=True, slots=True)
class RejoinTimedOut:
    """The time in which every node had to join a master that has come in another's place is over."""


@dataclass(frozen=True, slots=True)
class ViewDue:
    """News for the workers has waited long enough."""


Event = (
    Join
    | SpawnerReady
    | WorkerStarted
    | WorkerRunning
    | WorkerServing
    | WorkerFormed
    | WorkerMetrics
    | WorkerCalls
    | WorkerExited
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


@dataclass(frozen=True, slots=True)
class ToAgent:
    """Send `message` to the agent of `node`."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True)
class ToWatchers:
    """Send `message` to every CLI that follows the job."""

    message: Message


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event: what happened, what was decided, and why."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: tell the agents and who follows it, and leave with the verdict's code."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class KeepMetrics:
    """Append what a worker has measured to the job's metrics."""

    role: str
    rank: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class After:
    """Come back with `event` after `delay` seconds."""

    delay: float
    event: Event


Command = ToAgent | ToWatchers | Record | Finish | KeepMetrics | After
