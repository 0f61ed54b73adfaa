"""The rows of the tables of phases: those that a history has used, and histories for those that few have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import KILL, TERM, Job
from tests.unit.failover.multi_node import gone, nodes, workloads
from tests.unit.failover.services import Services, program, service
from unirun.failover import draft, phases
from unirun.failover.crashes import abort_step, begin_abort
from unirun.failover.draft import Event
from unirun.failover.phases import (
    JOB_CHANGES,
    LIVE,
    NOT_TOLD_TO_END,
    ROLE_CHANGES,
    WORKER_CHANGES,
    Phase,
    PhaseEvent,
)
from unirun.failover.state import ROLE_WORKS, JobPhase, JobState, RolePhase, Verdict, WorkerPhase
from unirun.failover.takeover import resume
from unirun.spec.job import Entry, Restart, RoleSpec
from unirun.values import WorkerId
from unirun.wire.messages import Drain, Stop
from unirun.wire.reports import (
    Ending,
    FromWorker,
    Health,
    HeldWorker,
    Join,
    Placed,
    Resilient,
    Serving,
    StoreEnded,
    WorkerRunning,
    WorkerStarted,
)

Row = tuple[str, Phase, PhaseEvent | None, Phase]
"""The kind of phase, the phase before, the event, and the phase that follows."""

VERDICT = Verdict(JobPhase.FAILED, 1, "a bug")


def row(before: Phase, event: PhaseEvent | None, then: Phase) -> Row:
    return type(then).__name__, before, event, then


EVERY_ROW = frozenset(
    row(before, event, then)
    for phases_before, event, then, _ in (*JOB_CHANGES, *ROLE_CHANGES, *WORKER_CHANGES)
    for before in phases_before
)


def name_of(one: Row) -> str:
    _, before, event, then = one
    return f"{one[0]}: {before}, {event.name if event else None}: {then}"


@contextmanager
def recorded() -> Iterator[Counter[Row]]:
    """The rows that are used meanwhile."""
    used: Counter[Row] = Counter()

    def is_allowed(before: Phase, event: PhaseEvent | None, then: Phase) -> bool:
        used[row(before, event, then)] += 1
        return phases.is_allowed(before, event, then)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "is_allowed", is_allowed)
        yield used


# A worker, alone in a role of workloads, in each phase that it can be in.


WHO = WorkerId("actor", 0, 0)

SERVES = FromWorker(WHO, Serving({"socket": "a"}, True))


def worker(phase: WorkerPhase, *, incarnation: int = 0) -> Job:
    job = Job({"actor": 1}, kinds={"actor": "workload"}, restarts={"actor": 1}).launched()
    if incarnation:
        job.exits("actor", 0, by=KILL)
    who = WHO._replace(incarnation=incarnation)
    news: list[Event] = [
        WorkerStarted(who, 7),
        WorkerRunning(who, incarnation),
        FromWorker(who, Serving({"socket": "a"}, True)),
    ]
    job.on(*news[: LIVE.index(phase)])
    assert job.state.roles["actor"].workers[0].phase is phase
    return job


def joined(job: Job, *workers: HeldWorker, ending: Ending | None = None) -> Job:
    return job.on(Join("n0", 1, "n0", {"actor": "127.0.0.1:1"}, workers, (), ending))


def held(then: WorkerPhase) -> HeldWorker:
    at = LIVE.index(then)
    return HeldWorker(WHO, 7 if at > 0 else None, at > 1, serving=at > 2)


def told(before: WorkerPhase, then: WorkerPhase) -> Job:
    return joined(worker(before), held(then))


def aborted(state: JobState) -> JobState:
    return begin_abort(state, VERDICT, 200.0)[0]


SUCCESS = Ending("succeeded", 0, "actor succeeded")

FORWARD = [(a, b) for a in LIVE for b in LIVE[1:] if LIVE.index(a) < LIVE.index(b)]


def histories_of_workers() -> Iterator[tuple[Row, Callable[[], object]]]:
    def on(
        before: WorkerPhase, event: PhaseEvent, then: WorkerPhase, do: Callable[[Job], object], **more: int
    ) -> None:
        found.append((row(before, event, then), lambda: do(worker(before, **more))))

    found: list[tuple[Row, Callable[[], object]]] = []
    exited = WorkerPhase.EXITED
    for phase in LIVE:
        on(phase, PhaseEvent.ENDED, exited, lambda job: job.exits("actor", 0, 1))
        on(phase, PhaseEvent.NODE_LOST, exited, lambda job: job.on(gone("n0")))
        on(phase, PhaseEvent.ABORTED, exited, lambda job: aborted(replace(job.state, agents={})))
        on(phase, PhaseEvent.SEEN_TO_SUCCEED, exited, lambda job: joined(job, ending=SUCCESS))
        on(phase, PhaseEvent.NOT_HELD, WorkerPhase.WAITING, joined)
        on(phase, PhaseEvent.NOT_HELD, exited, joined, incarnation=1)
        if phase is not WorkerPhase.STARTING:
            on(phase, PhaseEvent.TAKEN_OVER, WorkerPhase.STARTING, lambda job: resume(job.state, 200.0))
        if phase is not WorkerPhase.SERVING:
            on(phase, PhaseEvent.SERVES, WorkerPhase.SERVING, lambda job: job.on(SERVES))
    for before, then in (*FORWARD, (WorkerPhase.SERVING, WorkerPhase.RUNNING)):
        found.append((row(before, PhaseEvent.HELD, then), partial(told, before, then)))
    yield from found
    seen = row(WorkerPhase.WAITING, PhaseEvent.SEEN_TO_SUCCEED, exited)
    yield seen, lambda: joined(joined(stays_away()), ending=SUCCESS)
    for before in (WorkerPhase.STARTING, WorkerPhase.ALIVE, WorkerPhase.RUNNING, WorkerPhase.SERVING):
        for ready, event, then in (
            (True, PhaseEvent.READY, WorkerPhase.SERVING),
            (False, PhaseEvent.UNREADY, WorkerPhase.RUNNING),
        ):
            if before is not then:
                yield row(before, event, then), partial(probed, before, ready=ready)
    for before in (WorkerPhase.STARTING, WorkerPhase.ALIVE):
        member = row(before, PhaseEvent.MEMBER_RUNS, WorkerPhase.SERVING)
        yield member, partial(member_runs, before)


def stays_away() -> Job:
    """A master has come; of two nodes one has not joined it, so that no worker is started."""
    job = Job({"actor": 2}, nodes=("n0", "n1")).launched()
    job.state, _ = resume(job.state, 200.0)
    return job


def probed(before: WorkerPhase, *, ready: bool) -> Job:
    """A probe of an engine in some phase."""
    job, who = Services(service(), program()).begin(), WorkerId("engine", 0, 0)
    news: list[Event] = [WorkerStarted(who, 7), WorkerRunning(who, 0), FromWorker(who, Health(True, 1.0, ""))]
    return job.on(*news[: LIVE.index(before)], FromWorker(who, Health(ready, 2.0, "why")))


def member_runs(before: WorkerPhase) -> Job:
    job, who = Services(service(count=2, group=2), program()).begin(), WorkerId("engine", 1, 0)
    return job.on(*[WorkerStarted(who, 7)][: LIVE.index(before)], WorkerRunning(who, 0))


# A role of two ranks in each phase that it can be in, on the only node.


def role(phase: RolePhase) -> Job:
    if phase is RolePhase.WAITING:
        return Job({"actor": 2})
    if phase is RolePhase.REFORMING:
        return (
            Job({"actor": 2}, kinds={"actor": "workload"}, restarts={"actor": 1})
            .launched()
            .exits("actor", 0, by=KILL)
        )
    job = Job({"actor": 2}, restarts={"actor": 1})
    job = job.launched() if phase is RolePhase.STARTING else job.running()
    return job.exits("actor", 0, 1) if phase is RolePhase.RESTARTING else job


def histories_of_roles() -> Iterator[tuple[Row, Callable[[], object]]]:
    found: list[tuple[Row, Callable[[], object]]] = []

    def on(before: RolePhase, event: PhaseEvent, then: RolePhase, do: Callable[[Job], object]) -> None:
        def history() -> object:
            job = role(before)
            assert job.state.roles["actor"].phase is before
            return do(job)

        found.append((row(before, event, then), history))

    for phase in ROLE_WORKS:
        ends = lambda job: job.exits("actor", 1, by=TERM, asked=TERM, cause="leaving")  # noqa: E731
        on(phase, PhaseEvent.AGENT_LEAVES, RolePhase.STOPPING, ends)
        on(phase, PhaseEvent.SEEN_TO_SUCCEED, RolePhase.SUCCEEDED, lambda job: joined(job, ending=SUCCESS))
    for phase in (RolePhase.STARTING, RolePhase.RUNNING):
        both = lambda job: job.exits("actor", 0).exits("actor", 1)  # noqa: E731
        on(phase, PhaseEvent.ALL_SUCCEEDED, RolePhase.SUCCEEDED, both)
    for phase in NOT_TOLD_TO_END:
        on(phase, PhaseEvent.ABORTED, RolePhase.STOPPING, lambda job: aborted(job.state))
        on(phase, PhaseEvent.TOLD_TO_END, RolePhase.STOPPING, lambda job: job.on(Stop(TERM, "enough")))
    yield from found
    ended = row(RolePhase.STOPPING, PhaseEvent.ABORTED, RolePhase.STOPPED)
    yield ended, lambda: abort_step(aborted(role(RolePhase.RUNNING).state), gone("n0"), 201.0)
    yield row(RolePhase.RUNNING, PhaseEvent.STORE_ENDED, RolePhase.REFORMING), store_ends
    yield row(RolePhase.REFORMING, PhaseEvent.ALL_SUCCEEDED, RolePhase.SUCCEEDED), all_leave_before_the_store
    yield row(RolePhase.RUNNING, PhaseEvent.PROGRAMS_RESTART, RolePhase.STARTING), programs_move
    yield row(RolePhase.REFORMING, PhaseEvent.ROLE_RESTARTS, RolePhase.RESTARTING), shrinks
    yield row(RolePhase.SUCCEEDED, PhaseEvent.ROLE_RESTARTS, RolePhase.RESTARTING), starts_again_with_the_job
    yield row(RolePhase.REFORMING, PhaseEvent.NO_PLACE, RolePhase.STOPPING), has_no_place_alone
    yield row(RolePhase.RESTARTING, PhaseEvent.NO_PLACE, RolePhase.STOPPING), has_no_place
    yield row(RolePhase.REFORMING, PhaseEvent.GIVEN_UP, RolePhase.STOPPING), fails_again_in_place
    for before in (RolePhase.WAITING, RolePhase.STARTING, RolePhase.RUNNING, RolePhase.RESTARTING):
        as_a_whole = row(before, PhaseEvent.GIVEN_UP, RolePhase.STOPPING)
        yield as_a_whole, partial(given_up, before, restart="role")
    yield row(RolePhase.REFORMING, PhaseEvent.GIVEN_UP, RolePhase.FAILED), fails_again
    for before in (RolePhase.WAITING, RolePhase.STARTING, RolePhase.RESTARTING):
        rank = row(before, PhaseEvent.GIVEN_UP, RolePhase.FAILED)
        yield rank, partial(given_up, before, restart="process")
    yield row(RolePhase.RUNNING, PhaseEvent.GIVEN_UP, RolePhase.FAILED), last_fails
    for before in (*ROLE_WORKS, RolePhase.RESTARTING):
        yield row(before, PhaseEvent.NONE_WANTED, RolePhase.FAILED), partial(last_leaves, before)


def store_ends() -> Job:
    return workloads().on(StoreEnded("actor", 0, 1.0, "it was killed"))


def all_leave_before_the_store() -> Job:
    """All ranks end with 0 when their store is gone, and before there is another one."""
    job = workloads()
    job.stores_open = False
    job.on(StoreEnded("actor", 0, 1.0, "it was killed"))
    for worker in job.state.roles["actor"].live:
        job.exits("actor", worker.rank)
    return job


def programs_move() -> Job:
    job = Job({"train": 2}, kinds={"train": "program"}, inventory=nodes(2, 2))
    spec = replace(job.state.spec, roles=(replace(job.state.role_spec("train"), contract="none"),))
    there = replace(job.state.roles["train"], is_program=True)
    job.state = replace(job.state.with_role(there), spec=spec)
    return job.running().on(Drain("n0"))


def shrinks(restarts: int = 2) -> Job:
    """An elastic role loses a node while it forms a generation, and there is no other."""
    job = workloads(restarts, of=3, least={"actor": 2})
    spec = job.state.spec
    elastic = tuple(replace(each, elastic=each.name == "actor") for each in spec.roles)
    job.state = replace(job.state, spec=replace(spec, roles=elastic))
    return job.exits("actor", 0, by=KILL).on(gone("n1"))


def starts_again_with_the_job() -> Job:
    job = Job({"actor": 1, "rollout": 1}).running().exits("actor", 0)
    job.state = replace(job.state, spec=replace(job.state.spec, max_job_restarts=1))
    return job.exits("rollout", 0, 1)


def has_no_place_alone() -> Job:
    """Two ranks had succeeded when their node was lost, and then another one fails."""
    return workloads(of=3).exits("actor", 2).exits("actor", 3).on(gone("n1")).exits("actor", 0, by=KILL)


def has_no_place() -> Job:
    job = Job({"actor": 4}, restarts={"actor": 1}, inventory=nodes(2)).running()
    job.exits("actor", 2).exits("actor", 3).on(gone("n1"))
    return job.exits("actor", 0, 1).exits("actor", 1, by=TERM, asked=TERM)


def given_up(before: RolePhase, *, restart: Restart) -> Services:
    """An optional service of one rank that cannot start, or fails too often, in some phase."""
    engine = service(optional=True, restart=restart, max_restarts=0)
    if before is RolePhase.RUNNING:
        engine = RoleSpec("engine", 1, Entry("script", "a.py"), service=True, optional=True)
        return Services(engine, program()).running().dies()
    job = Services(engine, program())
    if before is RolePhase.STARTING:
        return job.begin().dies()
    no_ports = Placed("n0", "engine", (0,), (), "no port is free")
    if before is RolePhase.RESTARTING:
        job.up().dies(taken=True)
        restarting = replace(job.state.roles["engine"], phase=before)
        job.state = job.state.with_role(restarting)
    return (job if before is RolePhase.RESTARTING else job.launched()).on(no_ports)


def fails_again() -> Services:
    """An optional service whose ranks start again alone fails before it has formed its next generation."""
    return Services(optional(1, restart="process"), program()).running().dies().dies()


def fails_again_in_place() -> Services:
    """The same of scripts in a function that survives."""
    job = Services(optional(2, restart="role"), program()).running()
    for rank in (0, 1):
        job.on(FromWorker(WorkerId("engine", rank, 0), Resilient(inside=True)))
    return job.dies().dies()


def optional(count: int, *, restart: Restart) -> RoleSpec:
    """An optional service of scripts, which may start again once."""
    entry = Entry("script", "a.py")
    return RoleSpec(
        "engine", count, entry, service=True, optional=True, restart=restart, max_restarts=1, slots=0.0
    )


def last_fails() -> Services:
    """As `last_leaves`, but the other fails before it has got the order to end."""
    job = Services(service(count=2, group=2, optional=True, max_restarts=0), program()).up().dies()
    assert job.phases()["engine"] == "running"
    return job.dies(rank=1)


def last_leaves(before: RolePhase) -> Services:
    """The job goes on without a group of two, of which one has failed and the other has to end."""
    job = Services(service(count=2, group=2, optional=True, max_restarts=0), program())
    job = job.begin() if before is RolePhase.STARTING else job.up()
    job.dies()
    assert job.ended == [("engine", [1], TERM)]
    job.state = job.state.with_role(replace(job.state.roles["engine"], phase=before))
    return job.exits("engine", 1, by=TERM, asked=TERM)


def histories_of_jobs() -> Iterator[tuple[Row, Callable[[], object]]]:
    for job in (Job({"actor": 1}), Job({"actor": 1}).launched()):
        yield row(job.state.phase, PhaseEvent.ABORTED, JobPhase.STOPPING), partial(aborted, job.state)


HISTORIES = dict((*histories_of_jobs(), *histories_of_roles(), *histories_of_workers()))
"""Histories that use a row, by the row. The simulation need not have it."""
