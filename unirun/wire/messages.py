"""Every message that crosses a stream, as a frozen value, and its form in JSON.

A message travels as ``{"type": <class name>, …fields}``. `decode` checks each field against its
annotation, so what a state machine receives has the types that it was written for.

============  =======================================================================
agent→master  Join SpawnerReady WorkerStarted WorkerRunning WorkerExited Notice Sample
master→agent  StartRole StopWorkers View Shutdown
worker→agent  Hello WorkerError
agent→worker  Welcome View
CLI→master    Attach Stop
master→CLI    WorkerStarted RoleChanged Notice Ended
agent→spawner Spawn OpenStore Kill
spawner→agent Preloaded Forked Reaped SpawnFailed StoreEnded Notice
============  =======================================================================
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from unirun.errors import FrameError


@dataclass(frozen=True, slots=True)
class Join:
    """An agent is there. `endpoints`: for each role, the ``addr:port`` that it holds for its store."""

    node: str
    pid: int
    host: str
    endpoints: dict[str, str]


@dataclass(frozen=True, slots=True)
class SpawnerReady:
    """A spawner can fork workers; it took `seconds` to import torch."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker has a process."""

    node: str
    role: str
    rank: int
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerRunning:
    """A worker is set up and enters the user's code."""

    role: str
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerError:
    """An exception that ended a worker: its last line, its traceback, and when (seconds since the epoch)."""

    message: str
    traceback: str
    time: float


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker has ended, at `time` in seconds since the epoch, by `code` or by `signal`.

    `asked` is the last signal that the agent had sent it, None when it ended by itself. `note` says what the
    agent knows besides: that the kernel was out of memory, or that the worker never ran. `tail` holds the last
    lines of its stderr when it failed without an exception.
    """

    role: str
    rank: int
    incarnation: int
    time: float
    code: int | None
    signal: int | None
    asked: int | None = None
    error: WorkerError | None = None
    note: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should know; no decision hangs on it. `source` is ``role:rank`` or a node."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory (resident, bytes) and processor time (seconds) of the workers, by ``role:rank``."""

    node: str
    memory: dict[str, int]
    cpu: dict[str, float]


@dataclass(frozen=True, slots=True)
class Member:
    """One worker to be started. `devices` are the indices that its mask shows, None to leave the mask."""

    rank: int
    local_rank: int
    incarnation: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StartRole:
    """Start these workers of a role, as one generation of its process group."""

    role: str
    generation: int
    restarts: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    endpoint: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End these ranks: `signal` first, SIGKILL to the whole process group `grace` seconds later."""

    role: str
    ranks: tuple[int, ...]
    signal: int
    grace: float


@dataclass(frozen=True, slots=True)
class RoleView:
    """What every worker may know of a role."""

    name: str
    world_size: int
    generation: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class View:
    """All roles as they stand now."""

    roles: tuple[RoleView, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The job is over; the agent ends."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker says who it is. `running`: it enters the user's code now."""

    role: str
    rank: int
    incarnation: int
    pid: int
    running: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`: the roles as they stand, and the user's part of the spec."""

    view: View
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Attach:
    """A CLI wants to follow the job."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the job to end."""

    signal: int
    reason: str
    grace: float | None = None


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """How far a role is: `running` of `total` workers are in the user's code."""

    role: str
    phase: str
    generation: int
    running: int
    total: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended with `code`; `report` is for people, `error_file` the root cause's, if it left one."""

    code: int
    phase: str
    report: str
    error_file: str = ""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start one process. `id` is the agent's name for it; `kind` and `target` are those of the role's entry.

    `fresh`: in a new interpreter instead of a fork that keeps what the spawner imported. `env` is the whole
    environment. `stdout` and `stderr` are files to append to. `cpus`: the processors it may run on.
    """

    id: int
    title: str
    kind: str
    target: str
    args: tuple[str, ...]
    fresh: bool
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Serve a new, empty TCPStore for a generation of `role` on the inherited listening socket `fd`."""

    role: str
    fd: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Send `signal` to the whole process group of a process."""

    id: int
    signal: int


@dataclass(frozen=True, slots=True)
class Preloaded:
    """The spawner has imported what it should, in `seconds`, and can fork."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Forked:
    """The process exists."""

    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The process could not be made, at `time`; with id 0, the spawner itself cannot work."""

    id: int
    time: float
    reason: str


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """The store of `role` could not be opened, or has ended at `time`, though nobody asked for it."""

    role: str
    time: float
    reason: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """The process has ended at `time` (seconds since the epoch), and its group was sent SIGKILL."""

    id: int
    time: float
    code: int | None
    signal: int | None


Message = (
    Join
    | SpawnerReady
    | WorkerStarted
    | WorkerRunning
    | WorkerError
    | WorkerExited
    | Notice
    | Sample
    | StartRole
    | StopWorkers
    | View
    | Shutdown
    | Hello
    | Welcome
    | Attach
    | Stop
    | RoleChanged
    | Ended
    | Spawn
    | OpenStore
    | Kill
    | Preloaded
    | Forked
    | SpawnFailed
    | StoreEnded
    | Reaped
)

_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}
_FIELDS: dict[type[Any], dict[str, Any]] = {}


def encode(message: Message) -> dict[str, Any]:
    """Plain values for a frame."""
    return {"type": type(message).__name__, **dataclasses.asdict(message)}


def decode(payload: dict[str, Any]) -> Message:
    """The message that `payload` is. Raises `FrameError` for an unknown type or a wrong field."""
    fields = dict(payload)
    name = fields.pop("type", None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FrameError(f"unknown message {name!r}", "is the peer of another version?")
    return typing.cast(Message, _build(kind, fields, kind.__name__))


def _fields(kind: type[Any]) -> dict[str, Any]:
    if kind not in _FIELDS:
        _FIELDS[kind] = typing.get_type_hints(kind)
    return _FIELDS[kind]


def _build(kind: type[Any], fields: dict[str, Any], where: str) -> Any:
    hints = _fields(kind)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise FrameError(f"{where} has no field {sorted(unknown)[0]!r}")
    values = {name: _check(value, hints[name], f"{where}.{name}") for name, value in fields.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise FrameError(f"{where} is incomplete: {error}") from error


def _check(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` wants it (lists become tuples, objects become dataclasses)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (hint,) = (arg for arg in args if arg is not type(None))
        return _check(value, hint, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_check(item, args[0], where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _check(item, args[1], where) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type, hint), dict(value), where)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise FrameError(f"{where} is {value!r:.80}, expected {hint}")
