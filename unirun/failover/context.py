"""The job's context: its state as one text for a store, and back; and the commands that wait until it is written.

The text is JSON, compressed with zlib, in base64. Every decision writes the whole of it: `docs/store.md` has the sizes.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import quote

from msgspec import convert, to_builtins
from msgspec.json import Encoder
from msgspec.json import decode as decode_json
from msgspec.structs import replace

from unirun.errors import Fenced, OutcomeUnknown, StoreRefused
from unirun.failover.draft import Command, ToAgent, ToAgents
from unirun.failover.state import NEVER, ROLE_WORKS, JobState, Ranks, RoleState, WorkerState
from unirun.observe.status import Summary, shaped
from unirun.rendezvous.election import (
    CONTEXT,
    STATES,
    VERSIONS,
    Term,
    context_prefix,
    crashes_key,
    index_key,
    job_prefix,
    silent_key,
)
from unirun.rendezvous.store.protocol import Compare, Put, RevisionIs, Store, ValueIs
from unirun.values import WorkerId, natural
from unirun.wire.messages import Shutdown, StopWorkers
from unirun.wire.reports import MasterReply, MasterRequest

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


# The store of the context: it is written as one text, as long as this master leads; and what its workers keep there.

MAX_CHANNEL = 200
"""Characters in the name of a channel, which is a part of a key."""

MAX_OPERATIONS = 100
MAX_BYTES = 1_000_000
"""The most bytes of one transaction; etcd takes 128 operations and 1.5 MB."""

_NAME = f"{CONTEXT}state"
"""The context among the texts of a job."""


def load(store: Store, run_id: str) -> JobState | None:
    """The state of a job as it was written last, None when there is none. Raises `StoreError`, also for one that
    is not whole."""
    items = {item.key: item.value for item in store.get_prefix(context_prefix(run_id)).items}
    try:
        text = _saved_text(f"{job_prefix(run_id)}{_NAME}", items.get)
    except ValueError as error:
        problem = f"the context of job {run_id} is not unirun's: {error}"
        raise StoreRefused(problem, "does the store's prefix belong to something else?") from error
    return None if text is None else decode(text)


def summary_of(state: JobState) -> Summary:
    """The state as the line that ``unirun ls`` reads."""
    return shaped(Summary, state.spec, state, phase=state.phase.value, code=state.code, roles=state.sizes)


def _saved_text(name: str, get: Callable[[str], str | None]) -> str | None:
    """The text that was saved as `name`; None when there is none. Raises ValueError when it is not whole."""
    head = get(name)
    if head is None:
        return None
    save, count = _read_head(head)
    pieces: list[str] = []
    while len(pieces) < count:
        piece = get(f"{name}/{save}/{len(pieces)}")
        if piece is None:
            raise ValueError(f"piece {len(pieces)} of {count} of {name} is missing")
        pieces.append(piece)
    return "".join(pieces)


def _read_head(head: str) -> tuple[int, int]:
    """The number of the save, which the keys of its pieces have, and that of the pieces. Raises ValueError."""
    return decode_json(head, type=tuple[int, int])


def _pieces(text: str) -> list[str]:
    """`text` in parts of at most `MAX_BYTES`."""
    length = MAX_BYTES if text.isascii() else MAX_BYTES // 4
    return [text[at : at + length] for at in range(0, len(text), length)]


class _Write(NamedTuple):
    """The arguments of a transaction. It puts the head first, with a value that no other write of the job has."""

    compares: Sequence[Compare]
    puts: Sequence[Put]
    deletes: Sequence[str]

    @property
    def head(self) -> Put:
        return self.puts[0]


class ContextStore:
    """Writes the context of one job for the master of one term. For one thread at a time.

    After a `StoreError` the same call has to be made again before any other: what was sent may have been done.
    """

    def __init__(self, store: Store, run_id: str, term: Term) -> None:
        self._store, self._term = store, term
        self._prefix, self._run_id = job_prefix(run_id), run_id
        head = store.get(self._head_key)
        self._head: Compare = ValueIs(head.key, head.value) if head else RevisionIs(self._head_key, 0)
        self._number = 0
        self._open: _Write | None = None
        self._written = ""

    @property
    def size(self) -> int:
        """Bytes of the context, as this master has written it last; 0 if it has not."""
        return len(self._written)

    def create(self, state: JobState, *, keep_saved: bool = False) -> None:
        """Write the state of a new job, in place of one of the same id. What that one's workers have saved, states and
        versions, is removed unless `keep_saved` is given."""
        parts = (CONTEXT,) if keep_saved else (CONTEXT, STATES, VERSIONS)
        gone = (
            *(f"{self._prefix}{part}" for part in parts),
            crashes_key(self._run_id),
            silent_key(self._run_id),
        )
        self._write({}, deletes=gone)
        self.write(state)

    def write(self, state: JobState) -> None:
        """Keep `state` in place of the one before, unless the texts are the same. Raises `Fenced` when another master
        leads, `StoreError`."""
        text = encode(state)
        if text != self._written:
            self._written = ""
            self._save(_NAME, text, Put(index_key(self._run_id), summary_of(state).line()))
            self._written = text

    def _save(self, name: str, text: str, *puts: Put) -> None:
        """Keep `text` in place of the one before, as one for readers.

        The pieces of a long text are written one after the other. The last transaction has the head, which says which
        pieces count: until it is done, the text before is found. A dead master's pieces without a head are written
        over, or go with those of the next text.
        """
        self._settle()
        before = self._get(name)
        number = 1 + (_read_head(before)[0] if before else 0)
        pieces = {f"{name}/{number}/{n}": piece for n, piece in enumerate(_pieces(text))}
        last = dict([pieces.popitem()] if pieces else [])
        for key, piece in pieces.items():
            self._write({key: piece})
        head = json.dumps((number, len(pieces) + len(last)))
        self._write({**last, name: head}, puts, deletes=[f"{self._prefix}{name}/{number - 1}/"])

    def save_state(self, role: str, rank: int, state: str) -> None:
        """Keep a worker's state, as text, in place of the one before."""
        self._save(f"{STATES}{role}/{rank}", state)

    def load_state(self, role: str, rank: int) -> str | None:
        """The state of a worker that was kept last. Raises ValueError when it is not whole."""
        return _saved_text(f"{STATES}{role}/{rank}", self._get)

    def commit_version(self, channel: str, version: int) -> int:
        """Keep the version of a channel, if it is the highest; returns the one that is kept."""
        before = self.version(channel)
        if before is not None and before >= version:
            return before
        self._write({f"{VERSIONS}{quote(channel, safe='')}": str(version)})
        return version

    def version(self, channel: str) -> int | None:
        """The version of a channel that was kept last."""
        kept = self._get(f"{VERSIONS}{quote(channel, safe='')}")
        return None if kept is None else int(kept)

    def mark_silent(self, nodes: Sequence[str]) -> None:
        """Write marks of these nodes, which their agents look for. Raises `Fenced`, `StoreError`."""
        puts = [Put(silent_key(self._run_id, node), str(self._term.epoch)) for node in nodes]
        for at in range(0, len(puts), MAX_OPERATIONS):
            self._mark(puts[at : at + MAX_OPERATIONS], [])

    def unmark_silent(self, nodes: Sequence[str] = ()) -> None:
        """Remove the marks of these nodes; of all when none is named. Raises `Fenced`, `StoreError`."""
        keys = [silent_key(self._run_id, node) for node in nodes or ("",)]
        for at in range(0, len(keys), MAX_OPERATIONS):
            self._mark([], keys[at : at + MAX_OPERATIONS])

    def _mark(self, puts: Sequence[Put], deletes: Sequence[str]) -> None:
        if not self._store.txn([self._term.fence], puts, deletes).succeeded:
            raise self._fenced()

    def answer(self, worker: WorkerId, ask: MasterRequest) -> MasterReply:
        """Carry out what a worker asks of the store. It is idempotent. Raises `StoreError`.

        A request that no store could carry out is answered with the problem: a master that raised would leave the same
        request to the next one.
        """
        if ask.kind in ("commit_version", "version") and not 0 < len(ask.name) <= MAX_CHANNEL:
            return MasterReply(
                worker, ask.number, problem=f"{ask.name!r:.80} is no channel: 1 to {MAX_CHANNEL} characters"
            )
        if ask.kind == "commit_version" and natural(ask.data) is None:
            return MasterReply(worker, ask.number, problem=f"{ask.data!r:.80} is no version")
        try:
            return MasterReply(worker, ask.number, self._carried_out(worker, ask))
        except ValueError as error:
            # Nothing was sent to the store: the text is not UTF-8, or the key is not allowed.
            return MasterReply(worker, ask.number, problem=f"{ask.kind} cannot be done: {error}")

    def _carried_out(self, worker: WorkerId, ask: MasterRequest) -> str | None:
        match ask.kind:
            case "save_state":
                self.save_state(worker.role, worker.rank, ask.data)
                return None
            case "load_state":
                return self.load_state(worker.role, worker.rank)
            case "commit_version":
                return str(self.commit_version(ask.name, int(ask.data)))
            case "version":
                kept = self.version(ask.name)
                return None if kept is None else str(kept)

    def _get(self, name: str) -> str | None:
        item = self._store.get(f"{self._prefix}{name}")
        return None if item is None else item.value

    @property
    def _head_key(self) -> str:
        return f"{self._prefix}head"

    def _write(
        self, values: Mapping[str, str], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> None:
        """One transaction: `values` of the job by their names, and `puts` besides."""
        self._settle()
        self._number += 1
        head = json.dumps({"epoch": self._term.epoch, "write": self._number})
        named = (Put(f"{self._prefix}{name}", value) for name, value in values.items())
        puts = (Put(self._head_key, head), *named, *puts)
        self._open = _Write((self._term.fence, self._head), puts, tuple(deletes))
        self._do(self._open)

    def _settle(self) -> None:
        """Do the write of which it is not known whether it was done."""
        if self._open is not None:
            self._do(self._open)

    def _do(self, write: _Write) -> None:
        """Do a write that may have been done: it is, when its number stands at the head. If it is sent twice, only
        one of the two finds the head as it was."""
        try:
            done = self._store.txn(*write).succeeded
        except OutcomeUnknown:
            done = self._is_done(write) or self._store.txn(*write).succeeded
        except ValueError:
            # No store takes such a write, so it was not sent and is not to be sent again.
            self._open = None
            raise
        if not done and not self._is_done(write):
            raise self._fenced()
        self._head, self._open = ValueIs(write.head.key, write.head.value), None

    def _fenced(self) -> Fenced:
        return Fenced(f"the term {self._term.epoch} of job {self._run_id} is over: another master leads")

    def _is_done(self, write: _Write) -> bool:
        head = self._store.get(self._head_key)
        return head is not None and head.value == write.head.value
