"""A role restarts while its budget lasts; after that the job ends, and the reason says which it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.failover.policy import (
    Circumstances,
    Decision,
    decide,
    decide_to_make_room,
    decide_without_node,
    decide_without_store,
)
from unirun.job.failures import Exit, Failure
from unirun.spec import Restart

counts = st.integers(0, 4)
circumstances = st.builds(
    Circumstances,
    kind=st.sampled_from(["script", "workload", "trainer"]),
    restart=st.sampled_from(["role", "process"]),
    restarts=counts,
    max_restarts=counts,
    survivors=counts,
    generation=counts,
    recoverable=st.sampled_from([None, False, True]),
    behind=st.booleans(),
)


def failure(end: Exit) -> Failure:
    return Failure("actor", 2, 0, 0, "n0", 1.0, end)


def test_a_budget_is_spent_one_by_one() -> None:
    decisions = [decide(failure(Exit(code=1)), Circumstances(restarts=n, max_restarts=2)) for n in range(3)]
    assert [d.action for d in decisions] == ["restart_role", "restart_role", "end_job"]
    assert [d.budget_spent for d in decisions] == [False, False, True]
    assert decisions[0].reason == "actor:2 ended with exit code 1; restart 1 of 2 of role actor"
    assert decisions[1].reason.endswith("restart 2 of 2 of role actor")
    assert decisions[2].reason.endswith("all 2 restarts of role actor are used up")


def test_without_a_budget_nothing_was_spent() -> None:
    decision = decide(failure(Exit(signal=9)), Circumstances(restarts=0, max_restarts=0))
    assert (decision.action, decision.budget_spent) == ("end_job", False)
    assert (
        decision.reason
        == "actor:2 ended with killed by SIGKILL; role actor has no restarts (--max-restarts 0)"
    )


@given(st.integers(0, 10), st.integers(0, 10))
def test_a_restart_is_decided_exactly_within_the_budget(restarts: int, limit: int) -> None:
    decision = decide(failure(Exit(code=7)), Circumstances(restarts=restarts, max_restarts=limit))
    assert (decision.action == "restart_role") == (restarts < limit)
    assert decision.budget_spent == (decision.action == "end_job" and limit > 0)
    assert "actor:2" in decision.reason


class TestALastingError:
    NOW = Circumstances("workload", "process", max_restarts=3, survivors=1, lasting=True)

    def test_ends_the_job_in_the_first_start_of_a_rank(self) -> None:
        for now in (self.NOW, replace(self.NOW, behind=True), replace(self.NOW, kind="trainer")):
            decision = decide(failure(Exit(code=1)), now)
            assert (decision.action, decision.budget_spent) == ("end_job", False)
            assert decision.reason == (
                "actor:2 ended with exit code 1, before it was up, with an error that a restart cannot mend"
            )

    def test_is_one_like_any_other_when_the_worker_was_up_or_the_rank_may_have_been(self) -> None:
        was_up = replace(self.NOW, recoverable=True)
        assert decide(failure(Exit(code=1)), was_up).action == "restart_worker"
        later = replace(failure(Exit(code=1)), incarnation=1)
        assert decide(later, self.NOW).action == "restart_worker"


class TestAProcessAlone:
    def now(self, **more: object) -> Circumstances:
        fields = {"kind": "workload", "restart": "process", "restarts": 0, "max_restarts": 3, "survivors": 3}
        return Circumstances(**{**fields, **more})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("survivors", "words"),
        [
            (3, "actor:2 alone, actor's other 3 ranks keep their memory and form generation 1"),
            (1, "actor:2 alone, actor's other rank keeps its memory and forms generation 1"),
            (0, "actor:2 alone, as generation 1"),
        ],
    )
    def test_is_started_again_where_the_others_keep_their_memory(self, survivors: int, words: str) -> None:
        decision = decide(failure(Exit(signal=9)), self.now(survivors=survivors))
        assert decision.action == "restart_worker"
        assert decision.reason == f"actor:2 ended with killed by SIGKILL; restart 1 of 3: {words}"

    def test_spends_the_budget_of_its_role(self) -> None:
        decision = decide(failure(Exit(code=1)), self.now(restarts=3))
        assert (decision.action, decision.budget_spent) == ("end_job", True)
        assert decision.reason.endswith("all 3 restarts of role actor are used up")

    def test_that_is_a_trainer_must_have_said_that_it_is_recoverable(self) -> None:
        yes = decide(failure(Exit(code=1)), self.now(kind="trainer", recoverable=True))
        no = decide(failure(Exit(code=1)), self.now(kind="trainer", recoverable=False))
        unknown = decide(failure(Exit(code=1)), self.now(kind="trainer"))
        assert (yes.action, no.action, unknown.action) == ("restart_worker", "end_job", "end_job")
        assert not no.budget_spent
        assert no.reason == (
            "actor:2 ended with exit code 1; actor:2 is not recoverable (is_recoverable() returned False)"
        )
        assert unknown.reason.endswith("actor:2 had not told yet whether it is recoverable")

    def test_that_waited_in_a_generation_that_is_over_spends_nothing(self) -> None:
        decision = decide(failure(Exit(code=1)), self.now(restarts=3, generation=2, behind=True))
        assert decision.action == "join"
        assert decision.reason == (
            "actor:2 ended with exit code 1; it was in a generation that another death had ended, and joins "
            "generation 2 at no cost"
        )
        trainer = self.now(kind="trainer", recoverable=False, behind=True)
        assert decide(failure(Exit(code=1)), trainer).action == "end_job"


@pytest.mark.parametrize(("restart", "action"), [("process", "restart_worker"), ("role", "restart_role")])
def test_a_store_that_never_served_spends_a_restart(restart: Restart, action: str) -> None:
    now = Circumstances(restart=restart, max_restarts=1)
    decision = decide_without_store("actor", "no process can be forked", now)
    assert decision.action == action
    assert decision.reason == (
        "the store of role actor is gone before its workers have met: no process can be forked; "
        "restart 1 of 1 of role actor"
    )
    spent = decide_without_store("actor", "x", replace(now, restarts=1))
    assert (spent.action, spent.budget_spent) == ("end_job", True)


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


class TestWithoutANode:
    def now(self, **more: object) -> Circumstances:
        fields = {"kind": "workload", "restart": "process", "max_restarts": 3, "survivors": 2}
        return Circumstances(**{**fields, **more})  # type: ignore[arg-type]

    def test_workloads_are_started_elsewhere_and_the_others_keep_their_memory(self) -> None:
        decision = decide_without_node("actor", "0-1", "n1 is gone", self.now())
        assert decision.action == "restart_worker"
        assert decision.reason == (
            "n1 is gone; restart 1 of 3: actor:0-1 elsewhere, actor's other 2 ranks keep their memory and form generation 1"
        )

    def test_scripts_start_again_together(self) -> None:
        decision = decide_without_node("actor", "0-1", "n1 is gone", self.now(kind="script", restart="role"))
        assert decision.action == "restart_role"
        assert decision.reason == "n1 is gone; restart 1 of 3 of role actor, with actor:0-1 elsewhere"

    @given(st.integers(0, 5), st.integers(0, 5))
    def test_it_is_one_restart_of_the_role_while_there_is_one(self, restarts: int, limit: int) -> None:
        now = self.now(restarts=restarts, max_restarts=limit)
        decision = decide_without_node("actor", "2", "n1 is gone", now)
        assert (decision.action == "restart_worker") == (restarts < limit)
        assert decision.budget_spent == (restarts >= limit > 0)

    @pytest.mark.parametrize("recoverable", [None, False])
    def test_a_trainer_must_have_said_that_it_is_recoverable(self, recoverable: bool | None) -> None:
        now = self.now(kind="trainer", recoverable=recoverable)
        assert decide_without_node("trainer", "0", "n1 is gone", now).action == "end_job"
        now = self.now(kind="trainer", recoverable=True)
        assert decide_without_node("trainer", "0", "n1 is gone", now).action == "restart_worker"


class TestWhateverTheCircumstances:
    """Of the four decisions: what happened, whom it is about, and whether one worker may start again alone."""

    @staticmethod
    def decisions(now: Circumstances) -> list[tuple[Decision, str, str]]:
        gone = "the store of role actor is gone before its workers have met: it is full"
        return [
            (
                decide(failure(Exit(code=1)), replace(now, behind=False)),
                "actor:2 ended with exit code 1",
                "actor:2",
            ),
            (decide_without_node("actor", "0-1", "n1 is gone", now), "n1 is gone", "actor:0-1"),
            (decide_to_make_room("actor", "n1 is gone", now), "n1 is gone", "actor"),
            (decide_without_store("actor", "it is full", now), gone, ""),
        ]

    @given(circumstances)
    def test_a_reason_begins_with_what_happened_and_says_what_follows(self, now: Circumstances) -> None:
        for decision, what, who in self.decisions(now):
            told = decision.reason.removeprefix(f"{what}; ")
            assert told != decision.reason
            if now.kind == "trainer" and who and not now.recoverable:
                no = "is not recoverable (is_recoverable() returned False)"
                unknown = "had not told yet whether it is recoverable"
                assert told == f"{who} {unknown if now.recoverable is None else no}"
            elif now.max_restarts == 0:
                assert told == "role actor has no restarts (--max-restarts 0)"
            elif now.restarts >= now.max_restarts:
                assert told == f"all {now.max_restarts} restarts of role actor are used up"
            else:
                assert told.startswith(f"restart {now.restarts + 1} of {now.max_restarts}")
                assert (
                    f"generation {now.generation + 1}" in told or decision.action == "restart_role" or not who
                )

    @given(circumstances)
    def test_a_restart_needs_a_budget_and_a_trainer_that_said_it_is_recoverable(
        self, now: Circumstances
    ) -> None:
        alone = "restart_worker" if now.restart == "process" else "restart_role"
        for decision, _, who in self.decisions(now):
            lost = now.kind == "trainer" and bool(who) and not now.recoverable
            spent = now.restarts >= now.max_restarts
            again = "restart_role" if who == "actor" else alone
            assert decision.action == ("end_job" if lost or spent else again)
            assert decision.budget_spent == (spent and now.max_restarts > 0 and not lost)

    @given(circumstances)
    def test_a_worker_that_is_behind_joins_whatever_is_left_of_the_budget(self, now: Circumstances) -> None:
        decision = decide(failure(Exit(code=1)), replace(now, behind=True))
        lost = now.kind == "trainer" and not now.recoverable
        assert decision.action == ("end_job" if lost else "join")
        assert not decision.budget_spent
