"""Each fault of each part of a job at each moment ends as the table in docs/failover.md says, which the policy makes."""

from __future__ import annotations

import re
import runpy
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.one_fault import HANGS, PEER, OneFault
from unirun.errors import EXIT_FAILURE, EXIT_RENDEZVOUS
from unirun.failover.policy import Budget, Decision
from unirun.failover.state import JobPhase

PAGE: Mapping[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs/failover.py"))
"""The names of the script that makes the tables."""

MATRIX: Mapping[tuple[str, str], tuple[str, ...]] = PAGE["MATRIX"]
MOMENTS: tuple[str, ...] = PAGE["MOMENTS"]

CELLS = [
    (part, fault, moment, outcome)
    for (part, fault), outcomes in MATRIX.items()
    for moment, outcome in zip(MOMENTS, outcomes, strict=True)
    if outcome not in PAGE["NEVER"]
]

FIRST = [
    cell for cell in CELLS if (cell[3] in PAGE["ROWS"] or cell[3] == "peers") and "survivor" not in cell[0]
]
"""Those for which the policy decides about a loss, which is the first one of the job."""


def test_every_fault_of_every_part_is_in_the_table() -> None:
    parts, faults = ({each[at] for each in MATRIX} for at in (0, 1))
    assert {*MATRIX} == {(part, fault) for part in parts for fault in faults}
    assert (len(parts), len(faults), len(MOMENTS)) == (11, 8, 6)


def end_of(run: OneFault, outcome: str) -> str:
    """The end of the rank in the words of a decision."""
    if outcome == "never":
        return "was not ready within 20 s"
    halted = run.fault in ("SIGSTOP", "GIL held")
    if run.role == "service" and halted:
        return "did not answer 2 times in a row"
    if outcome == "peers":
        return "ended with exit code 1"
    if run.part == "spawner" or run.fault == "SIGKILL":
        return "was killed by SIGKILL"
    return HANGS if halted else f"ended with exit code {int(run.fault != 'exit 0')}"


def decided(run: OneFault, outcome: str, limit: int) -> Decision:
    """The decision of the policy about the fault in a role with this `limit` of restarts."""
    words, loss, budgets = PAGE["ROWS"]["rank" if outcome == "peers" else outcome]
    loss = replace(loss, what=loss.what.replace("ended with exit code 1", end_of(run, outcome)))
    if outcome == "trainer" and run.moment == "starting":
        loss = replace(loss, recoverable=None)
    decision: Decision = PAGE["decided"]((words, loss, {**budgets, "budget": Budget(limit)}), run.role)
    return decision


def code_of(run: OneFault, outcome: str) -> int:
    """The exit code of a job that ends with the fault, if the decision has none."""
    if outcome in ("never", "store"):
        return EXIT_RENDEZVOUS
    killed = run.fault in ("SIGKILL", "SIGSTOP", "GIL held") or run.part in ("agent", "spawner")
    return 128 + signal.SIGKILL if killed and outcome != "peers" else EXIT_FAILURE


def like(text: str) -> str:
    """A decision without the parts that the policy does not decide: numbers of ranks and generations, a node's end."""
    text = re.sub(r":\d+(-\d+)?", ":N", text)
    text = re.sub(r"(generation|other) \d+", r"\1 N", text)
    text = re.sub(r"(n1 is gone|has met|have met|in a row|within 20 s): [^;,]*", r"\1", text)
    text = re.sub(r"; n\d is sick", "", text)
    return text.replace(" before it was ready", "").replace(", too early", "")


def expected_to_restart(decision: Decision, run: OneFault) -> set[tuple[str, int]]:
    """The ranks that start again after a decision."""
    if decision.action == "restart_worker":
        return {(run.role, run.rank)}
    return {(run.role, rank) for rank in range(run.size(run.role))}


@pytest.mark.parametrize(("part", "fault", "moment", "outcome"), CELLS)
def test_a_fault_ends_as_the_table_says(part: str, fault: str, moment: str, outcome: str) -> None:
    """1. The fault comes to the part at the moment. A role has three restarts.
    2. What restarts, and the reason for that, is as the policy says; no process is left, and the exit code is right.
    """
    kind = PAGE["KIND"][part]
    run = OneFault(part, fault, moment, kind=kind)
    run.run()
    assert run.came, "the moment has not come"
    assert run.finish is not None
    end = run.finish.verdict.phase, run.finish.verdict.code
    again = {who for who, incarnation in run.incarnations.items() if incarnation > 0}
    if outcome in ("ends", "killed"):
        assert (end, run.decisions) == ((JobPhase.STOPPED, 128 + signal.SIGTERM), [])
    elif outcome == "again":
        assert (end, again) == ((JobPhase.SUCCEEDED, 0), {(kind, PEER), (kind, run.rank)})
        assert len(run.decisions) == 1
    elif outcome in PAGE["OTHERWISE"] and outcome != "peers":
        assert (end, again, run.state.failures) == ((JobPhase.SUCCEEDED, 0), set(), ())
        assert len(run.decisions) == (outcome == "anew")
        assert (len(run.masters) > 1) == (outcome == "master")
    else:
        decision = decided(run, outcome, 3)
        survivor = "survivor" in part
        # Which of two deaths on two nodes is known first, nobody says.
        about = next(each for each in run.decisions if not survivor or each.startswith(f"{kind}:{run.rank} "))
        number = 1 + run.decisions.index(about)
        assert like(about) == like(decision.reason.replace("restart 1 of 3", f"restart {number} of 3"))
        restarts = run.state.roles[kind].restarts
        if decision.action == "end_job":
            assert (end, restarts) == ((JobPhase.FAILED, decision.code or code_of(run, outcome)), 0)
        elif outcome == "store":
            # Those that have waited in it start again, at no cost.
            assert (end, restarts) == ((JobPhase.SUCCEEDED, 0), 1)
        else:
            others = {(kind, PEER)} if survivor else set()
            assert (end, again) == ((JobPhase.SUCCEEDED, 0), expected_to_restart(decision, run) | others)
            assert restarts == (not decision.free) + survivor
        if outcome not in ("node", "store"):
            assert run.victim_is_named(inferred=outcome == "peers")


@pytest.mark.parametrize(("part", "fault", "moment", "outcome"), FIRST)
def test_without_restarts_the_job_ends_with_the_code_and_the_name_of_the_rank(
    part: str, fault: str, moment: str, outcome: str
) -> None:
    """1. The same, in a job without restarts.
    2. It ends with the exit code of the fault, and the report names the rank.
    """
    kind = PAGE["KIND"][part]
    run = OneFault(part, fault, moment, kind=kind, limit=0)
    run.run()
    assert run.came
    assert run.finish is not None
    verdict = run.finish.verdict
    if outcome == "port":
        assert verdict.code == 0
        return
    decision = decided(run, outcome, 0)
    assert (decision.action, verdict.phase) == ("end_job", JobPhase.FAILED)
    # Where peers have failed first, the cause is told first.
    assert like(verdict.reason).endswith(like(decision.reason))
    assert verdict.code == (decision.code or code_of(run, outcome))
    if outcome not in ("node", "store"):
        named = verdict.report.partition("root cause: ")[2] or verdict.report
        assert named.startswith(f"{run.role}:{run.rank} ")
