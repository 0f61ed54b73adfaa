"""Writes the job's context to the store, as one, as long as this master leads; and what its workers keep there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from msgspec.json import decode as decode_json

from unirun.errors import Fenced, OutcomeUnknown, StoreRefused
from unirun.failover.context import decode, encode
from unirun.failover.state import JobState
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
from unirun.values import WorkerId
from unirun.wire.reports import MasterReply, MasterRequest

MAX_CHANNEL = 200
"""Characters in the name of a channel, which is a part of a key."""

MAX_DIGITS = 18
"""Of a version: it fits 64 bits."""

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
        if ask.kind == "commit_version" and not (ask.data.isdecimal() and len(ask.data) <= MAX_DIGITS):
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
