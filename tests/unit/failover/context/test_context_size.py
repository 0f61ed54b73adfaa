"""The context of a job has a moderate size, however large the job is and whatever its workers say."""

from __future__ import annotations

import random

import pytest

from tests.unit.failover.context.states import kept, many
from tests.unit.failover.job import Job
from unirun.failover.context import MAX_BYTES, decode, encode
from unirun.failover.state import KEPT_FAILURES, Exit, Failure, JobState, WorkerPhase
from unirun.failover.step import step
from unirun.values import WorkerId
from unirun.wire.reports import FromWorker, Join, Serving, WorkerError, WorkerRunning, WorkerStarted


def joined(state: JobState) -> JobState:
    for number, node in enumerate(state.placement.nodes):
        endpoints = dict.fromkeys(state.roles, f"[2001:db8::{number:x}]:54321")
        state, _ = step(state, Join(node, number, node, endpoints), 2.0)
    return state


def running(state: JobState) -> JobState:
    rng = random.Random(1)
    for name, role in state.roles.items():
        for rank in range(len(role.workers)):
            state, _ = step(state, WorkerStarted(WorkerId(name, rank, 0), rng.randrange(1 << 22)), 3.0)
            state, _ = step(state, WorkerRunning(WorkerId(name, rank, 0), 0), 3.0)
    return state


def test_ten_thousand_running_ranks_take_one_transaction() -> None:
    state = running(joined(many(10_000, 1250)))
    text = encode(state)
    assert len(text) < MAX_BYTES // 2
    assert decode(text) == kept(state)


@pytest.mark.parametrize(
    "state",
    [many(1000, 10, cpus=tuple(range(384))), many(600, 3, roles=200)],
    ids=["many processors", "many roles"],
)
def test_other_large_jobs_take_one_transaction_too(state: JobState) -> None:
    state = joined(state)
    assert len(encode(state)) < MAX_BYTES // 2
    assert decode(encode(state)) == kept(state)


def test_failures_take_little_whatever_they_say() -> None:
    job = Job({"actor": 1}, restarts={"actor": 20}).running()
    flood = "é\x00\n😀" * 50_000
    for _ in range(16):
        job.exits("actor", 0, 1, error=WorkerError(flood, flood, job.now), note=flood)
    assert len(job.state.failures) == 16
    assert len(encode(job.state)) < 256 * 1024
    assert decode(encode(job.state)) == kept(job.state)


def test_failures_are_forgotten_in_their_order() -> None:
    state = Job({"actor": 1}).running().state
    for number in range(700):
        state = state.with_failures(
            Failure(WorkerId("actor", 0, number), 0, "n0", float(number), Exit(code=1))
        )
    found = decode(encode(state))
    assert found == kept(state)
    assert [failure.worker.incarnation for failure in found.failures] == list(range(444, 700))
    assert found.forgotten == 700 - KEPT_FAILURES


class TestWhatReadersSee:
    def test_what_readers_see_are_the_pids_and_addresses_of_workers(self) -> None:
        job = Job({"actor": 2}, kinds={"actor": "workload"}).running()
        job.on(FromWorker(WorkerId("actor", 1, 0), Serving({"socket": "a:1"}, True)))
        workers = decode(encode(job.state)).roles["actor"].workers
        assert [w.pid for w in workers] == [1, 2]
        assert [dict(w.addresses) for w in workers] == [{}, {"socket": "a:1"}]

    def test_what_readers_see_of_a_worker_that_has_a_successor_is_gone(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running()
        job.exits("actor", 0, 1)
        (worker,) = decode(encode(job.state)).roles["actor"].workers
        assert (worker.incarnation, worker.pid, worker.phase) == (1, None, WorkerPhase.STARTING)
