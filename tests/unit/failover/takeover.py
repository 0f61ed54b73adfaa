"""A job whose master dies and another goes on, with what the agents still hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from tests.unit.failover.invariants import check_job
from tests.unit.failover.job import Job
from unirun.failover.context import decode, encode
from unirun.failover.draft import Command, ToAgent
from unirun.failover.state import JobState, WorkerPhase, WorkerState
from unirun.failover.takeover import resume
from unirun.values import WorkerId
from unirun.wire.messages import StartRole
from unirun.wire.reports import (
    Cause,
    Ending,
    HeldWorker,
    Join,
    OpenStore,
    StoreEnded,
    StoreOpened,
    WorkerExited,
)

Who = tuple[str, int, int]


TWO = ("n0", "n1")


def take_over(job: Job) -> list[Command]:
    """The job's master dies, and another loads what is in the store. Returns what is done at once."""
    job.now += 2.0
    job.state, commands = resume(decode(encode(job.state)), job.now)
    check_job(job.state)
    return commands


def held(state: JobState, worker: WorkerState, role: str) -> HeldWorker:
    """The worker as its agent holds it."""
    up = worker.phase in (WorkerPhase.RUNNING, WorkerPhase.SERVING)
    serving = worker.phase is WorkerPhase.SERVING
    recoverable = bool(worker.recoverable)
    who = WorkerId(role, worker.rank, worker.incarnation)
    addresses = dict(worker.addresses)
    return HeldWorker(
        who, worker.pid, up, worker.generation, addresses, serving, recoverable, health=worker.health
    )


def join(
    job: Job,
    before: JobState,
    node: str = "n0",
    *,
    lost: Collection[Who] = (),
    lost_stores: Collection[str] = (),
    ended: Iterable[WorkerExited] = (),
    stores: Iterable[OpenStore | StoreOpened | StoreEnded] = (),
    ending: Ending | None = None,
) -> Job:
    """An agent finds the new master. It holds what was ordered `before`, but what was `lost`; some have `ended`."""
    exits = {end.worker: end for end in ended}
    workers = [
        held(before, worker, role.name)
        for role in before.roles.values()
        for worker in role.live
        if worker.node == node and (role.name, worker.rank, worker.incarnation) not in lost
    ]
    workers = [replace(w, exit=exits.pop(w.worker, None)) for w in workers]
    workers += [HeldWorker(who, exit=end) for who, end in exits.items()]
    given = {store.role: store for store in stores}
    its_stores = [
        given.get(role.name)
        or (StoreOpened if role.opened == role.generation else OpenStore)(role.name, role.generation)
        for role in before.roles.values()
        if role.workers[0].node == node and role.name not in lost_stores
    ]
    endpoints = dict(before.agents[node].endpoints)
    return job.on(Join(node, 1, node, endpoints, tuple(workers), tuple(its_stores), ending))


def rejoin(job: Job, **more: object) -> Job:
    """The only node finds the new master."""
    before = job.state
    take_over(job)
    return join(job, before, **more)  # type: ignore[arg-type]


def end(
    role: str,
    rank: int,
    code: int | None = 1,
    by: int | None = None,
    *,
    incarnation: int = 0,
    sent: int | None = None,
    cause: Cause = "own",
) -> WorkerExited:
    return WorkerExited(WorkerId(role, rank, incarnation), 200.0, None if by else code, by, cause, sent)


def starts(job: Job) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """The ranks whose start is ordered: role, generation, ranks with their incarnations."""
    return [
        (o.role, o.generation, [(m.rank, m.incarnation) for m in o.members]) for o in job.orders(StartRole)
    ]


def kinds(job: Job, node: str | None = None) -> list[type]:
    return [
        type(c.message) for c in job.commands if isinstance(c, ToAgent) and (node is None or c.node == node)
    ]
