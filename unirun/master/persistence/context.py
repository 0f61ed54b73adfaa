"""The job's state as documents for a store, and back: JSON, none over 256 KB, each change in few of them.

::

    job                the schema, the phase, the verdict: what belongs to the job as a whole
    spec/<n>           the JobSpec, in pieces when it is long
    inventory/<n>      the job's nodes, as far as a planner looks at them, in pieces
    placement/<role>/<n>  where 50 ranks of a role each are, or shall be
    nodes/<n>          up to 100 agents each, in the order of the job's nodes
    roles              the phases, generations, spent restarts and numbers of ranks of all roles; and which workers are
                       not where they shall be
    ranks/<n>          1 000 workers each, as columns, in the order of the roles and their ranks
    failures/<n>       8 failures each
    seen/<n>           250 workers each: pids and addresses, for who reads; a new master asks the agents
    calls/<who>        what one rank has called, if anything

Every decision is in all but the last two, which are written now and then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from msgspec import convert, to_builtins
from msgspec.structs import replace

from unirun.errors import StoreRefused
from unirun.graph import added
from unirun.job.failures import Exit, Failure
from unirun.job.ranks import Ranks
from unirun.job.state import (
    ROLE_WORKS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    Verdict,
    WorkerPhase,
    WorkerState,
)
from unirun.master.persistence.documents import Changes, Documents, as_json, blocks, hold, numbered, pieces
from unirun.master.persistence.placements import (
    inventory_documents,
    placement_documents,
    placement_head,
    read_inventory,
    read_placement,
)
from unirun.spec import JobSpec
from unirun.wire.reports import CallCount, Join

SCHEMA = 5

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
_fields_of_job = attrgetter(
    *("uid", "phase", "started", "ended", "logs", "placement"),
    *("asked_to_stop", "forgotten", "verdict", "owned"),
)
"""The fields of the state that are in the document ``job``."""

_WORDS = {None: "-", False: "n", True: "y"}
_SAID = {letter: said for said, letter in _WORDS.items()}
_PHASES = {letter: phase for phase, letter in _LETTERS.items()}


def urgent(before: JobState, after: JobState) -> bool:
    """Whether `after` has decisions or ends of workers that `before` has not: nothing may follow from them before
    they are in the store. What agents can tell again is not urgent."""
    if before is after:
        return False
    return not _is_same_job(before, after) or any(
        role is not (old := before.roles[name]) and (_decided(old) != _decided(role) or _turned(old, role))
        for name, role in after.roles.items()
    )


def _is_same_job(before: JobState, after: JobState) -> bool:
    # After most events all of it is the same values.
    return _fields_of_job(before) == _fields_of_job(after) or _of_job(before) == _of_job(after)


def _decided(role: RoleState) -> tuple[Any, ...]:
    return (role.phase in ROLE_WORKS or role.phase, role.generation, role.opened, role.restarts)


def _turned(before: RoleState, after: RoleState) -> bool:
    """Whether workers were ordered or have ended, or trainers have told whether they are recoverable."""

    def decided(worker: WorkerState) -> tuple[Any, ...]:
        recoverable = worker.recoverable if after.kind == "trainer" else None
        return worker.incarnation, worker.live, worker.exit, recoverable

    changed = after.workers.since(before.workers)
    return any(was is None or decided(was) != decided(now) for was, now in changed)


def changed_documents(before: JobState | None, after: JobState) -> Changes:
    """The documents of `after` that differ from those of `before` (None: there are none yet); None to delete one."""
    found: Changes = {}
    if before is None:
        found |= pieces("spec", after.spec.to_json())
        found |= inventory_documents(after.inventory)
    if before is None or before.placement is not after.placement:
        found |= placement_documents(
            before.placement if before else None, after.placement, tuple(after.roles)
        )
    if before is None or before.agents is not after.agents:
        nodes = after.nodes
        old = [before.agents.get(node) for node in nodes] if before else []
        size = max(1, min(_NODES, _ENDPOINTS // len(after.roles)))
        found |= blocks("nodes", size, old, [after.agents.get(node) for node in nodes], _agents)
    heads = _heads(after)
    if before is None or _heads(before) != heads:
        found["roles"] = as_json(heads)
    found |= blocks("ranks", _RANKS, _workers(before), _workers(after), _ranks)
    found |= _failures(before, after)
    if before is None or not _is_same_job(before, after):
        found["job"] = as_json(_of_job(after))
    return found


def observations(before: JobState | None, after: JobState) -> Changes:
    """The same for what is only of use to readers."""
    old, new = _workers(before), _workers(after)
    return blocks("seen", _SEEN, old, new, _seen) | _calls(before, after)


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
    rows = [row for block in numbered("seen", documents) for row in json.loads(block)]
    at = 0
    for role in state.roles.values():
        workers = list(role.workers)
        # They are not written all at once: the last ones may not be there yet.
        for rank, (incarnation, pid, addresses) in enumerate(rows[at : at + len(workers)]):
            worker = workers[rank]
            if worker.live and worker.incarnation == incarnation:
                workers[rank] = replace(worker, pid=pid, addresses=addresses)
        at += len(workers)
        state = state.with_role(replace(role, workers=Ranks(workers)))
    return state


def _restored(job: dict[str, Any], documents: Documents) -> JobState:
    spec = JobSpec.from_json(json.loads("".join(numbered("spec", documents))))
    placement = read_placement(job["placement"], [role.name for role in spec.roles], documents)
    rows = list(_read_ranks(documents))
    roles = {}
    heads = json.loads(documents["roles"])
    hold(len(rows) == sum(head[4] for head in heads.values()), "ranks")
    at = 0
    for role in spec.roles:
        phase, generation, opened, restarts, count, elsewhere, cause = heads[role.name]
        here = placement.of_role(role.name)
        hold([place.rank for place in here] == list(range(len(here))) and 0 < len(here) <= count, "placement")
        where = {place.rank: (place.node, place.own) for place in here}
        where |= {int(rank): (node, tuple(own)) for rank, (node, own) in elsewhere.items()}
        placed = (
            replace(row, rank=rank, node=where[rank][0], own=where[rank][1])
            for rank, row in enumerate(rows[at : at + count])
        )
        workers = Ranks(_with_calls(role.name, worker, documents) for worker in placed)
        at += count
        roles[role.name] = RoleState(
            role.name,
            role.entry.kind,
            role.restart,
            workers,
            RolePhase(phase),
            generation,
            opened,
            restarts,
            cause=cause,
        )
    agents = [convert(row, Join) for block in numbered("nodes", documents) for row in json.loads(block)]
    return JobState(
        spec=spec,
        placement=placement,
        roles=roles,
        started=job["started"],
        logs=job["logs"],
        phase=JobPhase(job["phase"]),
        agents={agent.node: agent for agent in agents},
        failures=tuple(_read_failures(documents, job["forgotten"])),
        verdict=convert(job["verdict"], Verdict | None),
        ended=job["ended"],
        asked_to_stop=job["asked_to_stop"],
        forgotten=job["forgotten"],
        uid=job["uid"],
        owned=job["owned"],
        cause=job["cause"],
        inventory=read_inventory(documents),
    )


def _of_job(state: JobState) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "uid": state.uid,
        "phase": state.phase.value,
        "started": state.started,
        "ended": state.ended,
        "logs": state.logs,
        "placement": placement_head(state.placement),
        "asked_to_stop": state.asked_to_stop,
        "forgotten": state.forgotten,
        "verdict": to_builtins(state.verdict),
        "owned": state.owned,
        "cause": state.cause,
    }


def _heads(state: JobState) -> dict[str, list[Any]]:
    return {
        name: [
            role.phase.value,
            role.generation,
            role.opened,
            role.restarts,
            len(role.workers),
            _elsewhere(state, role),
            role.cause,
        ]
        for name, role in state.roles.items()
    }


def _elsewhere(state: JobState, role: RoleState) -> dict[str, Any]:
    """By rank, where workers are, or were, that are not where the placement has their rank."""
    if not state.placement.lost:
        return {}
    places = state.placement.of_role(role.name)
    return {
        str(worker.rank): [worker.node, worker.own]
        for worker in role.workers
        if worker.rank >= len(places)
        or (worker.node, worker.own) != (places[worker.rank].node, places[worker.rank].own)
    }


def _workers(state: JobState | None) -> list[WorkerState]:
    return [worker for role in state.roles.values() for worker in role.workers] if state else []


def _ranks(workers: Sequence[WorkerState]) -> Any:
    return {
        "phase": "".join(_LETTERS[worker.phase] for worker in workers),
        "incarnation": [worker.incarnation for worker in workers],
        "generation": [worker.generation for worker in workers],
        "exit": {n: [w.exit.code, w.exit.signal] for n, w in enumerate(workers) if w.exit is not None},
        "recoverable": "".join(_WORDS[worker.recoverable] for worker in workers),
    }


def _read_ranks(documents: Documents) -> Iterator[WorkerState]:
    for block in numbered("ranks", documents):
        columns = json.loads(block)
        exits = columns["exit"]
        names = ("phase", "incarnation", "generation", "recoverable")
        rows = zip(*(columns[name] for name in names), strict=True)
        for n, (letter, incarnation, generation, word) in enumerate(rows):
            end = exits.get(str(n))
            yield WorkerState(
                0,
                "",
                incarnation,
                _PHASES[letter],
                exit=Exit(*end) if end else None,
                generation=generation,
                recoverable=_SAID[word],
            )


def _seen(workers: Sequence[WorkerState]) -> Any:
    return [[worker.incarnation, worker.pid, dict(worker.addresses)] for worker in workers]


def _calls(before: JobState | None, after: JobState) -> Changes:
    found: Changes = {}
    for role in after.roles.values():
        known = before.roles[role.name].workers if before else Ranks()
        for was, worker in role.workers.since(known):
            if (worker.calls, worker.called) != ((was.calls, was.called) if was else ((), ())):
                counts = to_builtins((worker.incarnation, worker.calls, worker.called))
                found[f"calls/{role.name}/{worker.rank}"] = as_json(counts)
    return found


def _with_calls(role: str, worker: WorkerState, documents: Documents) -> WorkerState:
    """What a rank has called was written of an earlier incarnation, perhaps."""
    text = documents.get(f"calls/{role}/{worker.rank}")
    if text is None:
        return worker
    counts = tuple[CallCount, ...]
    incarnation, calls, called = convert(json.loads(text), tuple[int, counts, counts])
    if incarnation == worker.incarnation:
        return replace(worker, calls=calls, called=called)
    return replace(worker, called=added(called, calls))


def _agents(agents: Sequence[Join | None]) -> Any:
    return [
        {"node": agent.node, "pid": agent.pid, "host": agent.host, "endpoints": agent.endpoints}
        for agent in agents
        if agent is not None
    ]


def _failures(before: JobState | None, after: JobState) -> Changes:
    """Failures are numbered from the first of the job; a block with forgotten ones stays until it has no other."""
    first, end = after.forgotten, after.forgotten + len(after.failures)
    known_first = before.forgotten if before else 0
    known_end = known_first + len(before.failures) if before else 0
    found: Changes = {}
    for block in range(max(known_end, first) // _FAILURES, -(-end // _FAILURES)) if end > known_end else ():
        low = max(block * _FAILURES, first)
        part = after.failures[low - first : (block + 1) * _FAILURES - first]
        found[f"failures/{block}"] = as_json({"first": low, "failures": to_builtins(part)})
    # Of many at once, some may be forgotten before they were ever written.
    for block in range(known_first // _FAILURES, min(first // _FAILURES, -(-known_end // _FAILURES))):
        found[f"failures/{block}"] = None
    return found


def _read_failures(documents: Documents, forgotten: int) -> Iterator[Failure]:
    expected = forgotten
    for block in numbered("failures", documents):
        content = json.loads(block)
        failures = convert(content["failures"], tuple[Failure, ...])
        for number, failure in enumerate(failures, content["first"]):
            if number >= forgotten:
                hold(number == expected, "failures")
                expected += 1
                yield failure
