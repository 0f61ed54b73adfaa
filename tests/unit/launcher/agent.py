"""An agent under test: apply events, and inspect the commands."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import convert, to_builtins

from unirun.launcher.core import step
from unirun.launcher.environment import SpawnerKey
from unirun.launcher.events import (
    AgentState,
    CallLater,
    Command,
    Event,
    FromSpawner,
    Instruction,
    Launch,
    LinkMessage,
    Order,
    RendezvousStore,
    SignalSpawner,
    ToLink,
    ToLinks,
    ToMaster,
    ToSpawner,
    Worker,
)
from unirun.values import WorkerId
from unirun.wire.frames import decode, encode
from unirun.wire.messages import Hello
from unirun.wire.reports import Forked, FromWorker, Kill, Message, OpenStore, Spawn, SpawnerReady

T = TypeVar("T")

TERM, KILL, INT = int(signal.SIGTERM), int(signal.SIGKILL), int(signal.SIGINT)


TORCH: SpawnerKey = (("OMP_NUM_THREADS", "1"),)


OTHER: SpawnerKey = (("OMP_NUM_THREADS", "2"),)


def spawn(number: int, role: str, rank: int, kind: str = "script") -> Spawn:
    return Spawn(number, f"{role}:{rank}", kind, "a.py", (), False, {}, "/", "/logs", f"{role}/{rank}/0")


def worker(
    number: int, role: str, rank: int, *, key: SpawnerKey = TORCH, incarnation: int = 0, kind: str = "script"
) -> Worker:
    return Worker(number, WorkerId(role, rank, incarnation), key, spawn(number, role, rank, kind))


def launch(
    role: str = "actor", count: int = 2, *, first: int = 1, incarnation: int = 0, **more: object
) -> Launch:
    workers = tuple(worker(first + r, role, r, incarnation=incarnation, **more) for r in range(count))  # type: ignore[arg-type]
    return Launch(workers)


def store(role: str = "actor", generation: int = 0, key: SpawnerKey = TORCH) -> RendezvousStore:
    return RendezvousStore(key, OpenStore(role, generation, 9))


def check_step(before: AgentState, after: AgentState, commands: Sequence[Command]) -> None:
    """Raise when a command is for a worker or a spawner that is not there, or a field has another type than it should:
    the peer that gets such a message refuses it."""
    for changed in after.workers.values():
        if before.workers.get(changed.id) is not changed:
            convert(to_builtins(changed), Worker)
    for command in commands:
        match command:
            case ToMaster(message) | ToLinks(message) | ToLink(_, message) | ToSpawner(_, message):
                assert decode(encode(message)) == message
            case CallLater(delay, event):
                assert delay >= 0.0
                convert(to_builtins(event), type(event))
            case _:
                convert(to_builtins(command), type(command))
        if isinstance(command, ToLink):
            assert command.id in after.workers, f"{command} is for a worker that is not there"
        elif isinstance(command, ToSpawner | SignalSpawner):
            assert command.key in after.spawners, f"{command} is for a spawner that is not there"
        if isinstance(command, ToSpawner) and isinstance(command.message, Kill):
            assert command.message.id in after.workers, f"{command} is for a worker that is not there"


class Agent:
    """An agent under test."""

    def __init__(self, **state: object) -> None:
        self.state = AgentState("n0", **state)  # type: ignore[arg-type]
        self.commands: list[Command] = []

    def on(self, *events: Event | Instruction) -> Agent:
        """Apply events; instructions of a master get the term 1."""
        self.commands = []
        for event in events:
            event = Order(1, event) if isinstance(event, Instruction) else event
            before = self.state
            self.state, commands = step(before, event)
            check_step(before, self.state, commands)
            self.commands += commands
        return self

    def spawner(self, *messages: Message, key: SpawnerKey = TORCH) -> Agent:
        return self.on(*(FromSpawner(key, message) for message in messages))

    def alive(self, count: int = 2) -> Agent:
        """Set up workers of role actor, with processes, in the user's code."""
        self.on(store(), launch(count=count)).spawner(SpawnerReady(1.0))
        for number in range(1, count + 1):
            self.spawner(Forked(number, 100 + number))
            self.on(LinkMessage(number, Hello(WorkerId("actor", number - 1, 0))))
        return self

    def told(self, kind: type) -> list[Any]:
        """Messages of this kind to the master, forwarded ones included."""
        messages = [c.message for c in self.commands if isinstance(c, ToMaster)]
        return [m for m in messages if isinstance(m.message if isinstance(m, FromWorker) else m, kind)]

    def sent(self, kind: type[T], key: SpawnerKey = TORCH) -> list[T]:
        chosen = [c for c in self.commands if isinstance(c, ToSpawner) and c.key == key]
        return [c.message for c in chosen if isinstance(c.message, kind)]

    def has(self, kind: type) -> bool:
        return any(isinstance(c, kind) for c in self.commands)
