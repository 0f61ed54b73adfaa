"""Writes the job's state to the store: what has changed, as one, as long as this master leads."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from urllib.parse import quote

from unirun.errors import Fenced, OutcomeUnknown
from unirun.failover.draft import Command, ToAgent, ToAgents
from unirun.failover.persistence.context import Changes, changed_documents, restore, urgent
from unirun.failover.state import JobState
from unirun.failover.status_views import summary_of
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
from unirun.values import Value, WorkerId
from unirun.wire.messages import Shutdown, StopWorkers
from unirun.wire.reports import MasterReply, MasterRequest

_PIECE = 200_000
"""Characters of a worker's state in one value."""

_STAGED = "staged/"
_COMMITTED = "committed"
"""In the context: documents that are too many for one transaction, by the number of their write and of their piece; and
the number of the write of which all are there."""

_CLEAN: Changes = {f"{CONTEXT}{_COMMITTED}": None, f"{CONTEXT}{_STAGED}": None}

MAX_CHANNEL = 200
"""Characters in the name of a channel, which is a part of a key."""

MAX_DIGITS = 18
"""Of a version: it fits 64 bits."""

MAX_OPERATIONS = 100
MAX_BYTES = 1_000_000
"""The most bytes of one transaction; etcd takes 128 operations and 1.5 MB."""


def load(store: Store, run_id: str) -> JobState | None:
    """The state of a job as it was written last, None when there is none."""
    documents = read_context(store, run_id)
    return restore(documents) if "job" in documents else None


def read_context(store: Store, run_id: str) -> dict[str, str]:
    """The documents of a job, by their names in `unirun.failover.persistence.context`.

    Those of a write in pieces are among them as soon as all of its pieces are there.
    """
    return _merged(_items(store, run_id))


def _items(store: Store, run_id: str) -> dict[str, str]:
    prefix = context_prefix(run_id)
    return {item.key.removeprefix(prefix): item.value for item in store.get_prefix(prefix).items}


def _merged(items: dict[str, str]) -> dict[str, str]:
    """The documents that `items` of the context mean."""
    documents = {name: value for name, value in items.items() if name != _COMMITTED and not _is_staged(name)}
    for piece in _staged(items).values():
        for name, value in piece.items():
            if value is None:
                documents.pop(name, None)
            else:
                documents[name] = value
    return documents


def _staged(items: dict[str, str]) -> dict[str, Changes]:
    """The committed changes of a write in pieces that are not at their places yet, by the key of their piece."""
    found: dict[str, Changes] = {}
    if _COMMITTED in items:
        write = f"{_STAGED}{items[_COMMITTED]}/"
        for key, text in items.items():
            if key.startswith(write):
                piece, _, name = key.removeprefix(write).partition("/")
                # No document is empty, so an empty text stands for a deletion.
                found.setdefault(f"{write}{piece}/", {})[name] = text or None
    return found


def _is_staged(name: str) -> bool:
    return name.startswith(_STAGED)


class _Write(Value):
    """One transaction; `head` is a value that no other write of the job has."""

    compares: tuple[Compare, ...]
    puts: tuple[Put, ...]
    deletes: tuple[str, ...]
    head: str


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
        self._moves: deque[Changes] = deque()

    def create(self, state: JobState, *, keep_saved: bool = False) -> None:
        """Write the state of a new job, in place of one of the same id. What that one's workers have saved, states and
        versions, is removed unless `keep_saved` is given."""
        documents = _of_context(changed_documents(None, state))
        job = documents.pop(f"{CONTEXT}job")
        parts = (CONTEXT,) if keep_saved else (CONTEXT, STATES, VERSIONS)
        gone = (
            *(f"{self._prefix}{part}" for part in parts),
            crashes_key(self._run_id),
            silent_key(self._run_id),
        )
        self._write({}, deletes=gone)
        for part in _parts(documents):
            self._write(part)
        # Whoever finds this one finds the others.
        self._write({f"{CONTEXT}job": job}, index=state)

    def take_over(self) -> JobState | None:
        """The state that another master has left; None when there is none. Ends what it had begun to write."""
        items = _items(self._store, self._run_id)
        if _COMMITTED in items or any(map(_is_staged, items)):
            self._moves.extend(_of_context({**piece, where: None}) for where, piece in _staged(items).items())
            self._moves.append(_CLEAN)
            self._move()
        documents = _merged(items)
        return restore(documents) if "job" in documents else None

    def write(self, before: JobState, after: JobState) -> None:
        """Change the stored state from `before` to `after`, atomically for readers. Raises `Fenced` when another master
        leads, `StoreError`.

        When there are too many documents for one transaction, they are written in pieces, which are staged beside the
        context. One small transaction commits them; from then on readers find them in place of what is in the context.
        Then they are moved there. A master that comes when this one has died drops pieces that were not committed, and
        goes on moving those that were (`take_over`).
        """
        self._move()
        documents = _of_context(changed_documents(before, after))
        index = after if f"{CONTEXT}job" in documents else None
        parts = _parts(documents)
        if len(parts) == 1:
            if documents:
                self._write(documents, index=index)
            return
        number = f"{self._term.epoch}.{self._number + 1}"
        moves: list[Changes] = []
        for count, part in enumerate(parts):
            piece = f"{CONTEXT}{_STAGED}{number}/{count}/"
            self._write({f"{piece}{name.removeprefix(CONTEXT)}": value or "" for name, value in part.items()})
            moves.append({**part, piece: None})
        self._moves.extend((*moves, _CLEAN))
        self._write({f"{CONTEXT}{_COMMITTED}": number}, index=index)
        self._move()

    def _move(self) -> None:
        """Bring pieces that are committed to their places, one after the other, or go on with that."""
        while self._moves:
            self._write(self._moves[0])
            self._moves.popleft()

    def save_state(self, role: str, rank: int, state: str) -> None:
        """Keep a worker's state, as text, in place of the one before."""
        name = f"{STATES}{role}/{rank}"
        before = self._get(name)
        number = 1 + (json.loads(before)["save"] if before else 0)
        pieces = [state[at : at + _PIECE] for at in range(0, len(state), _PIECE)]
        for part in _parts({f"{name}/{number}/{n}": piece for n, piece in enumerate(pieces)}):
            self._write(part)
        # Until this is written, the state before is found; what a dead master has begun is written over.
        head = json.dumps({"save": number, "pieces": len(pieces)})
        self._write({name: head}, deletes=[f"{self._prefix}{name}/{number - 1}/"])

    def load_state(self, role: str, rank: int) -> str | None:
        """The state of a worker that was kept last."""
        name = f"{STATES}{role}/{rank}"
        head = self._get(name)
        if head is None:
            return None
        found = json.loads(head)
        return "".join(self._get(f"{name}/{found['save']}/{n}") or "" for n in range(found["pieces"]))

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
                ask.number, problem=f"{ask.name!r:.80} is no channel: 1 to {MAX_CHANNEL} characters"
            )
        if ask.kind == "commit_version" and not (ask.data.isdecimal() and len(ask.data) <= MAX_DIGITS):
            return MasterReply(ask.number, problem=f"{ask.data!r:.80} is no version")
        try:
            return MasterReply(ask.number, self._carried_out(worker, ask))
        except ValueError as error:
            # Nothing was sent to the store: the text is not UTF-8, or the key is not allowed.
            return MasterReply(ask.number, problem=f"{ask.kind} cannot be done: {error}")

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

    def _write(self, documents: Changes, deletes: Sequence[str] = (), index: JobState | None = None) -> None:
        """One transaction."""
        if self._open is not None:
            self._do(self._open)
        self._number += 1
        head = json.dumps({"epoch": self._term.epoch, "write": self._number})
        keyed = {f"{self._prefix}{name}": value for name, value in documents.items()}
        puts = [Put(key, value) for key, value in keyed.items() if value is not None]
        if index is not None:
            puts.append(Put(index_key(self._run_id), summary_of(index).line()))
        self._open = _Write(
            (self._term.fence, self._head),
            (Put(self._head_key, head), *puts),
            (*deletes, *(key for key, value in keyed.items() if value is None)),
            head,
        )
        self._do(self._open)

    def _do(self, write: _Write) -> None:
        """Do a write that may have been done: it is, when its number stands at the head. If it is sent twice, only
        one of the two finds the head as it was."""
        try:
            done = self._txn(write)
        except OutcomeUnknown:
            done = self._is_done(write) or self._txn(write)
        except ValueError:
            # No store takes such a write, so it was not sent and is not to be sent again.
            self._open = None
            raise
        if not done and not self._is_done(write):
            raise self._fenced()
        self._head, self._open = ValueIs(self._head_key, write.head), None

    def _fenced(self) -> Fenced:
        return Fenced(f"the term {self._term.epoch} of job {self._run_id} is over: another master leads")

    def _txn(self, write: _Write) -> bool:
        return self._store.txn(write.compares, write.puts, write.deletes).succeeded

    def _is_done(self, write: _Write) -> bool:
        head = self._store.get(self._head_key)
        return head is not None and head.value == write.head


def _of_context(documents: Changes) -> Changes:
    return {f"{CONTEXT}{name}": value for name, value in documents.items()}


def _parts(documents: Changes) -> list[Changes]:
    parts: list[Changes] = [{}]
    size = 0
    for name, value in documents.items():
        length = len((value or "").encode())
        if parts[-1] and (len(parts[-1]) >= MAX_OPERATIONS or size + length > MAX_BYTES):
            parts.append({})
            size = 0
        parts[-1][name] = value
        size += length
    return parts


# The commands that may be carried out: those that follow from decisions in the store. A decision is written before it
# is carried out. The next master knows of it then, and a master whose term is over does nothing any more, because it
# cannot write.

_ENDS = StopWorkers | Shutdown


class Ledger:
    """The steps of one master whose commands wait. `kept` is the state that is in the store.

    What has followed since then without a decision is not compared with it again at each step.
    """

    def __init__(self, kept: JobState) -> None:
        self.kept = self._latest = kept
        self._steps: deque[tuple[JobState, list[Command]]] = deque()

    def add(self, state: JobState, commands: list[Command]) -> list[Command]:
        """After a step. Returns what may be done at once."""
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
        """`state` is in the store. Returns what may be done now."""
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
