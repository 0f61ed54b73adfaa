"""Two nodes that do not hear each other, though both are heard, are named, and are the cause of what follows."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import Job
from tests.unit.failover.multi_node import nodes
from unirun.failover.diagnosis import likely_cause
from unirun.failover.draft import AgentLost, CutOff
from unirun.failover.state import CUT_SECONDS
from unirun.wire.reports import Notice, WorkerError

TEXT = "n0 and n1 do not hear each other"
TIMED_OUT = "RuntimeError: [gloo/x.cc:78] Timed out waiting 6000ms for recv operation to complete"


def running() -> Job:
    return Job({"actor": 3}, restarts={"actor": 9}, inventory=nodes(3, 1)).running()


def told(job: Job) -> list[str]:
    return [notice.text for notice in job.told(Notice)]


def test_a_pair_is_told_once_whoever_says_it() -> None:
    job = running().on(CutOff("n1", "n0"))
    assert told(job) == [f"{TEXT}, though both are heard: connections between them get no answer"]
    assert f"cut_off: {TEXT}" in job.records
    assert told(job.on(CutOff("n0", "n1"))) == []
    job.now += CUT_SECONDS * 0.75
    assert told(job.on(CutOff("n0", "n1"))) == []
    job.now += CUT_SECONDS * 0.75
    assert told(job.on(CutOff("n0", "n1"))) == []
    job.now += CUT_SECONDS
    assert len(told(job.on(CutOff("n0", "n1")))) == 1
    assert len(told(job.on(CutOff("n0", "n2")))) == 1


def test_it_is_the_likely_cause_of_a_wait_in_vain_and_of_no_other_error() -> None:
    for message, kind in ((TIMED_OUT, "cut_off"), ("ValueError: loss is nan", "exception")):
        job = running().on(CutOff("n1", "n0"))
        job.exits("actor", 0, 1, error=WorkerError(message, "", job.now))
        cause = likely_cause(job.state.failures[-1])
        assert cause.kind == kind
        assert (cause.words == TEXT) is (kind == "cut_off")
    job = running().exits("actor", 0, 1, error=WorkerError(TIMED_OUT, "", 100.0))
    assert likely_cause(job.state.failures[-1]).kind == "collective_timeout"


def test_it_is_the_cause_no_more_after_a_minute() -> None:
    job = running().on(CutOff("n1", "n0"))
    job.now += CUT_SECONDS
    job.exits("actor", 0, 1, error=WorkerError(TIMED_OUT, "", job.now))
    assert likely_cause(job.state.failures[-1]).kind == "collective_timeout"


@pytest.mark.parametrize("pair", [("n0", "n2"), ("n2", "n1")])
def test_a_node_that_is_given_up_is_no_news(pair: tuple[str, str]) -> None:
    job = running().on(AgentLost("n2", "gone"))
    assert told(job.on(CutOff(*pair))) == []
    assert job.state.cuts == ()


def test_it_is_forgotten_though_the_clock_was_set_back() -> None:
    job = running().on(CutOff("n0", "n1"))
    job.now -= 3600.0
    job.exits("actor", 0, 1, error=WorkerError(TIMED_OUT, "", job.now))
    assert job.state.failures[-1].rule == "exit"
    assert len(told(job.on(CutOff("n0", "n1")))) == 1
    assert len(job.state.cuts) == 1
