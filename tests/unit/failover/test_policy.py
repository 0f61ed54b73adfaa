"""A role restarts while its budget lasts; after that the job ends, and the reason says which it was."""

from __future__ import annotations

import runpy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.documents import ROOT, text_of
from unirun.errors import EXIT_BUDGET
from unirun.failover.policy import LONGEST_DELAY, Budget, Loss, budget_of, decide
from unirun.failover.state import Ranks, RoleState, WorkerPhase, WorkerState
from unirun.spec.job import Entry, EntryKind, Restart, RoleSpec

counts = st.integers(0, 4)
budgets = st.builds(Budget, counts, counts)


def role(
    kind: EntryKind = "script",
    restart: Restart = "role",
    survivors: int = 0,
    generation: int = 0,
    *,
    is_program: bool = False,
) -> RoleState:
    live = (WorkerState(rank, "n0", phase=WorkerPhase.RUNNING) for rank in range(survivors))
    return RoleState("actor", kind, restart, Ranks(live), generation=generation, is_program=is_program)


roles = st.builds(
    role,
    kind=st.sampled_from(["script", "workload", "trainer"]),
    restart=st.sampled_from(["role", "process"]),
    survivors=counts,
    generation=counts,
)
WORKER = Loss("actor:2 ended with exit code 1", "actor", "2", first_start=True)
NODE = Loss("n1 is gone", "actor", "0-1", elsewhere=True)
ROOM = Loss("n1 is gone", "actor", "0-3", together=True)
STORE = Loss("the store of role actor is gone", "actor")
losses = st.builds(
    replace, st.sampled_from([WORKER, NODE, ROOM, STORE]), recoverable=st.sampled_from([None, False, True])
)


def alone(
    kind: EntryKind = "workload", limit: int = 3, spent: int = 0, survivors: int = 3, generation: int = 0
) -> tuple[RoleState, Budget]:
    """A role whose processes restart alone, and its budget."""
    return role(kind, "process", survivors, generation), Budget(limit, spent)


def test_a_budget_is_spent_one_by_one() -> None:
    decisions = [decide(WORKER, role(), Budget(2, spent)) for spent in range(3)]
    assert [d.action for d in decisions] == ["restart_role", "restart_role", "end_job"]
    assert [d.code == EXIT_BUDGET for d in decisions] == [False, False, True]
    assert decisions[0].reason == "actor:2 ended with exit code 1; restart 1 of 2 of role actor"
    assert decisions[1].reason.endswith("restart 2 of 2 of role actor")
    assert decisions[2].reason.endswith("all 2 restarts of role actor are used up")


def test_without_a_budget_nothing_was_spent() -> None:
    decision = decide(WORKER, role(), Budget(0))
    assert (decision.action, decision.code == EXIT_BUDGET) == ("end_job", False)
    assert decision.reason == "actor:2 ended with exit code 1; role actor has no restarts (--max-restarts 0)"


@given(losses, roles, budgets)
def test_no_restart_follows_a_fatal_exit_code(loss: Loss, role: RoleState, budget: Budget) -> None:
    decision = decide(replace(loss, fatal=77), role, budget)
    assert (decision.action, decision.code, decision.code == EXIT_BUDGET) == ("end_job", 77, False)
    assert decision.reason == f"{loss.what}, and no restart follows exit code 77 (--fatal-exit-codes)"


@given(st.integers(0, 10), st.integers(0, 10))
def test_a_restart_is_decided_exactly_within_the_budget(spent: int, limit: int) -> None:
    decision = decide(WORKER, role(), Budget(limit, spent))
    assert (decision.action == "restart_role") == (spent < limit)
    assert (decision.code == EXIT_BUDGET) == (decision.action == "end_job" and limit > 0)
    assert "actor:2" in decision.reason


@given(losses, roles, budgets, budgets, st.none() | budgets)
def test_a_spent_budget_escalates_to_the_job_and_a_permanent_error_does_not(
    loss: Loss, role: RoleState, budget: Budget, job: Budget, rank: Budget | None
) -> None:
    alone, decision = decide(loss, role, budget, rank=rank), decide(loss, role, budget, job=job, rank=rank)
    if alone.action != "end_job":
        assert decision == alone
    elif job.left > 0:
        assert decision.action == "restart_job"
        assert decision.reason == f"{alone.reason}; {job} of the job"
    else:
        assert decision.action == "end_job"
        assert decision.reason.startswith(alone.reason)
        assert (decision.code == EXIT_BUDGET) == (alone.code == EXIT_BUDGET or job.limit > 0)
    permanent = replace(loss, permanent=True, recoverable=None)
    assert not permanent.first_start or decide(permanent, role, budget, job=job).action == "end_job"


class TestABackOff:
    def test_a_back_off_is_none_before_the_first_restart_and_doubles_from_the_second_on(self) -> None:
        delays = [Budget(9, spent, delay=0.5).back_off for spent in range(5)]
        assert delays == [0.0, 0.5, 1.0, 2.0, 4.0]

    @given(st.integers(0, 10**6), st.floats(0, 1e9))
    def test_a_back_off_is_at_most_a_minute(self, spent: int, delay: float) -> None:
        assert 0 <= Budget(spent + 1, spent, delay=delay).back_off <= LONGEST_DELAY
        assert Budget(spent + 1, spent).back_off == 0

    def test_a_back_off_is_told_with_the_number_of_the_restart(self) -> None:
        assert str(Budget(3, 0, delay=2.0)) == "restart 1 of 3"
        assert str(Budget(3, 2, delay=2.0)) == "restart 3 of 3 in 4 s"

    def test_a_back_off_is_part_of_the_reason(self) -> None:
        program = role("program", "process", is_program=True)
        decision = decide(WORKER, program, Budget(3, 1, delay=2.0))
        assert decision.reason == "actor:2 ended with exit code 1; restart 2 of 3 in 2 s, alone"


class TestAWindow:
    SPEC = RoleSpec(
        "engine", 1, Entry("program", "x"), max_restarts=3, restart_window=10.0, restart_delay=1.0
    )

    def test_a_window_counts_the_restarts_of_its_last_seconds(self) -> None:
        budget = budget_of(self.SPEC, 7, [1.0, 5.0, 9.0], 12.0)
        assert budget == Budget(3, 2, 10.0, 1.0)
        assert [budget_of(self.SPEC, 7, [5.0], now).spent for now in (5.0, 14.9, 15.0)] == [1, 1, 0]

    def test_a_window_does_not_count_restarts_to_come_as_the_clock_was_set_back(self) -> None:
        assert budget_of(self.SPEC, 7, [100.0], 12.0).spent == 0

    def test_a_window_that_is_not_given_is_the_whole_time(self) -> None:
        spec = replace(self.SPEC, restart_window=0.0)
        assert budget_of(spec, 2, [1.0, 5.0, 9.0], 1e9).spent == 2

    @given(st.lists(st.floats(0, 100), max_size=6), st.floats(0, 100))
    def test_a_window_has_never_more_restarts_than_there_were(self, paid: list[float], now: float) -> None:
        budget = budget_of(self.SPEC, len(paid), paid, now)
        assert budget.spent == len([time for time in paid if 0 <= now - time < 10])
        assert budget.spent + budget.left == 3

    def test_a_window_is_named_when_its_restarts_are_spent(self) -> None:
        decision = decide(WORKER, role(), Budget(3, 3, window=60.0))
        assert decision.reason.endswith("all 3 restarts of role actor in 60 s are used up")


class TestATakenPort:
    LOSS = replace(WORKER, taken=True)

    @pytest.mark.parametrize(("restart", "action"), [("process", "restart_worker"), ("role", "restart_role")])
    def test_a_taken_port_costs_nothing_whatever_is_left(self, restart: Restart, action: str) -> None:
        decision = decide(self.LOSS, role("program", restart), Budget(0))
        assert (decision.action, decision.free, decision.code == EXIT_BUDGET) == (action, True, False)
        assert decision.reason == (
            "actor:2 ended with exit code 1, as another process listens on its port; it gets another one, at no cost"
        )


class TestAPermanentError:
    LOSS = replace(WORKER, permanent=True)

    @pytest.mark.parametrize("stale", [False, True])
    @pytest.mark.parametrize("kind", ["workload", "trainer"])
    def test_a_permanent_error_ends_the_job_in_the_first_start_of_a_rank(
        self, kind: EntryKind, stale: bool
    ) -> None:
        decision = decide(replace(self.LOSS, stale=stale), *alone(kind))
        assert (decision.action, decision.code == EXIT_BUDGET) == ("end_job", False)
        assert decision.reason == (
            "actor:2 ended with exit code 1, before it was up, with an error that a restart cannot mend"
        )

    def test_a_permanent_error_is_one_like_any_other_when_the_worker_was_up_or_the_rank_may_have_been(
        self,
    ) -> None:
        assert decide(replace(self.LOSS, recoverable=True), *alone()).action == "restart_worker"
        assert decide(replace(self.LOSS, first_start=False), *alone()).action == "restart_worker"


class TestAProcessAlone:
    @pytest.mark.parametrize(
        ("survivors", "words"),
        [
            (3, "actor:2 alone, actor's other 3 ranks keep their memory and form generation 1"),
            (1, "actor:2 alone, actor's other rank keeps its memory and forms generation 1"),
            (0, "actor:2 alone, as generation 1"),
        ],
    )
    def test_a_single_process_is_started_again_where_the_others_keep_their_memory(
        self, survivors: int, words: str
    ) -> None:
        decision = decide(WORKER, *alone(survivors=survivors))
        assert decision.action == "restart_worker"
        assert decision.reason == f"actor:2 ended with exit code 1; restart 1 of 3: {words}"

    def test_a_single_process_spends_the_budget_of_its_role(self) -> None:
        decision = decide(WORKER, *alone(spent=3))
        assert (decision.action, decision.code == EXIT_BUDGET) == ("end_job", True)
        assert decision.reason.endswith("all 3 restarts of role actor are used up")

    def test_a_single_process_that_is_a_trainer_must_have_said_that_it_is_recoverable(self) -> None:
        yes, no, unknown = (
            decide(replace(WORKER, recoverable=said), *alone("trainer")) for said in (True, False, None)
        )
        assert (yes.action, no.action, unknown.action) == ("restart_worker", "end_job", "end_job")
        assert no.code != EXIT_BUDGET
        assert no.reason == (
            "actor:2 ended with exit code 1; actor:2 is not recoverable (is_recoverable() returned False)"
        )
        assert unknown.reason.endswith("actor:2 had not told yet whether it is recoverable")

    def test_a_single_process_that_waited_in_a_generation_that_is_over_spends_nothing(self) -> None:
        stale = replace(WORKER, stale=True)
        decision = decide(stale, *alone(spent=3, generation=2))
        assert decision.action == "join"
        assert decision.reason == (
            "actor:2 ended with exit code 1; it was in a generation that another death had ended, and joins "
            "generation 2 at no cost"
        )
        assert decide(replace(stale, recoverable=False), *alone("trainer")).action == "end_job"

    def test_the_successor_of_one_that_was_called_in_the_present_generation_joins_the_next(self) -> None:
        decision = decide(replace(WORKER, stale=True, called=True), *alone(spent=3, generation=2))
        assert (decision.action, decision.free) == ("restart_worker", True)
        assert decision.reason.endswith("had ended, and joins generation 3 at no cost")


@pytest.mark.parametrize(("restart", "action"), [("process", "restart_worker"), ("role", "restart_role")])
def test_a_store_that_never_served_spends_a_restart(restart: Restart, action: str) -> None:
    decision = decide(STORE, role(restart=restart), Budget(1))
    assert decision.action == action
    assert decision.reason == "the store of role actor is gone; restart 1 of 1 of role actor"
    spent = decide(STORE, role(restart=restart), Budget(1, 1))
    assert (spent.action, spent.code == EXIT_BUDGET) == ("end_job", True)


class TestALostNode:
    def test_a_lost_node_has_its_workloads_started_elsewhere_and_the_others_keep_their_memory(self) -> None:
        decision = decide(NODE, *alone(survivors=2))
        assert decision.action == "restart_worker"
        assert decision.reason == (
            "n1 is gone; restart 1 of 3: actor:0-1 elsewhere, actor's other 2 ranks keep their memory and form generation 1"
        )

    def test_a_lost_node_has_its_scripts_start_again_together(self) -> None:
        decision = decide(NODE, role(), Budget(3))
        assert decision.action == "restart_role"
        assert decision.reason == "n1 is gone; restart 1 of 3 of role actor, with actor:0-1 elsewhere"

    @given(st.integers(0, 5), st.integers(0, 5))
    def test_a_lost_node_is_one_restart_of_the_role_while_there_is_one(self, spent: int, limit: int) -> None:
        decision = decide(NODE, *alone(limit=limit, spent=spent))
        assert (decision.action == "restart_worker") == (spent < limit)
        assert (decision.code == EXIT_BUDGET) == (spent >= limit > 0)

    @pytest.mark.parametrize(
        ("recoverable", "action"), [(None, "end_job"), (False, "end_job"), (True, "restart_worker")]
    )
    def test_a_lost_node_ends_the_job_unless_its_trainer_had_said_that_it_is_recoverable(
        self, recoverable: bool | None, action: str
    ) -> None:
        assert decide(replace(NODE, recoverable=recoverable), *alone("trainer")).action == action


class TestAnyLoss:
    """A loss in words, the ranks that it is about, and whether one worker may start again alone."""

    @given(losses, roles, budgets)
    def test_any_loss_has_a_reason_that_begins_with_what_happened_and_says_what_follows(
        self, loss: Loss, role: RoleState, budget: Budget
    ) -> None:
        decision = decide(loss, role, budget)
        told = decision.reason.removeprefix(f"{loss.what}; ")
        assert told != decision.reason
        if unrecoverable(loss, role):
            no = "is not recoverable (is_recoverable() returned False)"
            unknown = "had not told yet whether it is recoverable"
            assert told == f"{loss.who} {unknown if loss.recoverable is None else no}"
        elif budget.limit == 0:
            assert told == "role actor has no restarts (--max-restarts 0)"
        elif budget.left <= 0:
            assert told == f"all {budget.limit} restarts of role actor are used up"
        else:
            assert told.startswith(f"restart {budget.spent + 1} of {budget.limit}")
            whole = decision.action == "restart_role" or not loss.ranks
            assert whole or f"generation {role.generation + 1}" in told

    @given(losses, roles, budgets)
    def test_any_loss_is_followed_by_a_restart_within_the_budget_and_never_of_an_unrecoverable_trainer(
        self, loss: Loss, role: RoleState, budget: Budget
    ) -> None:
        decision = decide(loss, role, budget)
        by_itself = role.restart == "process" and not loss.together
        again = "restart_worker" if by_itself else "restart_role"
        fatal, spent = unrecoverable(loss, role), budget.left <= 0
        assert decision.action == ("end_job" if fatal or spent else again)
        assert (decision.code == EXIT_BUDGET) == (spent and budget.limit > 0 and not fatal)

    @given(losses, roles, budgets)
    def test_any_loss_of_a_stale_worker_spends_nothing_whatever_is_left_of_the_budget(
        self, loss: Loss, role: RoleState, budget: Budget
    ) -> None:
        decision = decide(replace(loss, stale=True), role, budget)
        again = "restart_worker" if loss.called else "join"
        assert decision.action == ("end_job" if unrecoverable(loss, role) else again)
        assert decision.code != EXIT_BUDGET


def unrecoverable(loss: Loss, role: RoleState) -> bool:
    return role.kind == "trainer" and bool(loss.ranks) and not loss.recoverable


def test_the_table_of_consequences_is_in_the_documentation() -> None:
    text = text_of("docs/failover.md")
    assert runpy.run_path(str(ROOT / "docs/failover.py"))["page"](text) == text, "make docs writes it"
