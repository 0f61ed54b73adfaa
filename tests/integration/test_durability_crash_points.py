"""A failover in which the master dies before or after each of its writes: the outcome is the same."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.effort import CHAOS
from unirun.failover.context import load
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.store.url import open_store

from .harness import SCRIPTS, Unirun, command_in

pytestmark = pytest.mark.timeout(300)

AT_ONCE = 3
"""Number of jobs at a time."""

SOME = 7
"""One of so many writes is tried without `make chaos`; the simulation crashes masters at all of them."""

MORTAL = """
    touch "up $RANK"
    if [ $UNIRUN_INCARNATION = 0 ]; then
        until [ -e "up 0" -a -e "up 1" ]; do sleep 0.02; done
        [ $RANK = 1 ] && kill -KILL $$
        exec sleep 600
    fi
"""
"""For a shell, which starts faster than Python."""


@dataclass(frozen=True)
class Outcome:
    """The part of a job's outcome that must not depend on the death of a master."""

    code: int
    phase: str
    restarts: int
    generation: int
    workers: list[tuple[int, str, str]]
    incarnations: list[list[str]]
    failures: list[tuple[str, str]]


def run(root: Path, write: int = 0, when: str = "") -> tuple[Outcome, int, int]:
    """Run the job, whose master dies at a write. Returns its outcome, the number of writes and the last term."""
    root.mkdir()
    (root / "mortal.sh").write_text(textwrap.dedent(MORTAL))
    deadly = {
        "PYTHONPATH": str(SCRIPTS / "deadly"),
        "DEADLY_FOLDER": str(root),
        "DEADLY_WRITE": str(write),
        "DEADLY_WHEN": when,
    }
    with command_in(root) as unirun:
        program = ("--no-python", "/bin/sh", "mortal.sh")
        end = unirun("--roles", "a=2", "--max-restarts", 3, *program, env=deadly)
        status = JobDir(unirun.job_dir()).read_json("state.json")
        outcome = outcome_of(unirun, end.code, status)
    return outcome, (root / "writes").stat().st_size, status["epoch"]


def outcome_of(unirun: Unirun, code: int, status: dict[str, Any]) -> Outcome:
    (role,) = status["roles"]
    logs = unirun.job_dir() / "logs" / "a"
    return Outcome(
        code,
        status["phase"],
        role["restarts"],
        role["generation"],
        [(worker["incarnation"], worker["phase"], worker["exit"]) for worker in role["workers"]],
        [sorted(path.name for path in (logs / str(rank)).iterdir()) for rank in range(2)],
        failures_of(JobDir(unirun.job_dir())),
    )


def failures_of(job: JobDir) -> list[tuple[str, str]]:
    """The failures that the store has kept."""
    store = open_store(job.store_url)
    try:
        state = load(store, job.run_id)
    finally:
        store.close()
    assert state is not None
    return [(str(failure.worker), str(failure.exit)) for failure in state.failures]


def test_a_master_may_crash_before_and_after_each_of_its_writes(tmp_path: Path) -> None:
    expected, writes, epoch = run(tmp_path / "undisturbed")
    assert (expected.code, expected.phase, expected.restarts, epoch) == (0, "succeeded", 1, 1)
    assert [incarnation for incarnation, _, _ in expected.workers] == [1, 1]
    assert expected.failures == [("a:1", "killed by SIGKILL")]
    assert writes > 5

    with ThreadPoolExecutor(AT_ONCE) as pool:
        numbers = range(1, writes + 1, 1 if CHAOS else SOME)
        deaths = [(number, when) for number in numbers for when in ("before", "after")]
        ends = pool.map(lambda death: run(tmp_path / f"{death[1]} {death[0]}", *death), deaths)
        found = dict(zip(deaths, ends, strict=True))
    wrong = {death: outcome for death, (outcome, _, _) in found.items() if outcome != expected}
    assert not wrong, (expected, wrong)
    print({death: (writes, epoch) for death, (_, writes, epoch) in found.items()})
