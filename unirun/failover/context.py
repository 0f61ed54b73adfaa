"""The job's context: its state as one text for a store, and back; and the commands that wait until it is written.

The text is JSON, compressed with zlib, in base64. Every decision writes the whole of it: `docs/store.md` has the sizes.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from msgspec import convert, to_builtins
from msgspec.json import Encoder
from msgspec.structs import replace

from unirun.errors import StoreRefused
from unirun.failover.draft import Command, ToAgent, ToAgents
from unirun.failover.state import NEVER, ROLE_WORKS, JobState, Ranks, RoleState, WorkerState
from unirun.wire.messages import Shutdown, StopWorkers

SCHEMA = 13

MAX_PLAIN_BYTES = 1 << 26
"""Bytes of the JSON. The largest jobs have some MB; without a limit, a small text in a shared store could fill the
memory of whoever reads it."""

COMPRESSION_LEVEL = 1
"""Of zlib: higher levels take three to five times as long for a fifth less."""

_NOT_KEPT = ("view_due", "away", "told", "uninformed", "losses", "recorded", "looked")
"""Fields that a new master sets itself, or learns from the agents."""

_KEPT = tuple(name for name in JobState.__struct_fields__ if name not in _NOT_KEPT)

_NOT_DECIDED = ("spec", "inventory", "agents", "failures", "roles", "epoch")
"""Fields that no decision changes alone, or that are compared apart."""

_decided_of_job = attrgetter(*(name for name in _KEPT if name not in _NOT_DECIDED))


def encode(state: JobState) -> str:
    """`state` without what is not kept, which are metrics and `_NOT_KEPT`, as ASCII text."""
    document = {"schema": SCHEMA, "state": {name: getattr(state, name) for name in _KEPT}}
    try:
        plain = _ENCODER.encode(document)
    except UnicodeEncodeError:
        # What users write may hold halves of characters, which UTF-8 has no bytes for.
        plain = json.dumps(to_builtins(document, enc_hook=_without_metrics)).encode()
    return b64encode(zlib.compress(plain, COMPRESSION_LEVEL)).decode()


def decode(text: str) -> JobState:
    """The inverse of `encode`. Raises `StoreRefused` for a text that no unirun of this version has written."""
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(b64decode(text, validate=True), MAX_PLAIN_BYTES)
        _require(inflate.eof, "text")
        document = json.loads(plain)
        if document["schema"] != SCHEMA:
            raise StoreRefused(
                f"the job's context has schema {document['schema']}, this unirun writes {SCHEMA}",
                "use the unirun that has started the job",
            )
        return _checked(convert(document["state"], JobState, dec_hook=_ranks))
    except (KeyError, ValueError, TypeError, RecursionError, zlib.error) as error:
        problem = f"the job's context is not whole or not unirun's: {error!r}"
        raise StoreRefused(problem, "does the store's prefix belong to something else?") from error


def _without_metrics(ranks: Ranks) -> list[WorkerState]:
    """Workers for msgspec."""
    return [replace(worker, metrics={}) if worker.metrics else worker for worker in ranks]


_ENCODER = Encoder(enc_hook=_without_metrics)


def _ranks(kind: type, rows: Any) -> Any:
    """`Ranks` of plain values, for msgspec."""
    return kind(convert(rows, tuple[WorkerState, ...]))


def _checked(state: JobState) -> JobState:
    for name, role in state.roles.items():
        places = state.placement.of_role(name)
        _require(0 < len(places) <= len(role.workers) and _are_in_order(places), "placement")
        _require(_are_in_order(role.workers), "ranks")
    return state


def _are_in_order(ranks: Iterable[Any]) -> bool:
    return all(each.rank == number for number, each in enumerate(ranks))


def _require(true: bool, what: str) -> None:
    if not true:
        raise ValueError(f"its {what} are not whole")


# The commands that may be carried out: those that follow from decisions in the store. A decision is written before it
# is carried out. The next master knows of it then, and a master whose term is over does nothing any more, because it
# cannot write.


def urgent(before: JobState, after: JobState) -> bool:
    """Return True if `after` has decisions or exits of workers that `before` has not: nothing may follow from
    them before they are in the store. What agents can report again is not urgent."""
    if before is after:
        return False
    if before.inventory != after.inventory or _decided_of_job(before) != _decided_of_job(after):
        return True
    return any(
        role is not (old := before.roles[name]) and (_decided(old) != _decided(role) or _turned(old, role))
        for name, role in after.roles.items()
    )


def _decided(role: RoleState) -> tuple[Any, ...]:
    return (role.phase in ROLE_WORKS or role.phase, role.generation, role.opened, role.restarts)


def _turned(before: RoleState, after: RoleState) -> bool:
    """Return True if workers were ordered, have ended or have got ports, or are given up, or trainers have reported
    whether they are recoverable."""

    def decided(worker: WorkerState) -> tuple[Any, ...]:
        recoverable = worker.recoverable if after.kind == "trainer" else None
        given_up = worker.due == NEVER
        return worker.incarnation, worker.live, worker.exit, recoverable, worker.ports, given_up

    changed = after.workers.since(before.workers)
    return any(was is None or decided(was) != decided(now) for was, now in changed)


_ENDS = StopWorkers | Shutdown


class Ledger:
    """The steps of one master whose commands wait. `kept` is the state that is in the store.

    What has followed since then without a decision is not compared with it again at each step.
    """

    def __init__(self, kept: JobState) -> None:
        self.kept = self._latest = kept
        self._steps: deque[tuple[JobState, list[Command]]] = deque()

    def add(self, state: JobState, commands: list[Command]) -> list[Command]:
        """Add the commands of a step. Returns those that may be carried out at once."""
        if not self._steps and not urgent(self._latest, state):
            self._latest = state
            return commands
        self._steps.append((state, commands))
        return []

    @property
    def due(self) -> JobState | None:
        """The state that must be written for everything that waits; None when nothing does."""
        return self._steps[-1][0] if self._steps else None

    def written(self, state: JobState) -> list[Command]:
        """Note that `state` is in the store. Returns the commands that may be carried out now."""
        self.kept = self._latest = state
        released: list[Command] = []
        if any(step[0] is state for step in self._steps):
            reached = False
            while not reached:
                step, commands = self._steps.popleft()
                released += commands
                reached = step is state
        while self._steps and not urgent(self._latest, self._steps[0][0]):
            self._latest, commands = self._steps.popleft()
            released += commands
        return released

    def waive(self) -> list[Command]:
        """The waiting commands that may be carried out unwritten when the job ends: messages to people, and orders that
        end workers and agents. Nothing is started."""
        waiting = [command for _, commands in self._steps for command in commands]
        self._steps.clear()
        return [c for c in waiting if not isinstance(c, ToAgent | ToAgents) or isinstance(c.message, _ENDS)]
