"""States check themselves: one that cannot be is an error of the master, whatever has brought it about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.unit.failover.invariants import check_job, check_role
from tests.unit.failover.job import Job
from tests.unit.failover.multi_node import nodes, workloads
from unirun.errors import IllegalTransition
from unirun.failover.state import (
    KEPT_FAILURES,
    Exit,
    Failure,
    JobPhase,
    JobState,
    Ranks,
    RolePhase,
    RoleState,
    Verdict,
    WorkerPhase,
    WorkerState,
    new_job,
)
from unirun.values import WorkerId


def running() -> RoleState:
    """Three workloads that serve, in generation 2 with one restart of two."""
    worker = WorkerState(
        0, "n0", phase=WorkerPhase.SERVING, pid=1, generation=2, addresses={"socket": "a"}, recoverable=True
    )
    workers = Ranks(replace(worker, rank=rank, incarnation=rank) for rank in range(3))
    return RoleState("actor", "workload", "process", workers, RolePhase.RUNNING, 2, 2, 1)


def but(rank: int, **other: object) -> Callable[[RoleState], RoleState]:
    """The role with one worker otherwise."""
    return lambda role: role.with_worker(replace(role.workers[rank], **other))


def having(**other: object) -> Callable[[RoleState], RoleState]:
    return lambda role: replace(role, **other)


def gone(role: RoleState, code: int = 0) -> RoleState:
    return replace(role, workers=Ranks(worker.ended(Exit(code=code)) for worker in role.workers))


LEGAL: list[Callable[[RoleState], RoleState]] = [
    having(),
    having(restarts=2),
    but(1, phase=WorkerPhase.EXITED, exit=Exit(code=0), addresses={}),
    lambda role: but(1, generation=1)(replace(role, phase=RolePhase.REFORMING)),
    having(phase=RolePhase.REFORMING, opened=1),
    lambda role: replace(gone(role), phase=RolePhase.SUCCEEDED),
    lambda role: replace(gone(role, 1), phase=RolePhase.FAILED),
    lambda role: replace(gone(role, 1), phase=RolePhase.STOPPED),
    having(phase=RolePhase.STARTING),
]

ILLEGAL: list[tuple[str, Callable[[RoleState], RoleState]]] = [
    ("has ranks that are not 0..n-1", lambda role: replace(role, workers=Ranks(role.workers[1:]))),
    ("has ranks that are not 0..n-1", lambda role: replace(role, workers=Ranks(role.workers[::-1]))),
    ("is succeeded and has live workers", having(phase=RolePhase.SUCCEEDED)),
    ("is failed and has live workers", having(phase=RolePhase.FAILED)),
    ("is stopped and has live workers", having(phase=RolePhase.STOPPED)),
    ("is running with 2 ranks", but(1, phase=WorkerPhase.RUNNING, addresses={})),
    ("is running with 2 ranks", but(1, phase=WorkerPhase.EXITED, exit=Exit(code=1), addresses={})),
    ("is running with 3 ranks", but(1, generation=1)),
    ("is running with 3 ranks", having(opened=1)),
    ("is reforming and complete", having(phase=RolePhase.REFORMING)),
    ("reforms, which it cannot", having(phase=RolePhase.REFORMING, restart="role", opened=1)),
    ("has 3 restarts, which is over its budget", having(restarts=3)),
    ("has a store of generation 3, which is to come", having(opened=3, phase=RolePhase.STARTING)),
    ("has rank 1 started more often than it was formed", but(1, incarnation=3)),
    ("has rank 2 in a generation that is to come", lambda r: replace(but(2, generation=3)(r), phase=RolePhase.STARTING)),
    (
        "has rank 0 called though it is away",
        lambda r: replace(but(0, phase=WorkerPhase.RUNNING)(r), phase=RolePhase.STARTING),
    ),
    ("succeeded without all of its workers", lambda role: replace(gone(role, 1), phase=RolePhase.SUCCEEDED)),
]  # fmt: skip


@pytest.mark.parametrize("change", LEGAL)
def test_a_role_in_a_legal_state_passes_the_check(change: Callable[[RoleState], RoleState]) -> None:
    check_role(change(running()), 2)


@pytest.mark.parametrize(("words", "change"), ILLEGAL)
def test_a_role_in_an_illegal_state_raises(words: str, change: Callable[[RoleState], RoleState]) -> None:
    with pytest.raises(IllegalTransition, match=f"^role actor {words}"):
        check_role(change(running()), 2)


def test_a_job_that_is_over_has_an_end_and_nobody_who_lives() -> None:
    job = Job({"actor": 1}).running().exits("actor", 0).state
    check_job(job)
    live = job.roles["actor"].workers[0]
    role = job.roles["actor"].with_worker(replace(live, phase=WorkerPhase.ALIVE))
    wrong = [
        replace(job, verdict=None),
        replace(job, ended=None),
        job.with_role(replace(role, phase=RolePhase.STOPPING)),
    ]
    for state in wrong:
        with pytest.raises(IllegalTransition, match="^the job is succeeded and not over"):
            check_job(state)
        check_job(replace(state, phase=JobPhase.STOPPING))


def test_the_roles_of_a_job_are_held_to_their_budgets() -> None:
    job = Job({"actor": 1}, restarts={"actor": 1}).running().state
    check_job(job.with_role(replace(job.roles["actor"], restarts=1)))
    with pytest.raises(IllegalTransition, match="2 restarts, which is over its budget"):
        check_job(job.with_role(replace(job.roles["actor"], restarts=2)))


def test_a_successor_has_what_its_rank_has_called_and_nothing_else() -> None:
    worker = replace(running().workers[1], metrics={"loss": 1.0}, exit=Exit(code=1), own=("0",))
    assert worker.ordered(5, 4, "n2", ("1",)) == WorkerState(
        1, "n2", 5, WorkerPhase.STARTING, generation=4, own=("1",)
    )
    ended = worker.ended(Exit(code=3))
    assert ended == replace(worker, phase=WorkerPhase.EXITED, exit=Exit(code=3), addresses={})


def test_failures_that_are_too_many_are_counted() -> None:
    failures = [
        Failure(WorkerId("actor", n, 0), 0, "n", float(n), Exit(code=1)) for n in range(KEPT_FAILURES + 3)
    ]
    state = Job({"actor": 1}).state.with_failures(*failures[:-1])
    assert (state.forgotten, state.failures[0].worker.rank) == (2, 2)
    state = state.with_failures(failures[-1])
    assert (state.forgotten, [each.worker.rank for each in state.failures]) == (
        3,
        list(range(3, KEPT_FAILURES + 3)),
    )


class TestNodes:
    def job(self) -> JobState:
        job = workloads(of=4).state
        return replace(job, placement=replace(job.placement, lost=("n3",)))

    def test_nodes_that_are_left(self) -> None:
        job = self.job()
        assert job.without(()) == ("n0", "n1", "n2")
        assert job.without({"n0"}) == ("n1", "n2")
        here = {name: agent for name, agent in job.agents.items() if name != "n2"}
        assert replace(job, agents=here).without({"n0"}) == ("n1",)
        assert replace(job, agents=here, phase=JobPhase.LAUNCHING).without({"n0"}) == ("n1", "n2")

    def test_nodes_that_are_given_up(self) -> None:
        job = self.job()
        assert [job.given_up(node) for node in ("n0", "n3", "n9")] == [False, True, True]
        assert job.nodes == ("n0", "n1", "n2", "n3")
        assert Job({"actor": 2}, nodes=("a", "b")).state.nodes == ("a", "b"), "as their ranks are there"

    def test_nodes_where_ranks_are_astray(self) -> None:
        job = self.job()
        role = job.roles["actor"]
        here = role.workers[1]
        assert not job.misplaced(role, here)
        assert job.misplaced(role, replace(here, node="n2"))
        assert job.misplaced(role, replace(here, own=("7",)))
        assert not job.misplaced(role, replace(here, node="n2").ended(Exit(code=0)))
        places = job.placement.assignments
        fewer = [p for p in places if p.role != "actor" or p.rank == 0]
        assert replace(job, placement=replace(job.placement, assignments=tuple(fewer))).misplaced(role, here)


def test_a_new_job_waits_where_its_ranks_are_placed() -> None:
    old = Job({"actor": 3}, inventory=nodes(2)).state
    job = new_job(old.spec, old.placement, started=5.0, logs="/logs", uid="u", inventory=old.inventory)
    assert (job.phase, job.started, job.logs, job.uid, job.owned) == ("launching", 5.0, "/logs", "u", False)
    role = job.roles["actor"]
    assert (role.kind, role.restart, role.phase) == ("script", "role", "waiting")
    places = job.placement.of_role("actor")
    assert [(w.rank, w.node, w.own) for w in role.workers] == [(p.rank, p.node, p.own) for p in places]
    assert not job.live
    assert job.verdict is None
    verdict = Verdict(JobPhase.FAILED, 1, "why")
    assert (verdict.by_failure, verdict.report, verdict.error_file) == (False, "", "")
