"""``unirun failures``: the failures of a job that runs or has ended, with their likely causes and what followed."""

from __future__ import annotations

import json
import re

from .harness import Script, Unirun

FAILS_TWICE = """
    import ctypes, os
    if os.environ["RANK"] == "1":
        if os.environ["UNIRUN_INCARNATION"] == "0":
            raise ValueError("loss is nan")
        if os.environ["UNIRUN_INCARNATION"] == "1":
            ctypes.string_at(0)
"""


def test_the_failures_of_a_job_that_has_ended_are_told_with_cause_decision_and_durations(
    unirun: Unirun, script: Script
) -> None:
    """
    1. A rank raises an error, then crashes in native code; its role starts again each time, and the job succeeds.
    2. `unirun failures` has both with their causes, and the time that the role was away.
    3. `--why` has what the second one follows from, what has followed from it, and its stack.
    """
    train = script(FAILS_TWICE)
    assert unirun("--roles", "actor=2", "--max-restarts", 2, "--rdzv-id", "mine", train).code == 0

    first, second = map(json.loads, unirun("failures", "--json").out.splitlines())
    assert (first["number"], first["record"]["kind"]) == (1, "exception")
    assert first["record"]["cause"] == "ValueError: loss is nan"
    assert second["record"]["kind"] == "crash"
    assert second["record"]["exit"] == "killed by SIGSEGV"
    for each in (first, second):
        durations = each["durations"]
        assert all(durations[part] is not None for part in ("detect", "decide", "respawn", "rejoin"))
        assert 0 < durations["away"] < 30

    text = unirun("failures", "mine", "--why", 2).out
    assert "failure 2: actor:1 on " in text
    assert re.search(
        r"^likely cause: a crash in native code: Segmentation fault, in \w+ \(.*:\d+\) \(crash\)$", text, re.M
    )
    assert "decided: actor:1 was killed by SIGSEGV; restart 2 of 2 of role actor" in text
    assert re.search(r"exit: actor:1 ended: killed by SIGSEGV\n.*failure: .*\n.*decision: ", text)
    assert "running: role actor: every rank runs" in text
    assert "loss is nan" not in text
