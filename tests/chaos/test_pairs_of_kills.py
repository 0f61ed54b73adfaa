"""500 pairs of kills, 0 to 200 ms apart: roles of 2, 3, 4 and 8 workloads over both transports, and scripts that meet in
``ctx.group``; and 100 kills of a rendezvous store. It takes a quarter of an hour, and wants a machine that does nothing
else: ``make chaos``.
"""

from __future__ import annotations

import os
import random
import signal
import statistics

import pytest

from tests.integration.conftest import script, unirun, warm
from tests.integration.harness import Script, Unirun
from tests.integration.kills import (
    COLLECTIVES,
    SCRIPTS,
    WORKLOADS,
    calls_of,
    kill_pairs,
    kill_stores,
    scripts_up,
    workloads_up,
)
from tests.waiting import WAIT_TIMEOUT

__all__ = ["script", "unirun", "warm"]

PAIRS = int(os.environ.get("UNIRUN_CHAOS_PAIRS", "50"))
"""Number of pairs for each of the ten kinds of job."""
SEED = int(os.environ.get("UNIRUN_CHAOS_SEED", "0"))
UP_AGAIN = 3.0
"""Seconds within which all ranks must be up again."""

pytestmark = pytest.mark.timeout(60 + PAIRS * 20)


def judge(what: str, seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Print the measurements, and check them against the limit."""
    with capsys.disabled():
        median, worst = statistics.median(seconds), max(seconds)
        print(
            f"\n{what}: {len(seconds)} pairs, up again after {median:.2f} s (median), {worst:.2f} s (worst)"
        )
    late = {pair: round(each, 2) for pair, each in enumerate(seconds) if each > UP_AGAIN}
    assert not late, f"up again too late: {late}"


@pytest.mark.parametrize("transport", ["socket", "torch"])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_workloads_are_up_again_after_two_deaths(
    unirun: Unirun, script: Script, count: int, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = script(WORKLOADS, "chaotic.py").parent
    roles = ("--roles", f"w={count}@chaotic:Worker", "--max-restarts", 10 * PAIRS, "--transport", transport)
    job = unirun.start(*roles, "--cwd", folder)
    seconds = kill_pairs(
        job, lambda: workloads_up(unirun), PAIRS, random.Random(f"{SEED} {count} {transport}")
    )
    job.signal(signal.SIGTERM)
    job.end(WAIT_TIMEOUT)
    judge(f"{count} workloads over {transport}", seconds, capsys)


@pytest.mark.parametrize("count", [2, 4])
def test_scripts_meet_again_after_two_deaths(
    unirun: Unirun, script: Script, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train = script(SCRIPTS)
    roles = ("--roles", f"v=2,w={count}", "--max-restarts", 10 * PAIRS)
    job = unirun.start(*roles, train, cwd=train.parent)
    names = ["v:0", "v:1", *(f"w:{rank}" for rank in range(count))]
    seconds = kill_pairs(
        job, lambda: scripts_up(train.parent, names), PAIRS, random.Random(f"{SEED} {count}")
    )
    job.signal(signal.SIGTERM)
    job.end(WAIT_TIMEOUT)
    judge(f"2 and {count} scripts in one group", seconds, capsys)


def test_a_hundred_killed_stores_cost_no_idempotent_call(
    unirun: Unirun, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = script(COLLECTIVES, "reducing.py").parent
    roles = ("--roles", "w=3@reducing:Worker", "--max-restarts", 10 * PAIRS)
    job = unirun.start(*roles, "--trainer", "reducing:Trainer", "--cwd", folder)
    job.lines("call once right")
    kill_stores(unirun, 2 * PAIRS, random.Random(SEED))
    (folder / "enough").touch()
    result = job.end(WAIT_TIMEOUT)
    again, once = (calls_of(result.out, name) for name in ("again", "once"))
    with capsys.disabled():
        print(f"\n{2 * PAIRS} stores killed: idempotent calls {dict(again)}, others {dict(once)}")
    assert result.code == 0, result.err
    assert set(again) == {"right"}
    assert set(once) <= {"right", "WorkerLost"}
