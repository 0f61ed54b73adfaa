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


LOSES_STEPS = """
    import os, time, unirun
    again = os.environ["UNIRUN_INCARNATION"] == "1"
    for step in range(20 if again else 0, 61 + 40 * again):
        unirun.progress(step)
        time.sleep(0.01)
        if step == 57 and not again and os.environ["RANK"] == "1":
            os._exit(3)
    # Until the agents have looked.
    time.sleep(1)
"""


def test_the_steps_that_a_failure_has_cost_are_told_and_when_they_are_made_up(
    unirun: Unirun, script: Script
) -> None:
    """A role of two nodes goes on at step 20 of 57, or of 60 to which the other rank may come: these take 0.4 s."""
    nodes = ("--inventory", "fake:nodes=2,devices=1", "--roles", "actor=2", "--max-restarts", 1)
    result = unirun(*nodes, "--rdzv-id", "steps", script(LOSES_STEPS))
    assert result.code == 0, result.err
    (found,) = map(json.loads, unirun("failures", "--json").out.splitlines())
    assert found["record"]["step"] == 57
    assert 37 <= found["steps_lost"] <= 40
    assert 0.3 < found["durations"]["useful"] < 20
    text = unirun("failures", "steps", "--why", 1).out
    assert "exit code 3, at step 57\n" in text
    assert f"steps lost: {found['steps_lost']}\n" in text


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
