"""The live line says how far each role is; the report of a failure shows what is not seen above it."""

from __future__ import annotations

from unirun.launcher.foreground.session import progress, without_repetition
from unirun.spec.job import Entry, Probe, RoleSpec


def test_roles_with_a_probe_are_counted_by_ranks_that_are_ready() -> None:
    train = RoleSpec("train", 4, Entry("script", "train.py"))
    engine = RoleSpec("engine", 2, Entry("program", "serve"), ready=Probe("tcp"))
    assert progress(train, 3) == "train 3/4"
    assert progress(engine, 1) == "engine 1 of 2 ready"


ERROR = """Traceback (most recent call last):
  File "a.py", line 8, in <module>
    f(3)
ValueError: bad value 3
raised in actor:1"""

REPORT = "\n".join(
    [
        "job failed: a:1 ended with exit code 1",
        "root cause: a:1 on h1: exit code 1",
        *(f"  {line}" for line in ERROR.splitlines()),
        "  log: /logs/a/1/0/stderr.log",
    ]
)


def test_a_traceback_that_is_just_above_is_not_shown_again() -> None:
    above = [line for own in ERROR.splitlines() for line in (f"[rank1]: {own}", "[rank0]: another")]
    assert without_repetition(REPORT, above).splitlines() == [
        "job failed: a:1 ended with exit code 1",
        "root cause: a:1 on h1: exit code 1",
        "  ValueError: bad value 3",
        "  raised in actor:1",
        "  its traceback is above",
        "  log: /logs/a/1/0/stderr.log",
    ]


def test_a_traceback_that_the_report_has_shortened_is_above_too() -> None:
    folded = REPORT.replace("    f(3)", "    … 9 frames of torch\n  … 3 lines are left out; the log has them")
    assert "  its traceback is above" in without_repetition(folded, ERROR.splitlines()).splitlines()


def test_one_that_is_not_above_or_not_whole_is_shown() -> None:
    assert without_repetition(REPORT, []) == REPORT
    assert without_repetition(REPORT, ERROR.splitlines()[1:]) == REPORT
    assert without_repetition(REPORT, ERROR.replace("8", "9").splitlines()) == REPORT


def test_a_report_without_a_traceback_stays_as_it_is() -> None:
    for report in ("", "job failed: the ranks do not fit", "root cause: a:0\n  the end\n  log: x"):
        assert without_repetition(report, ["the end"]) == report
