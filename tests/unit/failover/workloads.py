"""Jobs of workloads, whose workers restart alone."""

from __future__ import annotations

from tests.unit.failover.job import Job
from unirun.values import WorkerId
from unirun.wire.messages import RoleView, View
from unirun.wire.reports import FromWorker, GroupFormed, Serving, WorkerRunning


def workload(count: int = 4, restarts: int = 3, **more: object) -> Job:
    """A role ``actor`` that serves calls, and a trainer, which is primary."""
    return Job(
        {"actor": count, "trainer": 1},
        kinds={"actor": "workload", "trainer": "trainer"},
        restarts={"actor": restarts, "trainer": restarts},
        primary=("trainer",),
        **more,  # type: ignore[arg-type]
    )


def up(job: Job, role: str = "actor", *, recoverable: bool = True) -> Job:
    """Every worker of `role` that lives runs and serves."""
    for worker in job.state.roles[role].live:
        who = role, worker.rank, worker.incarnation
        job.on(
            WorkerRunning(WorkerId(*who), worker.generation),
            FromWorker(WorkerId(*who), Serving({"socket": f"{role}{worker.rank}"}, recoverable)),
        )
    return job


def serving(**more: object) -> Job:
    return up(up(workload(**more).running()), "trainer")  # type: ignore[arg-type]


def reformed(job: Job) -> Job:
    """Let all workers that were started for an earlier generation form the present one, and serve."""
    role = job.state.roles["actor"]
    for worker in role.live:
        if worker.generation < role.generation:
            job.on(
                FromWorker(WorkerId("actor", worker.rank, worker.incarnation), GroupFormed(role.generation))
            )
    return up(job)


def seen(job: Job, role: str = "actor") -> RoleView:
    """The view of `role` that workers were told last."""
    (found,) = (each for each in job.orders(View)[-1].roles if each.name == role)
    return found
