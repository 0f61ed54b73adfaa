"""Only a master's decision makes a generation: whatever an agent says, no worker is in one that is to come."""

from __future__ import annotations

from signal import SIGKILL

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.failover.takeover import held, take_over
from tests.unit.failover.workloads import serving, workload
from unirun.errors import Refused
from unirun.failover.draft import Event
from unirun.values import WorkerId
from unirun.wire.reports import (
    FromWorker,
    GroupFormed,
    StoreEnded,
    StoreOpened,
    WorkerExited,
    WorkerRunning,
)


def launched() -> Job:
    return workload().launched()


def words_of_an_agent(generation: int) -> list[Event]:
    """All messages of an agent that name a generation of actor:0, or of the role."""
    ends = WorkerExited(WorkerId("actor", 0, 0), 1.0, 1, None, "own", None, met=generation)
    return [
        FromWorker(WorkerId("actor", 0, 0), GroupFormed(generation)),
        WorkerRunning(WorkerId("actor", 0, 0), generation),
        StoreOpened("actor", generation),
        StoreEnded("actor", generation, 1.0, "killed"),
        ends,
    ]


@given(st.integers(-2, 3) | st.integers(), st.data())
def test_no_word_of_an_agent_brings_a_generation_about(generation: int, data: st.DataObject) -> None:
    """The master decides each one, and the next is one more."""
    job = data.draw(st.sampled_from([serving, launched]))()
    before = job.state.roles["actor"]
    word = data.draw(st.sampled_from(words_of_an_agent(generation)))
    try:
        job.on(word)
    except Refused as refused:
        assert generation > before.generation
        assert f"actor has no generation {generation} yet" in str(refused)
    else:
        formed = isinstance(word, FromWorker) and isinstance(word.message, GroupFormed)
        later = formed and generation > before.generation
        assert not later, "it is taken at its word"
    role = job.state.roles["actor"]
    assert before.generation <= role.generation <= before.generation + 1
    assert all(worker.generation <= role.generation for worker in role.workers)


@given(st.integers(-2, 3) | st.integers())
def test_nor_does_what_an_agent_holds_when_it_finds_another_master(generation: int) -> None:
    job = serving()
    before = job.state
    take_over(job)
    workers = before.roles["actor"].workers
    holds = [replace(held(before, worker, "actor"), generation=generation) for worker in workers]
    stores = (StoreOpened("actor", generation),)
    job.on(replace(job.join("n0"), workers=tuple(holds), stores=stores))
    role = job.state.roles["actor"]
    assert role.generation == before.roles["actor"].generation
    assert all(worker.generation <= role.generation for worker in role.workers)


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_a_stuck_rank_that_may_have_got_calls_of_the_present_generation_has_its_successor_in_the_next(
    served: bool, opened: bool
) -> None:
    """Rank 2 dies. Rank 1 does not come out of the generation that this has ended, so its agent kills it. Others may
    begin a call of the present generation once a worker holds rank 1 in it. That one must have the call."""
    job = serving() if served else launched()
    job.stores_open = opened
    job.exits("actor", 2, by=SIGKILL).exits("actor", 1, by=SIGKILL, cause="stuck")
    job.stores_open = True
    if not opened:
        job.on(StoreOpened("actor", 1))
    role = job.state.roles["actor"]
    assert role.generation == (2 if served and opened else 1)
    assert role.restarts == 1
    assert [(worker.incarnation, worker.live) for worker in role.workers] == [
        (0, True),
        (1, True),
        (1, True),
        (0, True),
    ]
