"""Writes the job's state to the store: what has changed, in one transaction, as long as this master leads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from unirun.errors import Fenced, OutcomeUnknown
from unirun.master.context import changes, observations, restore
from unirun.master.state import JobState
from unirun.master.telling import summary_of
from unirun.rendezvous.election import Term
from unirun.rendezvous.keys import CONTEXT, STATES, VERSIONS, context_prefix, index_key, job_prefix
from unirun.rendezvous.store.protocol import Compare, Put, RevisionIs, Store, ValueIs

_PIECE = 200_000
"""Characters of a worker's state in one value."""

_NODES = f"{CONTEXT}nodes/"

MAX_OPERATIONS = 100
MAX_BYTES = 1_000_000
"""What goes into one transaction; etcd takes 128 operations and 1.5 MB."""


def load(store: Store, run_id: str) -> JobState | None:
    """The state of a job as it was written last, None when there is none."""
    documents = read_context(store, run_id)
    return restore(documents) if "job" in documents else None


def read_context(store: Store, run_id: str) -> dict[str, str]:
    """The documents of a job, by their names in `unirun.master.context`."""
    prefix = context_prefix(run_id)
    return {item.key.removeprefix(prefix): item.value for item in store.get_prefix(prefix).items}


@dataclass(frozen=True, slots=True)
class _Write:
    """One transaction; `head` is a value that no other write of the job has."""

    compares: tuple[Compare, ...]
    puts: tuple[Put, ...]
    deletes: tuple[str, ...]
    head: str


class Keeper:
    """One master's hand on the context of its job. For one thread at a time.

    After a `StoreError` the same call has to be made again before any other: what was sent may have been done.
    """

    def __init__(self, store: Store, run_id: str, term: Term) -> None:
        self._store, self._term = store, term
        self._prefix, self._run_id = job_prefix(run_id), run_id
        head = store.get(self._head_key)
        self._head: Compare = ValueIs(head.key, head.value) if head else RevisionIs(self._head_key, 0)
        self._number = 0
        self._open: _Write | None = None

    def create(self, state: JobState) -> None:
        """Write the state of a new job, in place of one of the same id."""
        documents = _of_context(changes(None, state))
        job = documents.pop(f"{CONTEXT}job")
        self._write({}, deletes=[f"{self._prefix}{part}" for part in (CONTEXT, STATES, VERSIONS)])
        for part in _parts(documents):
            self._write(part)
        # Whoever finds this one finds the others.
        self._write({f"{CONTEXT}job": job}, index=state)

    def write(self, before: JobState, after: JobState) -> bool:
        """Bring the store from `before` to `after` at once. False, with nothing written, when that is too much for one
        transaction. Raises `Fenced` when another leads, `StoreError`."""
        parts = _parts(_of_context(changes(before, after)))
        if len(parts) > 1:
            # Thousands of agents at once: who has joined stands in the store before what follows from that does, and
            # who is lost after it. Either way a master that comes meanwhile waits for those who are there.
            nodes = {name: text for part in parts for name, text in part.items() if name.startswith(_NODES)}
            rest = {name: text for part in parts for name, text in part.items() if name not in nodes}
            if len(_parts(rest)) > 1:
                return False
            joined = before.agents.keys() <= after.agents.keys()
            parts = [*_parts(nodes), rest] if joined else [rest, *_parts(nodes)]
        self._write_parts(parts, after)
        return True

    def note(self, before: JobState, noted: JobState | None, after: JobState) -> None:
        """The same for news that no decision hangs on, in as many transactions as it takes, with what is only of use to
        readers, who have had that of `noted`."""
        documents = changes(before, after) | observations(noted, after)
        self._write_parts(_parts(_of_context(documents)), after)

    def save_state(self, role: str, rank: int, state: str) -> None:
        """Keep a worker's state, as text, in place of the one before."""
        name = f"{STATES}{role}/{rank}"
        before = self._get(name)
        number = 1 + (json.loads(before)["save"] if before else 0)
        pieces = [state[at : at + _PIECE] for at in range(0, len(state), _PIECE)]
        self._write_parts(_parts({f"{name}/{number}/{n}": piece for n, piece in enumerate(pieces)}))
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

    def _get(self, name: str) -> str | None:
        item = self._store.get(f"{self._prefix}{name}")
        return None if item is None else item.value

    def _write_parts(self, parts: Sequence[dict[str, str | None]], state: JobState | None = None) -> None:
        for part in parts:
            if part:
                self._write(part, index=state if f"{CONTEXT}job" in part else None)

    @property
    def _head_key(self) -> str:
        return f"{self._prefix}head"

    def _write(
        self, documents: dict[str, str | None], deletes: Sequence[str] = (), index: JobState | None = None
    ) -> None:
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
            raise Fenced(f"the term {self._term.epoch} of job {self._run_id} is over: another master leads")
        self._head, self._open = ValueIs(self._head_key, write.head), None

    def _txn(self, write: _Write) -> bool:
        return self._store.txn(write.compares, write.puts, write.deletes).succeeded

    def _is_done(self, write: _Write) -> bool:
        head = self._store.get(self._head_key)
        return head is not None and head.value == write.head


def _of_context(documents: dict[str, str | None]) -> dict[str, str | None]:
    return {f"{CONTEXT}{name}": value for name, value in documents.items()}


def _parts(documents: dict[str, str | None]) -> list[dict[str, str | None]]:
    parts: list[dict[str, str | None]] = [{}]
    size = 0
    for name, value in documents.items():
        length = len((value or "").encode())
        if parts[-1] and (len(parts[-1]) >= MAX_OPERATIONS or size + length > MAX_BYTES):
            parts.append({})
            size = 0
        parts[-1][name] = value
        size += length
    return parts
