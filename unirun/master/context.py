"""The job's state as documents for a store, and back: JSON, none over 256 KB, each change in few of them.

::

    job                the schema, the phase, the verdict: what belongs to the job as a whole
    spec/<n>           the JobSpec, in pieces when it is long
    placement/<n>      where each rank is, in pieces
    nodes/<n>          up to 100 agents each, in the order of the placement's nodes
    roles              the phases, generations and spent restarts of all roles
    ranks/<n>          1 000 workers each, as columns, in the order of the roles and their ranks
    failures/<n>       8 failures each
    seen/<n>           250 workers each: pids and addresses, for who reads; a new master asks the agents
    calls/<who>        what one rank has called, if anything

Every decision is in all but the last two, which are written now and then.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from unirun.collocation import Assignment, Placement
from unirun.errors import StoreRefused
from unirun.failover import Exit, Failure
from unirun.graph import added
from unirun.master.state import (
    ROLE_WORKS,
    JobPhase,
    JobState,
    Owner,
    RolePhase,
    RoleState,
    Verdict,
    WorkerPhase,
    WorkerState,
)
from unirun.spec import JobSpec
from unirun.wire.reports import CallCount, Join, Span

SCHEMA = 2

_PIECE = 200_000
"""Bytes, as the documents are in ASCII."""
_NODES, _RANKS, _FAILURES, _SEEN = 100, 1000, 8, 250
_ENDPOINTS = 1000
"""In a block of nodes, which has fewer of them when the job has many roles."""

_LETTERS: dict[WorkerPhase, str] = {
    WorkerPhase.WAITING: "w",
    WorkerPhase.STARTING: "s",
    WorkerPhase.ALIVE: "a",
    WorkerPhase.RUNNING: "r",
    WorkerPhase.SERVING: "c",
    WorkerPhase.EXITED: "e",
}
_PHASES = {letter: phase for phase, letter in _LETTERS.items()}

Documents = Mapping[str, str]
T = TypeVar("T")


def urgent(before: JobState, after: JobState) -> bool:
    """Whether `after` has decisions or ends of workers that `before` has not: nothing may follow from them before
    they are in the store. What agents can tell again is not urgent."""
    if before is after:
        return False
    if _of_job(before) != _of_job(after):
        return True
    return any(
        role is not (old := before.roles[name]) and (_decided(old) != _decided(role) or _turned(old, role))
        for name, role in after.roles.items()
    )


def _decided(role: RoleState) -> tuple[Any, ...]:
    return (role.phase in ROLE_WORKS or role.phase, role.generation, role.opened, role.restarts)


def _turned(before: RoleState, after: RoleState) -> bool:
    return before.workers is not after.workers and any(
        new is not old and (new.incarnation, new.live, new.exit) != (old.incarnation, old.live, old.exit)
        for old, new in zip(before.workers, after.workers, strict=True)
    )


def changes(before: JobState | None, after: JobState) -> dict[str, str | None]:
    """The documents of `after` that differ from those of `before` (None: there are none yet); None to delete one."""
    found: dict[str, str | None] = {}
    if before is None:
        found |= _pieces("spec", after.spec.to_json())
        found |= _pieces("placement", _places(after.placement.assignments))
    if before is None or before.agents is not after.agents:
        nodes = after.placement.nodes
        old = [before.agents.get(node) for node in nodes] if before else []
        size = max(1, min(_NODES, _ENDPOINTS // len(after.roles)))
        found |= _blocks("nodes", size, old, [after.agents.get(node) for node in nodes], _agents)
    if before is None or any(_head(before.roles[name]) != _head(r) for name, r in after.roles.items()):
        found["roles"] = _json({name: _head(role) for name, role in after.roles.items()})
    found |= _blocks("ranks", _RANKS, _workers(before), _workers(after), _ranks)
    found |= _failures(before, after)
    if before is None or _of_job(before) != _of_job(after):
        found["job"] = _json(_of_job(after))
    return found


def observations(before: JobState | None, after: JobState) -> dict[str, str | None]:
    """The same for what is only of use to readers."""
    old, new = _workers(before), _workers(after)
    return _blocks("seen", _SEEN, old, new, _seen) | _calls(before, after)


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
        return _restored(job, documents)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        problem = f"the job's context is not whole or not unirun's: {error!r}"
        raise StoreRefused(problem, "does the store's prefix belong to something else?") from error


def observed(state: JobState, documents: Documents) -> JobState:
    """`state` with what was seen of its workers: how it stood when it was written last."""
    rows = [row for block in _numbered("seen", documents) for row in json.loads(block)]
    at = 0
    for role in state.roles.values():
        workers = list(role.workers)
        # They are not written all at once: the last ones may not be there yet.
        for rank, (incarnation, pid, addresses) in enumerate(rows[at : at + len(workers)]):
            worker = workers[rank]
            if worker.live and worker.incarnation == incarnation:
                workers[rank] = replace(worker, pid=pid, addresses=addresses)
        at += len(workers)
        state = state.with_role(replace(role, workers=tuple(workers)))
    return state


def _restored(job: dict[str, Any], documents: Documents) -> JobState:
    spec = JobSpec.from_json(json.loads("".join(_numbered("spec", documents))))
    placement = Placement(tuple(_read_places(documents)), job["note"], masks=job["masks"])
    rows = list(_read_ranks(documents))
    _hold(len(rows) == len(placement.assignments) == sum(role.count for role in spec.roles), "ranks")
    roles = {}
    heads = json.loads(documents["roles"])
    at = 0
    for role in spec.roles:
        phase, generation, opened, restarts = heads[role.name]
        places = placement.of_role(role.name)
        _hold([place.rank for place in places] == list(range(role.count)), "placement")
        workers = tuple(
            replace(row, rank=place.rank, node=place.node)
            for row, place in zip(rows[at : at + role.count], places, strict=True)
        )
        at += role.count
        workers = tuple(_with_calls(role.name, worker, documents) for worker in workers)
        roles[role.name] = RoleState(
            role.name, role.entry.kind, role.restart, workers, RolePhase(phase), generation, opened, restarts
        )
    agents = [Join(**row) for block in _numbered("nodes", documents) for row in json.loads(block)]
    verdict = job["verdict"]
    return JobState(
        spec=spec,
        placement=placement,
        roles=roles,
        started=job["started"],
        logs=job["logs"],
        phase=JobPhase(job["phase"]),
        agents={agent.node: agent for agent in agents},
        failures=tuple(_read_failures(documents, job["forgotten"])),
        verdict=Verdict(**{**verdict, "phase": JobPhase(verdict["phase"])}) if verdict else None,
        ended=job["ended"],
        asked_to_stop=job["asked_to_stop"],
        forgotten=job["forgotten"],
        uid=job["uid"],
        owner=Owner(**job["owner"]) if job["owner"] else None,
    )


def _hold(true: bool, what: str) -> None:
    if not true:
        raise ValueError(f"its {what} are not whole")


def _of_job(state: JobState) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "uid": state.uid,
        "phase": state.phase.value,
        "started": state.started,
        "ended": state.ended,
        "logs": state.logs,
        "note": state.placement.note,
        "masks": dict(state.placement.masks),
        "asked_to_stop": state.asked_to_stop,
        "forgotten": state.forgotten,
        "verdict": dataclasses.asdict(state.verdict) if state.verdict else None,
        "owner": dataclasses.asdict(state.owner) if state.owner else None,
    }


def _head(role: RoleState) -> list[Any]:
    return [role.phase.value, role.generation, role.opened, role.restarts]


def _workers(state: JobState | None) -> list[WorkerState]:
    return [worker for role in state.roles.values() for worker in role.workers] if state else []


def _ranks(workers: Sequence[WorkerState]) -> Any:
    return {
        "phase": "".join(_LETTERS[worker.phase] for worker in workers),
        "incarnation": [worker.incarnation for worker in workers],
        "generation": [worker.generation for worker in workers],
        "exit": {n: [w.exit.code, w.exit.signal] for n, w in enumerate(workers) if w.exit is not None},
    }


def _read_ranks(documents: Documents) -> Iterator[WorkerState]:
    for block in _numbered("ranks", documents):
        columns = json.loads(block)
        exits = columns["exit"]
        rows = zip(columns["phase"], columns["incarnation"], columns["generation"], strict=True)
        for n, (letter, incarnation, generation) in enumerate(rows):
            end = exits.get(str(n))
            yield WorkerState(
                0,
                "",
                incarnation,
                _PHASES[letter],
                exit=Exit(*end) if end else None,
                generation=generation,
            )


def _seen(workers: Sequence[WorkerState]) -> Any:
    return [[worker.incarnation, worker.pid, dict(worker.addresses)] for worker in workers]


def _calls(before: JobState | None, after: JobState) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for role in after.roles.values():
        old = before.roles[role.name].workers if before else ()
        if old is role.workers:
            continue
        for number, worker in enumerate(role.workers):
            known = (old[number].calls, old[number].called) if old else ((), ())
            if (worker.calls, worker.called) != known:
                counts = [[dataclasses.asdict(c) for c in each] for each in (worker.calls, worker.called)]
                found[f"calls/{role.name}/{worker.rank}"] = _json([worker.incarnation, *counts])
    return found


def _with_calls(role: str, worker: WorkerState, documents: Documents) -> WorkerState:
    """What a rank has called was written of an earlier incarnation, perhaps."""
    text = documents.get(f"calls/{role}/{worker.rank}")
    if text is None:
        return worker
    incarnation, *both = json.loads(text)
    calls, called = (tuple(_count(each) for each in counts) for counts in both)
    if incarnation == worker.incarnation:
        return replace(worker, calls=calls, called=called)
    return replace(worker, called=added(called, calls))


def _count(fields: dict[str, Any]) -> CallCount:
    return CallCount(**{**fields, "ranks": tuple(Span(**span) for span in fields["ranks"])})


def _agents(agents: Sequence[Join | None]) -> Any:
    return [
        {"node": agent.node, "pid": agent.pid, "host": agent.host, "endpoints": agent.endpoints}
        for agent in agents
        if agent is not None
    ]


def _places(places: Sequence[Assignment]) -> Any:
    return [
        [p.role, p.rank, p.node, p.slot, p.local_rank, p.devices, p.cpus, p.own, p.share, p.numa]
        for p in places
    ]


def _read_places(documents: Documents) -> Iterator[Assignment]:
    for role, rank, node, slot, local_rank, devices, cpus, own, share, numa in json.loads(
        "".join(_numbered("placement", documents))
    ):
        place = role, rank, node, slot, local_rank, _tuple(devices), _tuple(cpus)
        yield Assignment(*place, tuple(own), share, numa)


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _failures(before: JobState | None, after: JobState) -> dict[str, str | None]:
    """Failures are numbered from the first of the job; a block with forgotten ones stays until it has no other."""
    first, end = after.forgotten, after.forgotten + len(after.failures)
    known_first = before.forgotten if before else 0
    known_end = known_first + len(before.failures) if before else 0
    found: dict[str, str | None] = {}
    for block in range(max(known_end, first) // _FAILURES, -(-end // _FAILURES)) if end > known_end else ():
        low = max(block * _FAILURES, first)
        part = after.failures[low - first : (block + 1) * _FAILURES - first]
        found[f"failures/{block}"] = _json({"first": low, "failures": [dataclasses.asdict(f) for f in part]})
    for block in range(known_first // _FAILURES, first // _FAILURES):
        found[f"failures/{block}"] = None
    return found


def _read_failures(documents: Documents, forgotten: int) -> Iterator[Failure]:
    expected = forgotten
    for block in _numbered("failures", documents):
        content = json.loads(block)
        for number, fields in enumerate(content["failures"], content["first"]):
            if number >= forgotten:
                _hold(number == expected, "failures")
                expected += 1
                yield Failure(**{**fields, "exit": Exit(**fields["exit"])})


def _pieces(name: str, value: Any) -> dict[str, str]:
    text = _json(value)
    return {f"{name}/{n}": text[at : at + _PIECE] for n, at in enumerate(range(0, len(text), _PIECE))}


def _blocks(
    name: str, size: int, before: Sequence[T], after: Sequence[T], encode: Callable[[Sequence[T]], Any]
) -> dict[str, str | None]:
    """The blocks of `after` in which something is another value than in `before`."""
    found: dict[str, str | None] = {}
    for at in range(0, len(after), size):
        part, old = after[at : at + size], before[at : at + size]
        if len(part) == len(old) and all(x is y for x, y in zip(part, old, strict=True)):
            continue
        text = _json(encode(part))
        # Most of what changes in a worker is not in its document.
        if not old or text != _json(encode(old)):
            found[f"{name}/{at // size}"] = text
    return found


def _numbered(name: str, documents: Documents) -> list[str]:
    """The blocks called `name`, in the order of their numbers."""
    prefix = f"{name}/"
    found = sorted((int(key.removeprefix(prefix)), key) for key in documents if key.startswith(prefix))
    _hold(all(number == found[0][0] + n for n, (number, _) in enumerate(found)), name)
    return [documents[key] for _, key in found]


def _json(value: Any) -> str:
    """In ASCII: what users write may hold halves of characters, which UTF-8 has no bytes for."""
    return json.dumps(value, separators=(",", ":"))
