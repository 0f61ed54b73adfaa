"""The state of a job, as frozen values that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from unirun.collocation import Placement
from unirun.errors import IllegalTransition
from unirun.failover import Exit, Failure
from unirun.observe import JobStatus, RoleStatus, WorkerStatus
from unirun.spec import JobSpec, RoleSpec
from unirun.wire.messages import Join, Message, RoleChanged, WorkerStarted


class JobPhase(StrEnum):
    """A job is launching until every node has joined; it ends in one of the last three."""

    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class RolePhase(StrEnum):
    """`RESTARTING`: the old generation is being stopped; a new one starts when the last of it is gone."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class WorkerPhase(StrEnum):
    """`STARTING`: ordered; `ALIVE`: has a process; `RUNNING`: in the user's code."""

    WAITING = "waiting"
    STARTING = "starting"
    ALIVE = "alive"
    RUNNING = "running"
    EXITED = "exited"


JOB_ENDS = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED)
ROLE_ENDS = (RolePhase.SUCCEEDED, RolePhase.FAILED, RolePhase.STOPPED)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One rank and the worker that holds it."""

    rank: int
    node: str
    incarnation: int = 0
    phase: WorkerPhase = WorkerPhase.WAITING
    pid: int | None = None
    exit: Exit | None = None

    @property
    def live(self) -> bool:
        """Whether a process was ordered and has not ended."""
        return self.phase in (WorkerPhase.STARTING, WorkerPhase.ALIVE, WorkerPhase.RUNNING)


@dataclass(frozen=True, slots=True)
class RoleState:
    """One role; `workers` is in rank order."""

    name: str
    workers: tuple[WorkerState, ...]
    phase: RolePhase = RolePhase.WAITING
    generation: int = 0
    restarts: int = 0

    @property
    def live(self) -> tuple[WorkerState, ...]:
        """The workers with a process."""
        return tuple(worker for worker in self.workers if worker.live)

    @property
    def running(self) -> int:
        """How many workers are in the user's code or have left it well."""
        return sum(
            worker.phase is WorkerPhase.RUNNING or (worker.exit is not None and worker.exit.ok)
            for worker in self.workers
        )

    def with_worker(self, worker: WorkerState) -> RoleState:
        """This role with the worker of one rank replaced."""
        workers = (*self.workers[: worker.rank], worker, *self.workers[worker.rank + 1 :])
        return replace(self, workers=workers)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the job will end once every worker is gone. `by_failure`: the code is that of the root cause."""

    phase: JobPhase
    code: int
    reason: str
    by_failure: bool = False


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that the master knows. `failures` are those that were not asked for, in order of arrival."""

    spec: JobSpec
    placement: Placement
    roles: Mapping[str, RoleState]
    started: float
    logs: str
    phase: JobPhase = JobPhase.LAUNCHING
    agents: Mapping[str, Join] | None = None
    failures: tuple[Failure, ...] = ()
    verdict: Verdict | None = None
    ended: float | None = None

    def with_role(self, role: RoleState) -> JobState:
        """This state with one role replaced."""
        return replace(self, roles={**self.roles, role.name: role})

    def role_spec(self, name: str) -> RoleSpec:
        """The spec of a role."""
        return self.spec.role(name)

    @property
    def live(self) -> bool:
        """Whether any worker has a process."""
        return any(role.live for role in self.roles.values())

    def check(self) -> None:
        """Raise `IllegalTransition` unless the state is one that can be."""
        for role in self.roles.values():
            if [worker.rank for worker in role.workers] != list(range(len(role.workers))):
                raise IllegalTransition(f"role {role.name}: ranks are not 0..n-1")
            if role.phase in ROLE_ENDS and role.live:
                raise IllegalTransition(f"role {role.name} is {role.phase} and has live workers")
            if role.phase is RolePhase.RUNNING and role.running != len(role.workers):
                raise IllegalTransition(f"role {role.name} is running with {role.running} ranks")
            if role.restarts > self.role_spec(role.name).max_restarts:
                raise IllegalTransition(f"role {role.name}: {role.restarts} restarts are over its budget")
            if role.phase is RolePhase.SUCCEEDED and not all(w.exit and w.exit.ok for w in role.workers):
                raise IllegalTransition(f"role {role.name} succeeded without all of its workers")
        if self.phase in JOB_ENDS and (self.live or self.verdict is None or self.ended is None):
            raise IllegalTransition(f"the job is {self.phase} and not over")


def new_job(spec: JobSpec, placement: Placement, *, started: float, logs: str) -> JobState:
    """The state of a job before anything happened."""
    roles = {
        role.name: RoleState(
            role.name, tuple(WorkerState(a.rank, a.node) for a in placement.of_role(role.name))
        )
        for role in spec.roles
    }
    return JobState(spec, placement, roles, started, logs, agents={})


def present(state: JobState) -> list[Message]:
    """What a CLI that has just attached must know: how far the roles are, and which workers have a process."""
    found: list[Message] = []
    for role in state.roles.values():
        found.append(
            RoleChanged(role.name, role.phase.value, role.generation, role.running, len(role.workers))
        )
        found += [
            WorkerStarted(worker.node, role.name, worker.rank, worker.incarnation, worker.pid)
            for worker in role.workers
            if worker.pid is not None
        ]
    return found


def status_of(state: JobState, memory: Mapping[str, int], cpu: Mapping[str, float]) -> JobStatus:
    """The state as the document that ``unirun status`` reads; `memory` and `cpu` by ``role:rank``."""
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
    )
