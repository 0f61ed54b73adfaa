"""Errors that end masters: how often each has is in the store, and after three times the job is not led any more."""

from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace

from tests.unit.failover.context.faulty_store import FaultyStore
from tests.unit.failover.job import Job
from unirun.errors import IllegalTransition, StoreRefused
from unirun.failover.crashes import (
    CRASH_RESET_SECONDS,
    MAX_MASTERS_IN_ALL,
    MAX_MASTERS_PER_ERROR,
    Crash,
    crash_of,
    fatal,
    read_crashes,
    reason_of,
    record_crash,
    report_of,
    with_crash,
)
from unirun.failover.draft import JobDraft
from unirun.rendezvous.election import Term, campaign
from unirun.rendezvous.store.protocol import Put
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Stop
from unirun.wire.reports import WorkerExited

EXIT = WorkerExited(WorkerId("actor", 7, 2), 1.0, 1, None)


def error(text: str = "nobody") -> Exception:
    """The error that the core raises, through some of its frames."""
    with pytest.raises(IllegalTransition) as caught:
        JobDraft(Job({"actor": 1}).state, 1.0).role(text)
    return caught.value


def crash(epoch: int = 1, *, lasted: float = 0.5, by: Exception | None = None) -> Crash:
    return crash_of(by or error(), epoch, lasted, [Stop(15, "before"), EXIT])


def term(store: FaultyStore, deposing: int = 0) -> Term:
    won = campaign(store, "jobs/job-1/", UnixAddress("/x", "host"), 7, ttl=60, deposing=deposing)
    assert won is not None
    return won


class TestACrash:
    def test_a_crash_is_known_by_its_class_and_the_line_of_unirun_that_it_comes_from(self) -> None:
        found = crash()
        assert re.fullmatch(r"IllegalTransition in \w*role\w* \(draft\.py:\d+\)", found.cause)
        assert found.cause == crash(by=error("somebody")).cause
        assert found.message.endswith("there is no role nobody")
        assert "JobDraft(" in found.traceback

    def test_a_crash_of_other_code_is_known_by_its_line(self) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            _ = 1 / 0
        assert crash(by=caught.value).cause.startswith("ZeroDivisionError in test_a_crash_of_other_code")

    def test_a_crash_tells_the_latest_events(self) -> None:
        story = crash_of(error(), 1, 1.0, [Stop(15, f"number {n}") for n in range(3)]).story
        assert story == tuple(repr(Stop(15, f"number {n}")) for n in range(3))

    def test_a_crash_tells_of_a_huge_event_the_beginning(self) -> None:
        found = crash_of(error("x" * 100_000), 1, 1.0, [Stop(15, "y" * 1_000_000)])
        assert len(json.dumps([found.story, found.message, found.traceback])) < 12_000


class TestAnErrorIsFatal:
    def test_an_error_is_fatal_when_it_has_ended_three_masters(self) -> None:
        crashes: tuple[Crash, ...] = ()
        for epoch in range(1, MAX_MASTERS_PER_ERROR + 1):
            assert fatal(crashes) is None
            crashes = with_crash(crashes, crash(epoch))
        found = fatal(crashes)
        assert found is not None
        assert found.epoch == MAX_MASTERS_PER_ERROR

    def test_an_error_is_fatal_whatever_else_has_ended_masters_meanwhile(self) -> None:
        other = crash(by=ValueError("x"))
        crashes: tuple[Crash, ...] = ()
        for each in (crash(1), other, crash(2), other, crash(3)):
            assert fatal(crashes) is None
            crashes = with_crash(crashes, each)
        assert fatal(crashes) == crash(3)

    def test_an_error_is_fatal_when_it_is_the_last_of_six_that_are_not_the_same(self) -> None:
        crashes: tuple[Crash, ...] = ()
        for epoch in range(MAX_MASTERS_IN_ALL):
            assert fatal(crashes) is None
            crashes = with_crash(crashes, replace(crash(epoch), cause=f"number {epoch % 3}"))
        assert fatal(crashes) == crashes[-1]

    def test_an_error_is_fatal_but_not_when_masters_have_led_for_long_before_it_came_again(self) -> None:
        crashes: tuple[Crash, ...] = ()
        for epoch in range(1, 10):
            crashes = with_crash(crashes, crash(epoch, lasted=CRASH_RESET_SECONDS))
        assert fatal(crashes) is None

    def test_an_error_is_fatal_and_stays_so(self) -> None:
        crashes = tuple(crash(n) for n in range(MAX_MASTERS_PER_ERROR))
        assert fatal(with_crash(crashes, crash(9, lasted=2 * CRASH_RESET_SECONDS))) is not None

    def test_an_error_is_fatal_and_what_is_told_of_it_has_the_event_its_story_and_the_traceback(self) -> None:
        assert reason_of(crash()).startswith(
            "one master after another was ended by a bug in unirun: IllegalTransition"
        )
        report = report_of(crash(), "/jobs/x/master.log").splitlines()
        assert report[0] == f"job failed: {reason_of(crash())}"
        assert report[1].startswith(
            "the event that could not be handled: WorkerExited(worker=WorkerId(role='actor', rank=7"
        )
        assert report[2] == "before it:"
        assert "Stop(" in report[3]
        assert any("Traceback" in line for line in report)
        assert report[-1] == "  log: /jobs/x/master.log"


class TestInTheStore:
    def test_crashes_in_the_store_are_added_up_over_terms(self) -> None:
        store = FaultyStore()
        assert read_crashes(store, "job-1") == ()
        for epoch in range(1, 4):
            record_crash(store, "job-1", term(store, epoch - 1), crash(epoch))
        assert [each.epoch for each in read_crashes(store, "job-1")] == [1, 2, 3]

    def test_crashes_in_the_store_not_more_are_kept_than_are_of_use(self) -> None:
        store = FaultyStore()
        now = term(store)
        for epoch in range(50):
            record_crash(store, "job-1", now, crash(epoch))
        assert len(read_crashes(store, "job-1")) == MAX_MASTERS_IN_ALL

    def test_crashes_in_the_store_one_of_a_term_that_is_over_does_not_count(self) -> None:
        store = FaultyStore()
        old = term(store)
        term(store, 1)
        record_crash(store, "job-1", old, crash())
        assert read_crashes(store, "job-1") == ()

    def test_crashes_in_the_store_what_somebody_else_has_written_is_refused(self) -> None:
        store = FaultyStore()
        store.txn([], [Put("jobs/job-1/crashes", '[{"colour": "red"}]')])
        with pytest.raises(StoreRefused, match="which no unirun has written"):
            read_crashes(store, "job-1")
