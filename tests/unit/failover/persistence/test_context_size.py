"""The documents of a job's state are small, and few are written, however large the job is."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import Job
from tests.unit.failover.persistence.documents import applied, kept, many, written
from unirun.failover.draft import Event
from unirun.failover.persistence.context import changed_documents, restore
from unirun.failover.state import Exit, Failure, JobState, WorkerPhase
from unirun.failover.step import step
from unirun.values import WorkerId
from unirun.wire.reports import (
    FromWorker,
    Join,
    Serving,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

MOST = 256_000
"""Bytes of one document."""


def joined(state: JobState) -> JobState:
    for number, node in enumerate(state.placement.nodes):
        endpoints = dict.fromkeys(state.roles, f"[2001:db8::{number:x}]:54321")
        state, _ = step(state, Join(node, number, node, endpoints), 2.0)
    return state


def largest(news: dict[str, str | None]) -> int:
    return max(len((text or "").encode()) for text in news.values())


@pytest.fixture(scope="module")
def big() -> JobState:
    """10 000 ranks on 1 250 nodes, all ordered."""
    return joined(many(10_000, 1250))


class TestTenThousandRanks:
    def test_ten_thousand_ranks_are_in_documents_of_moderate_size(self, big: JobState) -> None:
        assert largest(changed_documents(None, big)) < MOST
        assert restore(written(big)) == kept(big)

    def test_ten_thousand_ranks_change_few_documents_with_each_event(self, big: JobState) -> None:
        events: list[tuple[Event, int]] = [
            (WorkerStarted(WorkerId("role0", 77, 0), 5), 1),
            (WorkerRunning(WorkerId("role0", 77, 0), 0), 1),
            (WorkerExited(WorkerId("role0", 77, 0), 3.0, 0, None), 1),
            (
                WorkerExited(WorkerId("role0", 5_000, 0), 3.0, 1, None, note="x"),
                4,
            ),  # ranks, failures, roles, job
        ]
        state = big
        for event, most in events:
            after, _ = step(state, event, 4.0)
            news = changed_documents(state, after)
            assert len(news) <= most, event
            assert largest(news) < MOST
            state = after
        assert changed_documents(state, state) == {}

    def test_ten_thousand_ranks_that_are_bound_to_many_processors_are_in_small_documents_too(self) -> None:
        state = many(1000, 10, cpus=tuple(range(384)))
        assert largest(changed_documents(None, state)) < MOST
        assert restore(written(state)) == kept(state)

    def test_ten_thousand_ranks_of_many_roles_have_small_documents_of_nodes(self) -> None:
        state = joined(many(600, 3, roles=200))
        assert largest(changed_documents(None, state)) < MOST
        assert restore(written(state)) == kept(state)


def test_a_block_of_failures_is_small_whatever_they_say() -> None:
    job = Job({"actor": 1}, restarts={"actor": 20}).running()
    flood = "é\x00\n😀" * 50_000
    for _ in range(16):
        job.exits("actor", 0, 1, error=WorkerError(flood, flood, job.now), note=flood)
    assert len(job.state.failures) == 16
    assert largest(changed_documents(None, job.state)) < 256 * 1024
    assert restore(written(job.state)) == kept(job.state)


def test_failures_that_are_forgotten_leave_no_document_behind() -> None:
    state = Job({"actor": 1}).running().state
    documents = written(state)
    for number in range(700):
        failure = Failure(WorkerId("actor", 0, number), 0, "n0", float(number), Exit(code=1))
        after = state.with_failures(failure)
        news = changed_documents(state, after)
        assert len([name for name, text in news.items() if text is not None]) <= 2
        documents, state = applied(documents, news), after
        blocks = [name for name in documents if name.startswith("failures/")]
        assert len(blocks) <= 256 // 8 + 1
    assert [failure.worker.incarnation for failure in restore(documents).failures] == list(range(444, 700))
    assert restore(documents) == kept(state)


def test_many_failures_at_once_may_follow_few() -> None:
    state = Job({"actor": 1}).running().state
    documents = written(state)
    for size in (3, 300, 1, 600, 8):
        more = [Failure(WorkerId("actor", 0, n), 0, "n0", 1.0, Exit(code=1)) for n in range(size)]
        after = state.with_failures(*more)
        documents, state = applied(documents, changed_documents(state, after)), after
        assert restore(documents) == kept(state)
        assert len([name for name in documents if name.startswith("failures/")]) <= 33


class TestWhatReadersSee:
    def test_what_readers_see_are_the_pids_and_addresses_of_workers(self) -> None:
        job = Job({"actor": 2}, kinds={"actor": "workload"}).running()
        job.on(FromWorker(WorkerId("actor", 1, 0), Serving({"socket": "a:1"}, True)))
        workers = restore(written(job.state)).roles["actor"].workers
        assert [w.pid for w in workers] == [1, 2]
        assert [dict(w.addresses) for w in workers] == [{}, {"socket": "a:1"}]

    def test_what_readers_see_of_a_worker_that_has_a_successor_is_gone(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running()
        job.exits("actor", 0, 1)
        (worker,) = restore(written(job.state)).roles["actor"].workers
        assert (worker.incarnation, worker.pid, worker.phase) == (1, None, WorkerPhase.STARTING)

    def test_what_readers_see_is_written_anew_only_where_it_has_changed(self, big: JobState) -> None:
        after, _ = step(big, WorkerStarted(WorkerId("role0", 601, 0), 5), 3.0)
        assert sorted(changed_documents(big, after)) == ["ranks/role0/6"]
