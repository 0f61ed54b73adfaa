"""A role restarts while its budget lasts; after that the job ends, and the reason says which it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.failover import Exit, Failure, decide


def failure(end: Exit) -> Failure:
    return Failure("actor", 2, 0, 0, "n0", 1.0, end)


def test_a_budget_is_spent_one_by_one() -> None:
    decisions = [decide(failure(Exit(code=1)), restarts=n, max_restarts=2) for n in range(3)]
    assert [d.action for d in decisions] == ["restart_role", "restart_role", "end_job"]
    assert [d.budget_spent for d in decisions] == [False, False, True]
    assert decisions[0].reason == "actor:2 ended with exit code 1; restart 1 of 2 of role actor"
    assert decisions[1].reason.endswith("restart 2 of 2 of role actor")
    assert decisions[2].reason.endswith("all 2 restarts of role actor are used up")


def test_without_a_budget_nothing_was_spent() -> None:
    decision = decide(failure(Exit(signal=9)), restarts=0, max_restarts=0)
    assert (decision.action, decision.budget_spent) == ("end_job", False)
    assert (
        decision.reason
        == "actor:2 ended with killed by SIGKILL; role actor has no restarts (--max-restarts 0)"
    )


@given(st.integers(0, 10), st.integers(0, 10))
def test_a_restart_is_decided_exactly_within_the_budget(restarts: int, limit: int) -> None:
    decision = decide(failure(Exit(code=7)), restarts=restarts, max_restarts=limit)
    assert (decision.action == "restart_role") == (restarts < limit)
    assert decision.budget_spent == (decision.action == "end_job" and limit > 0)
    assert "actor:2" in decision.reason


@pytest.mark.parametrize(
    ("end", "ok", "status", "words"),
    [
        (Exit(code=0), True, 0, "exit code 0"),
        (Exit(code=7), False, 7, "exit code 7"),
        (Exit(signal=9), False, 137, "killed by SIGKILL"),
        (Exit(signal=11), False, 139, "killed by SIGSEGV"),
        (Exit(signal=40), False, 168, "killed by signal 40"),
    ],
)
def test_an_exit_is_ok_only_with_code_0(end: Exit, ok: bool, status: int, words: str) -> None:
    assert (end.ok, end.status, str(end)) == (ok, status, words)
