"""The job's state as documents for a store, and back: JSON, none over 256 KB, each change in few of them.

The state is one tree of frozen values, which msgspec turns into plain values and back. Its long sequences are cut into
blocks of a fixed number of values, a document each, so that a small change writes few and small documents:

::

    job                   the schema, and the state without what is in the other documents
    spec/<n>              the JobSpec, compressed, in pieces
    inventory/<n>         the job's nodes, compressed, in pieces
    nodes/<n>             agents, in the order of the job's nodes
    failures/<n>          failures, counted from the first of the job
    placement/<role>/<n>  where the ranks of a role are, or shall be
    ranks/<role>/<n>      the workers of a role
    calls/<role>/<rank>   what one rank has called, if anything
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

from msgspec import convert, to_builtins
from msgspec.structs import replace

from unirun.errors import StoreRefused
from unirun.failover.state import BLOCK, NEVER, ROLE_WORKS, JobState, Ranks, RoleState, WorkerState
from unirun.values import Value

# The parts of the documents of a job's context: JSON in numbered pieces, none longer than a store takes at once.

PIECE = 200_000
"""Bytes, as the documents are in ASCII."""

WHOLE = 1 << 26
"""The largest decompressed value, in bytes; the nodes of the largest jobs take some MB. Without a limit, a
small document of a shared store could fill the memory."""

Documents = Mapping[str, str]
"""By their names."""
Changes = dict[str, str | None]
"""By name what a document becomes; None when it goes away."""


class BlockSequence(Value):
    """A long sequence, of which `size` values are kept in one document; `first` is the number of the first one."""

    size: int
    values: Sequence[Any]
    first: int = 0

    @property
    def blocks(self) -> dict[int, Sequence[Any]]:
        """The values of each document, by its number."""
        values = tuple(self.values)
        return {
            number: values[max(0, number * self.size - self.first) : (number + 1) * self.size - self.first]
            for number in _numbers(self.size, len(values), self.first)
        }


def _numbers(size: int, length: int, first: int) -> range:
    """The numbers of the blocks that have one of `length` values."""
    return range(first // size, -(-(first + length) // size) if length else 0)


def as_json(value: Any) -> str:
    """In ASCII: what users write may hold halves of characters, which UTF-8 has no bytes for."""
    return json.dumps(value, separators=(",", ":"))


def hold(true: bool, what: str) -> None:
    """Raise ValueError unless it is `true`."""
    if not true:
        raise ValueError(f"its {what} are not whole")


def packed(name: str, value: Any) -> Changes:
    """One value in as many documents as it takes. It is compressed: most nodes of a job are alike."""
    text = b64encode(zlib.compress(as_json(value).encode())).decode()
    return {f"{name}/{n}": text[at : at + PIECE] for n, at in enumerate(range(0, len(text), PIECE))}


def unpacked(name: str, documents: dict[str, str]) -> Any:
    """The inverse of `packed`: the value of the documents called `name`, which are taken out of `documents`. Raises
    ValueError, also for one of more than `WHOLE` bytes, `zlib.error`."""
    text, number = "", 0
    while (piece := documents.pop(f"{name}/{number}", None)) is not None:
        text, number = text + piece, number + 1
    inflate = zlib.decompressobj()
    plain = inflate.decompress(b64decode(text, validate=True), WHOLE)
    hold(inflate.eof, name)
    return json.loads(plain)


def changed_blocks(
    name: str, before: BlockSequence | None, after: BlockSequence, plain: Callable[[Sequence[Any]], Any]
) -> Changes:
    """The blocks of `after` in which something is another value than in `before`; those that `after` has no more are
    deleted. `plain` makes plain values of a block."""
    before = before or BlockSequence(after.size, ())
    if before.values is after.values:
        return {}
    old, found = before.blocks, Changes()
    for number, part in after.blocks.items():
        was = old.pop(number, None)
        # Values that are forgotten at the beginning of a block stay there until it has no others.
        forgotten = max(0, len(was or ()) - len(part)) if after.first > before.first else 0
        if was is not None and len(was) - forgotten == len(part) and all(map(is_, was[forgotten:], part)):
            continue
        text = as_json(plain(part))
        # Most of what changes in a worker is not in its document.
        if was is None or text != as_json(plain(was)):
            found[f"{name}/{number}"] = text
    return found | {f"{name}/{number}": None for number in old}


def values_of(name: str, size: int, length: int, first: int, documents: dict[str, str]) -> list[Any]:
    """The plain values of a `BlockSequence`, whose documents are taken out of `documents`. Raises KeyError and
    ValueError."""
    blocks = [json.loads(documents.pop(f"{name}/{number}")) for number in _numbers(size, length, first)]
    hold(all(isinstance(block, list) for block in blocks), name)
    values = [value for block in blocks for value in block]
    forgotten = len(values) - length
    hold(0 <= forgotten <= first % size, name)
    return values[forgotten:]


SCHEMA = 9

_NODES, _PLACES, _FAILURES = 100, 50, 8
_ENDPOINTS = 1000
"""In a block of nodes, which has fewer of them when the job has many roles."""

_NOT_KEPT = ("view_due", "away", "told", "uninformed", "losses", "recorded", "looked")
"""Fields that a new master sets itself, or learns from the agents."""

_ELSEWHERE = ("spec", "inventory", "agents", "failures")
"""Fields in documents of their own."""

_IN_JOB = tuple(name for name in JobState.__struct_fields__ if name not in (*_NOT_KEPT, *_ELSEWHERE))

_decided_of_job = attrgetter(*(name for name in _IN_JOB if name not in ("roles", "epoch")))

_CALLS = ("calls", "called")
"""Fields of a worker that are in a document of their own, as they may be long."""


def urgent(before: JobState, after: JobState) -> bool:
    """Return True if `after` has decisions or exits of workers that `before` has not: nothing may follow from
    them before they are in the store. What agents can report again is not urgent."""
    if before is after:
        return False
    if _other_nodes(before, after) or _decided_of_job(before) != _decided_of_job(after):
        return True
    return any(
        role is not (old := before.roles[name]) and (_decided(old) != _decided(role) or _turned(old, role))
        for name, role in after.roles.items()
    )


def _other_nodes(before: JobState, after: JobState) -> bool:
    return before.inventory is not after.inventory and before.inventory != after.inventory


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


def changed_documents(before: JobState | None, after: JobState) -> Changes:
    """The documents of `after` that differ from those of `before` (None: there are none yet); None to delete one."""
    found: Changes = {}
    if before is None:
        found |= packed("spec", after.spec.to_json())
    if before is None or _other_nodes(before, after):
        pieces = packed("inventory", to_builtins(before.inventory)) if before is not None else ()
        found |= dict.fromkeys(pieces) | packed("inventory", to_builtins(after.inventory))
    old = _runs(before) if before else {}
    for name, run in _runs(after).items():
        found |= changed_blocks(name, old.get(name), run, _plain)
    for name, role in after.roles.items():
        found |= _changed_calls(name, before.roles[name].workers if before else Ranks(), role.workers)
    job = as_json(_job(after))
    if before is None or job != as_json(_job(before)):
        found["job"] = job
    return found


def restore(documents: Documents) -> JobState:
    """The state that `documents` hold. Raises `StoreRefused` for documents that no unirun of this version has
    written."""
    try:
        job = json.loads(documents["job"])
        if job["schema"] != SCHEMA:
            raise StoreRefused(
                f"the job's context has schema {job['schema']}, this unirun writes {SCHEMA}",
                "use the unirun that has started the job",
            )
        return _restored(job["state"], job["lengths"], dict(documents))
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError, zlib.error) as error:
        problem = f"the job's context is not whole or not unirun's: {error!r}"
        raise StoreRefused(problem, "does the store's prefix belong to something else?") from error


def _runs(state: JobState) -> dict[str, BlockSequence]:
    """The long sequences of the state, by the names of their documents."""
    per_block = max(1, min(_NODES, _ENDPOINTS // len(state.roles)))
    runs = {
        "nodes": BlockSequence(per_block, [state.agents.get(node) for node in state.nodes]),
        "failures": BlockSequence(_FAILURES, state.failures, state.forgotten),
    }
    for name, role in state.roles.items():
        runs[f"placement/{name}"] = BlockSequence(_PLACES, state.placement.of_role(name))
        runs[f"ranks/{name}"] = BlockSequence(BLOCK, role.workers)
    return runs


def _plain(values: Sequence[Any]) -> Any:
    plain = to_builtins(values)
    if isinstance(values[0], WorkerState):
        for row in plain:
            for name in ("metrics", *_CALLS):
                row.pop(name, None)
    return plain


def _job(state: JobState) -> dict[str, Any]:
    fields = {name: getattr(state, name) for name in _IN_JOB}
    fields["placement"] = replace(state.placement, assignments=())
    fields["roles"] = {name: replace(role, workers=Ranks()) for name, role in state.roles.items()}
    lengths = {name: (run.size, len(run.values), run.first) for name, run in _runs(state).items()}
    return {"schema": SCHEMA, "state": to_builtins(fields, enc_hook=list), "lengths": lengths}


def _changed_calls(role: str, before: Ranks, after: Ranks) -> Changes:
    found: Changes = {}
    for was, worker in after.since(before):
        if (worker.calls, worker.called) != ((was.calls, was.called) if was else ((), ())):
            found[f"calls/{role}/{worker.rank}"] = as_json(
                {name: to_builtins(getattr(worker, name)) for name in _CALLS}
            )
    for worker in before[len(after) :]:
        found[f"calls/{role}/{worker.rank}"] = None
    return found


def _restored(state: dict[str, Any], lengths: dict[str, Any], documents: dict[str, str]) -> JobState:
    """`state` with the values of the other documents. Each of them must have its place in the state."""
    del documents["job"]
    state["spec"] = unpacked("spec", documents)
    state["inventory"] = unpacked("inventory", documents)
    runs = {
        name: values_of(name, size, length, first, documents)
        for name, (size, length, first) in lengths.items()
    }
    state["agents"] = {agent["node"]: agent for agent in runs["nodes"] if agent is not None}
    state["failures"] = runs["failures"]
    places = state["placement"]["assignments"]
    for name, role in state["roles"].items():
        places += runs[f"placement/{name}"]
        role["workers"] = runs[f"ranks/{name}"]
        for rank, worker in enumerate(role["workers"]):
            if (text := documents.pop(f"calls/{name}/{rank}", None)) is not None:
                worker.update(json.loads(text))
    hold(not documents, "documents")
    restored = convert(state, JobState, dec_hook=_workers)
    for name, role in restored.roles.items():
        here = restored.placement.of_role(name)
        hold(0 < len(here) <= len(role.workers) and _are_in_order(here), "placement")
        hold(_are_in_order(role.workers), "ranks")
    return restored


def _workers(kind: type, rows: Any) -> Any:
    """`Ranks` of plain values, for msgspec."""
    return kind(convert(rows, tuple[WorkerState, ...]))


def _are_in_order(ranks: Iterable[Any]) -> bool:
    return all(each.rank == number for number, each in enumerate(ranks))
