"""What the master's state machine is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from unirun.wire.messages import (
    Join,
    Message,
    Notice,
    Sample,
    SpawnerReady,
    Stop,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)


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


Event = (
    Join
    | SpawnerReady
    | WorkerStarted
    | WorkerRunning
    | WorkerExited
    | Notice
    | Sample
    | Stop
    | AgentLost
    | OwnerLost
    | JoinTimedOut
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
    """The job is over: tell the agents, write the end, leave with `code`."""

    code: int
    report: str
    error_file: str = ""


Command = ToAgent | ToWatchers | Record | Finish
