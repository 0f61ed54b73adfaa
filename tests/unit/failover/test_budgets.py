"""Budgets of ranks, roles and the job: when one is spent, the level above restarts, and nothing is reset."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.failover.job import KILL, TERM, Job
from tests.unit.failover.multi_node import gone, nodes, scripts
from tests.unit.failover.services import Services, program, service
from tests.unit.failover.takeover import join, take_over
from tests.unit.failover.workloads import reformed, serving, up
from unirun.collocation import Inventory
from unirun.errors import EXIT_BUDGET, EXIT_PLACEMENT
from unirun.failover.draft import After, Due
from unirun.failover.policy import on_this_clock
from unirun.failover.state import Ranks, RolePhase, Strike
from unirun.wire.messages import StartRole, StopWorkers
from unirun.wire.reports import Notice, OpenStore, StoreOpened

J = TypeVar("J", bound=Job)


def settings(job: J, *, of_roles: dict[str, Any] | None = None, **more: Any) -> J:
    """The job with other settings, of itself and of each of its roles."""
    spec = job.state.spec
    roles = tuple(replace(role, **(of_roles or {})) for role in spec.roles)
    job.state = replace(job.state, spec=replace(spec, roles=roles, **more))
    return job


class TestTheJobLevel:
    def job(self, **more: Any) -> Job:
        job = Job({"actor": 2, "rollout": 1}, restarts={"actor": 1})
        return settings(job, **{"max_job_restarts": 1, **more}).running()

    def test_the_job_restarts_when_the_restarts_of_a_role_are_used_up(self) -> None:
        """
        1. A failure of an actor restarts its role, the next one all roles, with one reason.
        2. All ranks are new ones, in the next generation of their role.
        3. The third failure ends the job with the exit code of a spent budget.
        """
        job = self.job().exits("actor", 0, 1).obey().all_run("actor")
        job.exits("actor", 1, 1)
        reason = "actor:1 ended with exit code 1; all 1 restarts of role actor are used up; restart 1 of 1 of the job"
        assert [notice.text for notice in job.told(Notice)] == [reason]
        assert [order.role for order in job.orders(StopWorkers)] == ["actor", "rollout"]
        assert job.phases() == {"actor": "restarting", "rollout": "restarting"}
        job.obey()
        assert {name: role.generation for name, role in job.state.roles.items()} == {"actor": 2, "rollout": 1}
        for name in job.state.roles:
            job.all_run(name)
        assert job.phases() == {"actor": "running", "rollout": "running"}
        assert [worker.incarnation for worker in job.state.roles["rollout"].workers] == [1]
        assert (job.state.restarts, job.state.roles["rollout"].restarts) == (1, 0)
        job.exits("rollout", 0, 1).obey()
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_BUDGET
        assert "all 1 restarts of the job are used up" in job.finish.verdict.reason

    def test_the_job_restarts_with_the_number_of_its_restarts_in_the_environment(self) -> None:
        job = self.job().exits("rollout", 0, 1)
        job.exits("actor", 0, by=TERM, asked=TERM).exits("actor", 1, by=TERM, asked=TERM)
        assert [order.restarts for order in job.orders(StartRole)] == [1, 1]

    def test_the_job_restarts_for_a_trainer_that_is_not_recoverable(self) -> None:
        job = up(serving(), "trainer", recoverable=False)
        settings(job, max_job_restarts=1).exits("trainer", 0, by=KILL)
        assert job.phases() == {"actor": "restarting", "trainer": "restarting"}
        assert job.orders(StartRole) == []
        job.obey()
        assert job.phases() == {"actor": "starting", "trainer": "starting"}

    def test_the_job_restarts_with_the_roles_that_have_succeeded(self) -> None:
        job = self.job().exits("actor", 0).exits("actor", 1).exits("rollout", 0, 1)
        assert job.phases() == {"actor": "starting", "rollout": "starting"}
        assert [worker.incarnation for worker in job.state.roles["actor"].workers] == [1, 1]
        job.all_run("actor").all_run("rollout").exits("rollout", 0)
        assert job.exits("actor", 0).exits("actor", 1).state.phase == "succeeded"

    def test_the_job_restarts_with_programs_that_have_succeeded_in_their_order(self) -> None:
        job = Services(service(), program("first"), program("train", after={"first": 0}))
        settings(job, max_job_restarts=1).up().exits("first", 0).exits("train", 0, 1).obey()
        assert job.phases() == {"engine": "starting", "first": "starting", "train": "restarting"}

    @pytest.mark.parametrize("spare", [True, False])
    def test_the_job_restarts_with_a_role_that_has_left_its_slot_to_another_one(self, *, spare: bool) -> None:
        """The rollout has moved to the slot of the actor, which had succeeded. There is one for both on another node, or
        the job ends."""
        job = Job(
            {"actor": 1, "rollout": 1}, restarts={"rollout": 1}, inventory=nodes(2, devices=1)
        ).running()
        job.exits("actor", 0).on(gone("n1")).all_run("rollout")
        assert [place.node for place in job.state.placement.assignments] == ["n0", "n0"]
        if spare:
            more = Inventory((*job.state.inventory.nodes, replace(nodes(1, devices=1).nodes[0], name="n2")))
            job.state = replace(job.state, inventory=more)
            job.on(job.join("n2"))
        settings(job, max_job_restarts=1).exits("rollout", 0, 1)
        if spare:
            assert {place.node for place in job.state.placement.assignments} == {"n0", "n2"}
            assert job.phases() == {"actor": "starting", "rollout": "starting"}
            return
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_PLACEMENT
        assert "actor cannot start again with the job" in job.finish.verdict.reason

    def test_the_job_restarts_on_other_nodes_after_the_loss_of_one(self) -> None:
        job = scripts(2, of=2, restarts=0)
        settings(job, max_job_restarts=1).running().on(gone("n0"))
        assert job.phases() == {"actor": "starting"}
        assert {worker.node for worker in job.state.roles["actor"].workers} == {"n1"}
        assert job.state.restarts == 1

    def test_the_job_restarts_not_for_an_optional_service(self) -> None:
        job = Services(service(max_restarts=0, optional=True), program())
        settings(job, max_job_restarts=1).up().exits("engine", 0, 1)
        assert job.phases() == {"engine": "failed", "train": "running"}

    def test_the_job_restarts_in_the_order_of_its_first_start(self) -> None:
        """A role that starts after a service waits until that is ready again."""
        job = Services(service(), program(after={"engine": 0}))
        settings(job, max_job_restarts=1).up().exits("train", 0, 1).obey()
        assert job.phases() == {"engine": "starting", "train": "restarting"}
        assert job.state.roles["train"].due
        job.ready("engine")
        assert [order.role for order in job.orders(StartRole)] == ["train"]

    def test_the_job_restarts_after_its_back_off(self) -> None:
        job = self.job(max_job_restarts=2, restart_delay=2.0)
        job.exits("rollout", 0, 1).obey().all_run("rollout").all_run("actor")
        job.exits("rollout", 0, 1)
        assert {c.delay for c in job.commands if isinstance(c, After) and c.event == Due.START} == {2.0}
        assert not job.obey().orders(OpenStore)
        job.now += 2.0
        assert {order.role for order in job.on(Due.START).orders(OpenStore)} == {"actor", "rollout"}

    def test_the_job_restarts_once_though_a_role_was_about_to_form_a_generation(self) -> None:
        """The store of that generation comes when its survivors were told to end: it is of no use any more."""
        job = serving(restarts=1)
        job.stores_open = False
        settings(job, max_job_restarts=1).exits("actor", 0, by=KILL).exits("trainer", 0, by=KILL)
        job.exits("actor", 1, by=KILL)
        assert job.state.restarts == 1
        job.on(StoreOpened("actor", 1))
        assert job.phases()["actor"] == "restarting"
        for rank in (2, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert job.state.roles["actor"].generation == 2

    def test_the_job_restarts_in_its_order_though_a_store_comes_that_was_ordered_before(self) -> None:
        """Until the processes of all other roles have ended, none of the next generation starts."""
        job = settings(Job({"actor": 1, "rollout": 2}, restarts={"actor": 1}), max_job_restarts=1).running()
        job.stores_open = False
        job.exits("actor", 0, 1).exits("rollout", 0, 1)
        job.on(StoreOpened("actor", 1))
        assert job.phases() == {"actor": "restarting", "rollout": "restarting"}
        assert job.exits("rollout", 1, by=TERM, asked=TERM).orders(OpenStore) == [
            OpenStore("actor", 1),
            OpenStore("rollout", 1),
        ]
        job.on(StoreOpened("actor", 1))
        assert [order.role for order in job.orders(StartRole)] == ["actor"]


class TestARank:
    def test_a_rank_with_a_spent_budget_restarts_its_whole_role(self) -> None:
        job = settings(serving(restarts=9), of_roles={"rank_restarts": 1})
        reformed(job.exits("actor", 1, by=KILL))
        reformed(job.exits("actor", 2, by=KILL))
        job.exits("actor", 1, by=KILL)
        assert job.state.roles["actor"].phase is RolePhase.RESTARTING
        assert (
            "all 1 restarts of actor:1 are used up; restart 3 of 9 of role actor" in job.told(Notice)[0].text
        )

    def test_a_rank_with_a_spent_budget_ends_the_job_if_its_role_restarts_as_a_whole_anyhow(self) -> None:
        job = settings(Job({"actor": 2}, restarts={"actor": 9}), of_roles={"rank_restarts": 1}).running()
        job.exits("actor", 1, 1).obey().all_run("actor").exits("actor", 1, 1).obey()
        assert job.finish is not None
        assert job.finish.verdict.code == EXIT_BUDGET

    def test_a_rank_of_programs_spends_one_restart_for_each_of_its_failures(self) -> None:
        job = Services(program(count=2, max_restarts=9, rank_restarts=2)).up()
        for _ in range(2):
            job.dies("train").obey().all_run("train")
        assert job.phases() == {"train": "running"}
        assert "all 2 restarts of train:0 are used up" in job.dies("train").records

    def test_a_rank_has_a_budget_within_the_window(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 9})
        settings(job, of_roles={"rank_restarts": 1, "restart_window": 60.0}).running()
        for _ in range(3):
            job.exits("actor", 0, 1).all_run("actor")
            job.now += 60.0
        assert job.state.roles["actor"].restarts == 3


class TestABackOff:
    @pytest.mark.parametrize("kinds", [None, {"actor": "workload"}])
    def test_a_back_off_delays_the_store_of_the_next_generation(self, kinds: Any) -> None:
        job = Job({"actor": 2, "rollout": 1}, restarts={"actor": 9}, kinds=kinds)
        settings(job, of_roles={"restart_delay": 2.0}).running()
        job.exits("actor", 0, 1).obey().all_run("actor")
        job.exits("actor", 0, 1).obey()
        assert job.orders(OpenStore) == []
        job.now += 2.0
        job.on(Due.START)
        assert job.orders(OpenStore) == [OpenStore("actor", 2)]
        assert job.all_run("actor").state.roles["actor"].restarts == 2

    @pytest.mark.parametrize("comes", [True, False])
    def test_a_back_off_is_waited_for_by_the_next_master(self, *, comes: bool) -> None:
        """All nodes come to it, or one that nothing ran on is given up."""
        job = Job({"actor": 1}, restarts={"actor": 9}, inventory=nodes(2))
        settings(job, of_roles={"restart_delay": 30.0}).running()
        job.exits("actor", 0, 1).all_run("actor").exits("actor", 0, 1)
        before = job.state
        take_over(job)
        join(job, before, "n0")
        assert not any(isinstance(c, After) and c.event == Due.START for c in job.commands)
        join(job, before, "n1") if comes else job.on(Due.REJOIN)
        (wait,) = (c.delay for c in job.commands if isinstance(c, After) and c.event == Due.START)
        assert 20.0 < wait < 30.0
        assert job.orders(OpenStore) == []
        job.now += wait
        assert job.on(Due.START).orders(OpenStore) == [OpenStore("actor", 2)]


class TestAnotherClock:
    def test_another_clock_that_is_behind_counts_the_restarts_of_the_window(self) -> None:
        job = settings(Job({"actor": 1}, restarts={"actor": 1}), of_roles={"restart_window": 60.0}).running()
        job.exits("actor", 0, 1).all_run("actor")
        job.now -= 3600.0
        take_over(job)
        assert job.state.roles["actor"].paid == (job.now,)

    @given(st.lists(st.floats(0, 1e6), max_size=5), st.floats(0, 1e6))
    def test_another_clock_keeps_the_distances_of_restarts(self, paid: list[float], now: float) -> None:
        job = Job({"actor": 1})
        role = job.state.roles["actor"]
        workers = Ranks(replace(worker, paid=tuple(paid)) for worker in role.workers)
        strikes = tuple(Strike("actor", 0, "n0", time) for time in paid)
        state = replace(
            job.state, paid=tuple(paid), roles={"actor": replace(role, workers=workers)}, strikes=strikes
        )
        found = on_this_clock(state, now)
        assert found.roles["actor"].workers[0].paid == found.paid
        assert [strike.time for strike in found.strikes] == pytest.approx(found.paid)
        assert all(time <= now for time in found.paid)
        for before, after in zip(paid, found.paid, strict=True):
            assert after - found.paid[0] == pytest.approx(before - paid[0], abs=1e-3)
