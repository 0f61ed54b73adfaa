"""A role that runs again after a failure is asked for its steps."""

from __future__ import annotations

from tests.unit.failover.job import KILL, TERM, Job
from unirun.failover.state import RoleState
from unirun.values import WorkerId
from unirun.wire.messages import FollowSteps
from unirun.wire.reports import Cause, WorkerExited


def dies(job: Job, rank: int, step: int, *, asked: int | None = None) -> Job:
    worker = WorkerId("actor", rank, job.state.roles["actor"].workers[rank].incarnation)
    cause: Cause = "own" if asked is None else "order"
    by = KILL if asked is None else asked
    return job.on(WorkerExited(worker, job.now, None, by, cause, asked, step=step))


def role(job: Job) -> RoleState:
    return job.state.roles["actor"]


def test_it_is_asked_for_what_comes_after_the_furthest_step_of_all_that_have_ended() -> None:
    job = Job({"actor": 2}, restarts={"actor": 1}).running()
    assert job.orders(FollowSteps) == []
    dies(dies(job, 0, 57), 1, 58, asked=TERM)
    failed = job.state.failures[0]
    assert failed.step == 57
    job.all_run("actor")
    (order,) = job.orders(FollowSteps)
    assert (order.role, order.generation, order.furthest) == ("actor", 1, 58)
    assert 0 < order.age < job.now - failed.noticed + 0.001
    # The next failure counts for itself.
    assert [worker.step for worker in role(job).workers] == [-1, -1]


def test_of_two_failures_before_it_runs_again_the_further_one_counts() -> None:
    job = Job({"actor": 1}, restarts={"actor": 3}).running()
    dies(dies(job, 0, 57), 0, -1)
    assert [order.furthest for order in job.all_run("actor").orders(FollowSteps)] == [57]


def test_ranks_of_which_nobody_knows_the_steps_are_asked_all_the_same() -> None:
    """Survivors know how far they were."""
    job = Job({"actor": 1}, restarts={"actor": 1}).running()
    assert [order.furthest for order in dies(job, 0, -1).all_run("actor").orders(FollowSteps)] == [-1]
