"""The failures of a job are read from its event log, with the durations of the recovery."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from unirun.observe.events import Durations, LoggedEvent, consequences, failures
from unirun.observe.status import FailureStatus

FAILED = FailureStatus(
    "actor", 1, 0, "n0", 10.0, "exit code 3", decision="restart", cause="nan", noticed=10.25
)


def event(
    number: int, time: float, kind: str, *about: str, cause: int | None = None, **details: Any
) -> LoggedEvent:
    """An event that follows from another one."""
    return LoggedEvent(
        f"1-{number}",
        time,
        kind,
        kind,
        cause="" if cause is None else f"1-{cause}",
        about=about,
        details=details,
    )


def failed(number: int, time: float, cause: int, record: FailureStatus = FAILED) -> LoggedEvent:
    return event(number, time, "failure", record.who, cause=cause, failure=to_builtins(record))


RECOVERY = [
    event(1, 9.0, "running", "actor"),
    event(2, 10.5, "exit", "actor:1"),
    failed(3, 10.5, 2),
    event(4, 10.5, "decision", "actor:1", cause=2),
    event(5, 10.75, "restart", "actor", cause=4),
    event(6, 11.0, "started", "actor:0", cause=5),
    event(7, 11.5, "started", "actor:1", cause=5),
    event(8, 11.75, "running", "critic", cause=5),
    event(9, 12.5, "running", "actor", cause=5),
    event(10, 13.0, "join", "n1"),
]


def test_a_recovery_has_its_parts() -> None:
    (found,) = failures(RECOVERY)
    assert (found.number, found.id, found.record) == (1, "1-3", FAILED)
    assert found.durations == Durations(detect=0.25, decide=0.25, respawn=1.0, rejoin=1.0, away=2.5)


def test_a_recovery_that_is_not_over_has_the_parts_that_are() -> None:
    (found,) = failures(RECOVERY[:6])
    assert found.durations == Durations(detect=0.25, decide=0.25)


def test_a_job_that_ends_does_not_recover() -> None:
    ends = [*RECOVERY[:4], event(5, 11.0, "stopping"), event(6, 12.0, "running", "actor")]
    (found,) = failures(ends)
    assert found.durations == Durations(detect=0.25, decide=0.25)


STEPS = {"first": 50, "furthest": 57}


def test_a_role_that_goes_on_at_an_earlier_step_has_lost_steps_until_it_has_caught_up() -> None:
    resumed = event(11, 12.75, "resumed", "actor", **STEPS)
    (behind,) = failures([*RECOVERY, event(12, 12.6, "resumed", "critic", first=0, furthest=9), resumed])
    assert (behind.steps_lost, behind.durations.useful) == (7, None)
    (level,) = failures([*RECOVERY, resumed, event(13, 14.0, "caught_up", "actor", **STEPS)])
    assert (level.steps_lost, level.durations.useful, level.durations.away) == (7, 1.5, 2.5)


def test_steps_after_the_next_failure_of_the_role_are_of_that_one() -> None:
    resumed = event(11, 12.75, "resumed", "actor", **STEPS)
    again = [failed(14, 13.0, 2), event(15, 13.5, "running", "actor"), event(16, 15.0, "caught_up", "actor")]
    first, second = failures([*RECOVERY, resumed, *again])
    assert (first.steps_lost, first.durations.useful) == (7, None)
    assert (second.steps_lost, second.durations.useful) == (None, 1.5)


def test_two_failures_that_are_handled_together_end_together() -> None:
    second = FailureStatus("actor", 0, 0, "n0", 10.6, "killed by SIGTERM", noticed=10.7)
    both = [
        *RECOVERY[:4],
        event(20, 10.7, "exit", "actor:0", cause=4),
        failed(21, 10.7, 20, second),
        *RECOVERY[4:],
    ]
    assert [each.number for each in failures(both)] == [1, 2]
    assert [each.durations.away for each in failures(both)] == [2.5, 1.9]
    # Nothing was decided about it any more.
    assert [each.durations.decide for each in failures(both)] == [0.25, None]


def test_a_clock_that_is_behind_gives_no_negative_time() -> None:
    early = FailureStatus("actor", 1, 0, "n0", 20.0, "exit code 3", noticed=10.25)
    (found,) = failures([RECOVERY[1], failed(3, 10.5, 2, early)])
    assert found.durations.detect == 0.0


def test_the_consequences_of_a_failure_are_all_that_follows_from_its_exit() -> None:
    (found,) = failures(RECOVERY)
    assert [each.id for each in consequences(RECOVERY, found)] == [f"1-{n}" for n in range(2, 10)]


def test_a_record_of_another_version_is_left_out() -> None:
    strange = [event(1, 1.0, "failure", failure={"who": "actor:1"}), event(2, 1.0, "failure")]
    assert list(failures(strange)) == []


def test_consequences_of_an_exit_whose_line_was_lost_are_those_of_the_failure() -> None:
    lost = [each for each in RECOVERY if each.id != "1-2"]
    (found,) = failures(lost)
    assert [each.id for each in consequences(lost, found)] == [f"1-{n}" for n in range(3, 10)]
