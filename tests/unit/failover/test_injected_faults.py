"""A fault that is asked for goes to the agent of the rank, and the end of the worker follows from it."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import KILL, Job
from tests.unit.failover.services import Services, program, service
from unirun.failover.draft import Record
from unirun.wire.messages import Inject, Injected
from unirun.wire.reports import Notice


def cause_of(job: Job, kind: str) -> str:
    return next(each.cause for each in job.commands if isinstance(each, Record) and each.kind == kind)


def test_the_agent_gets_it_for_the_present_worker_and_everybody_is_told() -> None:
    job = Job({"actor": 2}, restarts={"actor": 1}).running().on(Inject("actor", 1, "sigkill"))
    assert job.orders(Inject) == [Inject("actor", 1, "sigkill", incarnation=0)]
    assert job.told(Injected) == [Injected("actor", 1)]
    assert job.told(Notice) == [Notice("actor:1", "the fault sigkill is injected")]
    assert job.records == "inject: the fault sigkill is injected into actor:1"


def test_the_end_of_the_worker_follows_from_it_and_that_of_another_does_not() -> None:
    job = Job({"actor": 2}, restarts={"actor": 2}).running().on(Inject("actor", 1, "sigkill"))
    (injected,) = [each.id for each in job.commands if isinstance(each, Record)]
    assert cause_of(job.exits("actor", 1, by=KILL), "exit") == injected
    job = Job({"actor": 2}, restarts={"actor": 2}).running().on(Inject("actor", 1, "sigstop"))
    assert cause_of(job.exits("actor", 0, 1), "exit") == ""


def test_the_next_worker_of_the_rank_has_no_fault() -> None:
    job = Job({"actor": 1}, restarts={"actor": 2}).running().on(Inject("actor", 0, "sigkill"))
    job.exits("actor", 0, by=KILL).all_run("actor")
    assert cause_of(job.exits("actor", 0, 1), "exit") == ""


def test_a_program_takes_signals_only() -> None:
    job = Services(service(), program()).up()
    job.on(Inject("engine", 0, "hang"))
    (answer,) = job.told(Injected)
    assert answer.problem == "engine:0: it is a program, and hang needs a Python worker; signals are possible"
    assert job.on(Inject("engine", 0, "slow", 2.0)).told(Injected) == [Injected("engine", 0)]


@pytest.mark.parametrize(
    ("role", "rank", "problem"),
    [
        ("actor", 1, "actor:1: it has no process now"),
        ("actor", 2, "actor:2: there is no such rank"),
        ("actor", -1, "actor:-1: there is no such rank"),
        ("critic", 0, "critic:0: there is no such rank"),
    ],
)
def test_a_rank_without_a_process_gets_none(role: str, rank: int, problem: str) -> None:
    job = Job({"actor": 2}).running().exits("actor", 1, 0).on(Inject(role, rank, "segv"))
    assert (job.orders(Inject), job.told(Injected)) == ([], [Injected(role, rank, problem)])
