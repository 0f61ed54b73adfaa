"""The report names the cause last, with everything that is needed to find it."""

from __future__ import annotations

from unirun.failover.restart_or_end import diagnose, failure_report
from unirun.failover.state import Exit, Failure
from unirun.values import WorkerId


def fail(rank: int, time: float, **more: object) -> Failure:
    fields = {"exit": Exit(code=1), "log": f"/logs/actor/{rank}/0", **more}
    return Failure(WorkerId("actor", rank, 0), 0, "n0", time, **fields)  # type: ignore[arg-type]


def test_a_single_failure_needs_no_list() -> None:
    report = failure_report(
        "why", diagnose([fail(0, 1.0, message="ValueError: x", traceback="Trace\nValueError: x\n")])
    )
    assert report.splitlines() == [
        "job failed: why",
        "root cause: actor:0 on n0: exit code 1 (the only failure)",
        "  Trace",
        "  ValueError: x",
        "  log: /logs/actor/0/0/stderr.log",
    ]


def test_a_silent_death_shows_its_note_and_the_end_of_its_stderr() -> None:
    killed = fail(
        0, 1.0, exit=Exit(signal=9), note="the kernel killed it: out of memory", tail="step 1\nstep 2"
    )
    assert failure_report("why", diagnose([killed])).splitlines()[1:] == [
        "root cause: actor:0 on n0: killed by SIGKILL (the only failure)",
        "  the kernel killed it: out of memory",
        "  the end of its output:",
        "  step 1",
        "  step 2",
        "  log: /logs/actor/0/0/stderr.log",
    ]


def test_others_come_first_with_their_distance_in_time() -> None:
    cause = fail(0, 10.0, exit=Exit(signal=9))
    before = fail(1, 9.5, message="RuntimeError: Connection closed by peer\nmore")
    later = fail(2, 10.25, note="seen late")
    lines = failure_report("why", diagnose([before, cause, later])).splitlines()
    assert lines[1:4] == [
        "other failures (2):",
        "  actor:1 on n0: exit code 1, 0.500 s before: RuntimeError: Connection closed by peer",
        "  actor:2 on n0: exit code 1, 0.250 s later: seen late",
    ]


def test_many_failures_are_counted_instead_of_listed() -> None:
    lines = failure_report("why", diagnose([fail(rank, float(rank)) for rank in range(30)])).splitlines()
    assert "  … and 21 more" in lines
    assert len(lines) < 15


def test_peers_that_only_lost_a_connection_are_one_line() -> None:
    cause = fail(0, 10.0, message="ValueError: x")
    others = [fail(rank, 10.1, message="RuntimeError: Connection closed by peer") for rank in range(1, 20)]
    own = fail(20, 10.2, message="KeyError: 'y'")
    lines = failure_report("why", diagnose([cause, *others, own])).splitlines()
    assert lines[1:5] == [
        "other failures (20):",
        "  actor:20 on n0: exit code 1, 0.200 s later: KeyError: 'y'",
        "  actor:1-19 only lost a connection to a peer",
        "root cause: actor:0 on n0: exit code 1 (the first of 21 failures)",
    ]


def test_peers_are_listed_when_the_cause_is_a_lost_connection_too() -> None:
    failures = [
        fail(rank, 10.0 + rank, message="RuntimeError: Connection closed by peer") for rank in range(3)
    ]
    lines = failure_report("why", diagnose(failures)).splitlines()
    assert [line for line in lines if line.startswith("  actor:")] == [
        f"  actor:{rank} on n0: exit code 1, {rank}.000 s later: RuntimeError: Connection closed by peer"
        for rank in (1, 2)
    ]


def test_a_long_traceback_is_shortened_to_25_lines_with_its_end() -> None:
    trace = "\n".join(f"line {number}" for number in range(100))
    lines = failure_report("why", diagnose([fail(0, 1.0, message="E", traceback=trace)])).splitlines()
    shown = [line.strip() for line in lines if "line" in line]
    assert len(shown) == 25
    assert shown[:7] == [*(f"line {n}" for n in range(6)), "… 76 lines are left out; the log has them"]
    assert shown[7:] == [f"line {n}" for n in range(82, 100)]
