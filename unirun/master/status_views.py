"""What others are told of the job as a whole: the CLI that follows it, and ``unirun status``."""

from __future__ import annotations

from collections.abc import Mapping

from unirun.failover.blast_radius import learned, waiting
from unirun.graph import LearnedEdge
from unirun.job.failures import Failure
from unirun.job.state import JOB_ENDS, JobState
from unirun.job.transition import output_of
from unirun.observe import FAILURES, CallStatus, FailureStatus, JobStatus, RoleStatus, Summary, WorkerStatus
from unirun.wire.messages import Ended, Message, RoleChanged

FIRST_LINE = 300
"""Characters of what a worker has said that a status has."""


def present(state: JobState) -> list[Message]:
    """What a CLI that has just attached must know: how far the roles are, and which workers have a process."""
    found: list[Message] = []
    for role in state.roles.values():
        found.append(
            RoleChanged(role.name, role.phase.value, role.generation, role.running, len(role.workers))
        )
        found += [
            output_of(state, role.name, worker.rank) for worker in role.workers if worker.pid is not None
        ]
    return found


def farewell(state: JobState) -> Ended | None:
    """What is told at a job's end; None before."""
    verdict = state.verdict
    if verdict is None or state.phase not in JOB_ENDS:
        return None
    return Ended(verdict.code, verdict.phase.value, verdict.report, verdict.error_file)


def status_of(
    state: JobState, memory: Mapping[str, int], cpu: Mapping[str, float], *, epoch: int = 0, trouble: str = ""
) -> JobStatus:
    """The state as the document that ``unirun status`` reads; `memory` and `cpu` by ``role:rank``.

    `epoch` is the master's term, `trouble` what keeps it from writing its decisions.
    """
    roles = tuple(
        RoleStatus(
            name=role.name,
            phase=role.phase.value,
            generation=role.generation,
            restarts=role.restarts,
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
                    generation=worker.generation,
                    metrics=dict(worker.metrics),
                )
                for worker in role.workers
            ),
        )
        for role in state.roles.values()
    )
    ended = state.phase in JOB_ENDS
    return JobStatus(
        run_id=state.spec.run_id,
        name=state.spec.name,
        phase=state.phase.value,
        reason=state.verdict.reason if state.verdict else "",
        started=state.started,
        ended=state.ended,
        code=state.verdict.code if ended and state.verdict else None,
        roles=roles,
        epoch=epoch,
        trouble=trouble,
        failures=tuple(_failure(failure) for failure in state.failures[-FAILURES:]),
        failed=state.forgotten + len(state.failures),
        calls=tuple(_call(edge) for edge in learned(state)),
        spares=state.placement.spares,
        lost=state.placement.lost,
        waiting=waiting(state),
    )


def summary_of(state: JobState) -> Summary:
    """The state as the line that ``unirun ls`` reads."""
    return Summary(
        run_id=state.spec.run_id,
        uid=state.uid,
        name=state.spec.name,
        phase=state.phase.value,
        started=state.started,
        ended=state.ended,
        code=state.verdict.code if state.verdict and state.phase in JOB_ENDS else None,
        roles={role.name: len(role.workers) for role in state.roles.values()},
    )


def _call(seen: LearnedEdge) -> CallStatus:
    edge = seen.edge
    return CallStatus(
        source=edge.source,
        target=edge.target,
        method=edge.invocation,
        kind=edge.kind,
        direction=edge.direction,
        asynchronous=edge.asynchronous,
        weight=edge.weight,
        calls=seen.calls,
        bytes=seen.bytes,
        returned=seen.returned,
        seconds=seen.seconds,
    )


def _failure(failure: Failure) -> FailureStatus:
    words = (failure.message or failure.note).strip()
    return FailureStatus(
        role=failure.worker.role,
        rank=failure.worker.rank,
        incarnation=failure.worker.incarnation,
        node=failure.node,
        time=failure.time,
        exit=str(failure.exit),
        message=words.splitlines()[0][:FIRST_LINE] if words else "",
        decision=failure.decision,
    )
