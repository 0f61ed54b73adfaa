"""The status of a job for ``unirun status``, and the messages for CLIs that attach to it or leave at its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from unirun.failover.diagnosis import record_of
from unirun.failover.draft import output_of, role_changed
from unirun.failover.policy import learned, waiting
from unirun.failover.readiness import waiting_to_start
from unirun.failover.state import JOB_ENDS, Failure, JobState
from unirun.observe.status import (
    FAILURES,
    CallStatus,
    FailureStatus,
    JobStatus,
    RoleStatus,
    WorkerStatus,
    shaped,
)
from unirun.wire.messages import Ended
from unirun.wire.reports import DEBUGGER, Message

FIRST_LINE = 300
"""Characters of a failure's message in a status."""


def present(state: JobState) -> list[Message]:
    """The messages for a CLI that attaches: the phase of each role, and the workers that have a process."""
    found: list[Message] = []
    for role in state.roles.values():
        found.append(role_changed(role))
        found += [
            output_of(state, role.name, worker.rank) for worker in role.workers if worker.pid is not None
        ]
    return found


def farewell(state: JobState) -> Ended | None:
    """The message at a job's end; None before."""
    verdict = state.verdict
    if verdict is None or state.phase not in JOB_ENDS:
        return None
    return Ended(verdict.code, verdict.phase.value, verdict.report, verdict.error_file)


def status_of(
    state: JobState,
    memory: Mapping[str, int],
    cpu: Mapping[str, float],
    *,
    epoch: int = 0,
    trouble: str = "",
    stragglers: tuple[str, ...] = (),
    steps: Mapping[str, int] = MappingProxyType({}),
    gpus: Mapping[str, tuple[float, int]] = MappingProxyType({}),
) -> JobStatus:
    """The state as the document that ``unirun status`` reads; `memory`, `cpu`, `steps` and `gpus` by ``role:rank``, as
    in a `Sample`.

    `epoch` is the master's term, `trouble` what keeps it from writing its decisions, `stragglers` are told in words.
    """
    roles = tuple(
        shaped(
            RoleStatus,
            role,
            phase=role.phase.value,
            program=state.role_spec(role.name).entry.target if role.is_program else "",
            max_restarts=state.role_spec(role.name).max_restarts,
            workers=tuple(
                WorkerStatus(
                    rank=worker.rank,
                    phase=worker.phase.value,
                    node=worker.node,
                    incarnation=worker.incarnation,
                    pid=worker.pid if worker.live else None,
                    exit=str(worker.exit) if worker.exit else "",
                    memory=memory.get(f"{role.name}:{worker.rank}") if worker.live else None,
                    cpu=cpu.get(f"{role.name}:{worker.rank}") if worker.live else None,
                    step=steps.get(f"{role.name}:{worker.rank}", -1) if worker.live else -1,
                    gpu=gpus.get(f"{role.name}:{worker.rank}") if worker.live else None,
                    generation=worker.generation,
                    metrics=dict(worker.metrics),
                    address=worker.place.addr() if worker.place is not None else "",
                    ready=worker.health.ready if worker.health is not None else None,
                    since=worker.health.since if worker.health is not None else 0.0,
                    why=worker.health.why if worker.health is not None else "",
                    slots=worker.own,
                )
                for worker in role.workers
            ),
        )
        for role in state.roles.values()
    )
    return shaped(
        JobStatus,
        state.spec,
        state.placement,
        state,
        phase=state.phase.value,
        reason=state.verdict.reason if state.verdict else "",
        code=state.code,
        roles=roles,
        lost=tuple(node for node in state.placement.lost if node not in state.left),
        committed=state.commits.step,
        epoch=epoch,
        trouble=trouble,
        failures=tuple(_failure(failure) for failure in state.failures[-FAILURES:]),
        failed=state.forgotten + len(state.failures),
        calls=tuple(
            shaped(CallStatus, seen.edge, seen, method=seen.edge.invocation) for seen in learned(state)
        ),
        waiting=(*_debugged(state), *waiting_to_start(state), *waiting(state)),
        sick=tuple(f"{node}: {sign}" for node, sign in state.sick.items()),
        stragglers=stragglers,
    )


def _debugged(state: JobState) -> tuple[str, ...]:
    """The ranks that a debugger holds, in words."""
    workers = ((role.name, worker) for role in state.roles.values() for worker in role.workers)
    return tuple(f"{name}:{w.rank} {text}" for name, w in workers if (text := w.addresses.get(DEBUGGER)))


def _failure(failure: Failure) -> FailureStatus:
    words = (failure.message or failure.note).strip()
    message = words.splitlines()[0][:FIRST_LINE] if words else ""
    return replace(record_of(failure), message=message, note="", traceback="", tail="")
