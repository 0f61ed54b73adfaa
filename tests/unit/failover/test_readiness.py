"""Roles start in their order, ranks of services start again alone, and services end last."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import KILL, TERM
from tests.unit.failover.multi_node import gone, nodes
from tests.unit.failover.phase_rows import fails_again, fails_again_in_place, optional
from tests.unit.failover.services import Services, place, program, service
from tests.unit.failover.takeover import join, rejoin, take_over
from unirun.collocation import place as place_job
from unirun.errors import EXIT_BUDGET, EXIT_PLACEMENT, EXIT_RENDEZVOUS, Refused
from unirun.failover.draft import Due, Straggles, addresses_of
from unirun.failover.policy import LONGEST_DELAY
from unirun.failover.readiness import waiting_to_start
from unirun.failover.state import NEVER, JobPhase, RolePhase, new_job
from unirun.failover.step import step
from unirun.spec.job import Entry, RoleSpec
from unirun.values import RankAddress, WorkerId
from unirun.wire.messages import Reserve, StartRole, Stop, View
from unirun.wire.reports import FromWorker, Health, Notice, Placed, StoreEnded

AFTER = {"engine": 0}


class TestPorts:
    def test_ports_are_asked_of_the_agents_once_all_have_joined_and_before_anything_starts(self) -> None:
        job = Services(service(count=3), program(), nodes=("n0", "n1")).launched()
        assert job.orders(Reserve) == [Reserve("engine", (0, 2)), Reserve("engine", (1,))]
        assert job.orders(StartRole) == []

    def test_ports_are_known_to_all_before_the_first_role_starts(self) -> None:
        job = Services(service(count=2), program(), nodes=("n0", "n1")).launched()
        job.on(Placed("n0", "engine", (0,), (place("n0", 0),)))
        assert job.begun == []
        job.on(Placed("n1", "engine", (1,), (place("n1", 1),)))
        assert sorted(job.begun) == [("engine", [0]), ("engine", [1]), ("train", [0])]
        places = {"engine": (RankAddress("n0", (20000,)), RankAddress("n1", (20001,)))}
        assert all(order.places == places for order in job.orders(StartRole))

    def test_ports_are_not_asked_again_while_an_agent_thinks(self) -> None:
        job = Services(service(), program()).launched()
        assert job.later(10).orders(Reserve) == []

    def test_ports_of_another_agent_or_for_ranks_that_have_some_are_ignored(self) -> None:
        job = Services(service(), program()).up()
        before = job.worker().place
        job.on(Placed("n0", "engine", (0,), (place("n0", 0, port=5),)))
        assert job.worker().place == before

    @pytest.mark.parametrize(
        "said", [((1,), (RankAddress("n0", (1,)),)), ((0,), (RankAddress("n0", (1, 2)),))]
    )
    def test_ports_that_do_not_fit_the_role_are_refused(
        self, said: tuple[tuple[int, ...], tuple[RankAddress, ...]]
    ) -> None:
        job = Services(service(), program()).launched()
        with pytest.raises(Refused, match="other ports than engine:"):
            step(job.state, Placed("n0", "engine", *said), job.now)

    def test_ports_that_no_agent_has_end_the_job_with_3_and_say_what_to_do(self) -> None:
        job = Services(service(count=3), program(), nodes=("n0", "n1")).launched()
        why = "no port from 5 to 6 is free on this host; widen port_range: 20000-29999"
        job.on(Placed("n0", "engine", (0, 2), (), why))
        assert job.end == (EXIT_PLACEMENT, f"engine:0,2 cannot start on n0: {why}")

    def test_ports_that_no_agent_has_end_no_job_when_the_service_is_optional(self) -> None:
        """Others are told of port 0, at which nobody listens."""
        job = Services(service(count=3, optional=True), program(), nodes=("n0", "n1")).launched()
        job.on(Placed("n0", "engine", (0, 2), (), "none is free"))
        (notice,) = job.told(Notice)
        assert (notice.source, notice.text.split("; ")) == (
            "engine:0,2",
            ["engine:0,2 cannot start on n0: none is free", "the job goes on without it"],
        )
        job.on(Placed("n1", "engine", (1,), (place("n1", 1),)))
        assert sorted(job.begun) == [("engine", [1]), ("train", [0])]
        nowhere = RankAddress("n0", (0,))
        assert job.orders(StartRole)[0].places == {"engine": (nowhere, place("n1", 1), nowhere)}

    def test_ports_that_are_not_there_for_a_restart_end_the_job_as_well(self) -> None:
        job = Services(service(), program()).begin().dies(taken=True)
        job.on(Placed("n0", "engine", (0,), (), "none is free"))
        assert job.ended == [("train", [0], TERM)]
        assert job.state.verdict is not None
        assert job.state.verdict.code == EXIT_PLACEMENT

    def test_ports_stay_when_a_rank_starts_again(self) -> None:
        job = Services(service(), program()).up()
        before = job.worker().place
        job.dies()
        assert (job.begun, job.orders(Reserve)) == ([("engine", [0])], [])
        assert job.worker().place == before

    def test_ports_that_another_process_has_taken_are_chosen_anew_at_no_cost(self) -> None:
        job = Services(service(), program("train", after=AFTER)).begin()
        job.dies(taken=True)
        assert (job.orders(Reserve), job.begun) == ([Reserve("engine", (0,))], [])
        assert job.worker().paid == ()
        (notice,) = job.told(Notice)
        assert notice.text.endswith("another process listens on its port; it gets another one, at no cost")
        job.on(Placed("n0", "engine", (0,), (RankAddress("n0", (7,)),)))
        assert job.begun == [("engine", [0])]
        assert job.ready().begun == [("train", [0])]
        assert job.orders(StartRole)[0].places == {"engine": (RankAddress("n0", (7,)),)}

    def test_ports_of_an_optional_service_that_has_lost_them_are_known_to_others_all_the_same(self) -> None:
        job = Services(service(optional=True), program("train", after=AFTER)).begin()
        job.dies(cause="unready", taken=True, note="was not ready within 1 s")
        assert job.begun == [("train", [0])]
        assert [*job.orders(StartRole)[0].places] == ["engine"]

    def test_ports_are_told_to_all_processes_with_the_readiness_of_their_ranks(self) -> None:
        job = Services(service(count=2), program()).begin()
        job.all_run("engine").ready("engine", 1).on(Due.VIEW)
        told = addresses_of(job.orders(View)[-1], job.state.spec)["engine"]
        assert [(each["rank"], each["addr"], each["ready"]) for each in told] == [
            (0, "n0:20000", False),
            (1, "n0:20001", True),
        ]


class TestOrder:
    def test_order_is_a_role_after_all_ranks_of_another_are_ready(self) -> None:
        job = Services(service(count=2), program("train", after=AFTER)).begin()
        assert job.begun == [("engine", [0, 1])]
        assert job.all_run("engine").begun == []
        assert job.ready("engine", 0).begun == []
        assert job.ready("engine", 1).begun == [("train", [0])]

    def test_order_is_a_role_after_one_rank_of_another_if_that_is_enough(self) -> None:
        job = Services(service(count=2), program("train", after={"engine": 1})).begin()
        job.all_run("engine")
        assert job.ready("engine", 1).begun == [("train", [0])]

    def test_order_is_a_role_after_several(self) -> None:
        job = Services(
            service(), service("router", after=AFTER), program("train", after={**AFTER, "router": 0})
        )
        assert job.begin().begun == [("engine", [0])]
        assert job.ready().begun == [("router", [0])]
        assert job.ready("router").begun == [("train", [0])]
        assert [job.state.roles[name].wave for name in ("engine", "router", "train")] == [1, 2, 3]

    def test_order_without_a_probe_is_that_of_processes_that_run(self) -> None:
        job = Services(service(ready=None), program("train", after=AFTER)).begin()
        assert job.all_run("engine").begun == [("train", [0])]

    def test_order_is_also_a_role_after_another_has_done_its_work(self) -> None:
        job = Services(program("data"), program("train", after={"data": 0}), primary=("train",)).begin()
        job.all_run("data")
        assert job.state.roles["train"].phase is RolePhase.STARTING

    def test_order_counts_for_the_first_start_alone(self) -> None:
        job = Services(service(), program("train", after=AFTER, max_restarts=1, restart="process")).up()
        job.ready(ok=False, why="status 500")
        assert job.dies("train").begun == [("train", [0])]

    def test_order_goes_on_without_the_ranks_of_an_optional_service_that_are_given_up(self) -> None:
        engine = service(count=2, optional=True, max_restarts=0)
        job = Services(engine, program("train", after=AFTER)).begin()
        job.all_run("engine").dies(rank=0)
        assert job.begun == []
        assert job.ready("engine", 1).begun == [("train", [0])]
        job = Services(engine, program("train", after={"engine": 2})).begin()
        job.dies(rank=0)
        assert job.dies(rank=1).begun == [("train", [0])]

    def test_order_is_a_role_after_the_rank_that_has_to_leave_its_slot(self) -> None:
        """The role that waits gets the slot of a straggler, which still ends there."""
        actor, critic = (RoleSpec(name, 1, Entry("script", "a.py")) for name in ("actor", "critic"))
        gate = service("gate", ports=())
        job = Services(actor, replace(critic, after={"gate": 0}), gate, primary=("actor",))
        spec, placement = place_job(job.state.spec, nodes(3, 1))
        job.state = new_job(spec, placement, started=job.now, logs="/logs", inventory=nodes(3, 1))
        job.launched().all_run("actor")
        slots = [job.state.placement.of_role(name)[0].node for name in ("actor", "critic")]
        job.on(Straggles(WorkerId("actor", 0, 0), "actor:0 is slow"), gone(slots[1]))
        assert job.state.placement.of_role("critic")[0].node == slots[0]
        assert job.ready("gate").begun == []
        job.exits("actor", 0, by=TERM, asked=TERM)
        assert sorted(job.begun) == [("actor", [0]), ("critic", [0])]

    def test_order_is_told_in_words_while_a_role_waits(self) -> None:
        job = Services(service(count=2), program("train", after=AFTER)).begin()
        job.all_run("engine").ready("engine", 1)
        job.ready("engine", 0, ok=False, why="nothing listens on port 20000 yet")
        assert waiting_to_start(job.state) == (
            "train starts after engine, of which 1 of 2 are ready (nothing listens on port 20000 yet)",
        )
        job.ready("engine", 0)
        assert waiting_to_start(job.state) == ()


@pytest.mark.parametrize(
    ("engine", "train"),
    [({}, {}), ({"group": 2}, {}), ({}, {"ports": ("http",), "count": 1000})],
    ids=["ranks", "groups", "ports of the role that waits"],
)
def test_an_event_of_one_engine_costs_the_same_whatever_their_number(
    engine: dict[str, Any], train: dict[str, Any]
) -> None:
    def calls(count: int) -> int:
        """The number of function calls when one engine of many is ready while another role waits."""
        train["count"] = min(count, train.get("count", 1))
        job = Services(service(count=count, **engine), program(after=AFTER, **train)).begin().later(0)
        found: list[str] = []
        sys.setprofile(lambda frame, kind, _: found.append(kind) if kind == "call" else None)
        try:
            step(job.state, FromWorker(WorkerId("engine", 0, 0), Health(True, job.now)), job.now)
        finally:
            sys.setprofile(None)
        assert job.state.roles["train"].phase is RolePhase.WAITING
        return len(found)

    assert calls(1000) < calls(10) + 50


class TestReadiness:
    def test_readiness_makes_a_role_run_and_its_loss_does_not_stop_it(self) -> None:
        job = Services(service(), program()).begin()
        assert job.all_run("engine").phases()["engine"] == "starting"
        assert job.ready("engine", 0).phases()["engine"] == "running"
        assert "ready: engine:0 is ready" in job.records
        job.ready("engine", 0, ok=False, why="status 500")
        assert job.phases()["engine"] == "starting"
        assert "unready: engine:0 is not ready: status 500" in job.records
        assert (job.begun, job.ended) == ([], [])
        assert job.ready("engine", 0).phases()["engine"] == "running"

    def test_readiness_is_recorded_when_it_changes_and_not_with_each_reason(self) -> None:
        job = Services(service(), program()).begin().all_run("engine")
        job.ready("engine", 0, ok=False, why="nothing listens")
        assert job.records == ""
        job.ready("engine", 0, ok=False, why="status 503")
        assert job.records == ""

    def test_readiness_of_a_worker_that_has_ended_or_has_no_probe_is_ignored(self) -> None:
        job = Services(service(), program()).up()
        who = WorkerId("engine", 0, 0)
        job.dies().on(FromWorker(who, Health(True, 1.0)))
        assert job.worker().health is None
        job.on(FromWorker(WorkerId("train", 0, 0), Health(True, 1.0)))
        assert job.worker("train").health is None

    def test_readiness_that_never_came_ends_the_job_with_4(self) -> None:
        job = Services(service(), program("train", after=AFTER)).begin()
        why = "was not ready within 9 s: nothing listens on port 20000 yet"
        job.dies(cause="unready", note=why)
        assert job.end is not None
        assert job.end[0] == EXIT_RENDEZVOUS == 4
        assert why in job.end[1]

    def test_readiness_that_does_not_come_back_after_a_restart_spends_the_budget(self) -> None:
        job = Services(service(max_restarts=2), program()).up()
        job.dies()
        job.dies(cause="unready", note="was not ready within 9 s")
        assert job.ended == []
        job.later(2).dies(cause="unready", note="was not ready within 9 s")
        assert job.state.phase is JobPhase.STOPPING

    def test_readiness_that_a_program_did_not_live_to_see_is_told_with_its_last_lines(self) -> None:
        job = Services(service(), program()).begin()
        job.dies(code=3, tail="OSError: no model")
        (notice,) = job.told(Notice)
        assert notice.text.startswith("engine:0 ended with exit code 3 before it was ready; restart 1 of 3")
        assert notice.text.endswith("\nOSError: no model")


class TestRestarts:
    def test_restarts_are_of_one_rank_alone(self) -> None:
        job = Services(service(count=3), program("train", after=AFTER)).up().dies(rank=1)
        assert (job.begun, job.ended) == ([("engine", [1])], [])
        assert [worker.incarnation for worker in job.state.roles["engine"].workers] == [0, 1, 0]
        assert job.phases() == {"engine": "starting", "train": "running"}
        assert job.ready("engine", 1).phases()["engine"] == "running"

    def test_restarts_back_off_twice_as_long_each_time(self) -> None:
        job = Services(service(max_restarts=4), program()).up()
        assert (job.dies().begun, job.delays) == ([("engine", [0])], [])
        assert (job.dies().begun, job.delays) == ([], [1.0])
        assert job.later(0.5).begun == []
        assert job.later(0.5).begun == [("engine", [0])]
        assert (job.dies().begun, job.delays) == ([], [2.0])
        assert job.later(1.5).begun == []
        assert job.later(0.5).begun == [("engine", [0])]
        assert (job.dies().begun, job.delays) == ([], [4.0])

    def test_restarts_back_off_a_minute_at_most_also_when_the_clock_is_set_back(self) -> None:
        job = Services(service(restart_delay=1e6), program()).up().dies().dies()
        assert job.delays == [LONGEST_DELAY]
        assert job.later(-1000.0).begun == [("engine", [0])]

    def test_restarts_have_a_budget_of_each_rank(self) -> None:
        job = Services(service(count=2, max_restarts=1, restart_delay=0.0), program()).up()
        assert job.dies(rank=0).dies(rank=1).begun == [("engine", [1])]
        job.dies(rank=1)
        assert job.ended == [("train", [0], TERM)]
        job.obey()
        assert job.ended == [("engine", [0], TERM)]
        job.obey()
        assert job.end is not None
        assert job.end[0] == EXIT_BUDGET
        assert "all 1 restarts of role engine in 100 s are used up" in job.end[1]

    def test_restarts_are_forgotten_after_the_window(self) -> None:
        job = Services(service(max_restarts=2), program()).up()
        job.dies().dies().later(2)
        job.now += 100
        assert (job.dies().begun, job.delays) == ([("engine", [0])], [])
        assert job.state.phase is JobPhase.RUNNING

    def test_restarts_without_a_window_all_count(self) -> None:
        job = Services(service(max_restarts=2, restart_window=0.0), program()).up()
        job.dies().dies().later(2)
        job.now += 1e6
        assert job.dies().state.phase is JobPhase.STOPPING

    def test_restarts_follow_an_end_with_0_which_is_a_failure_of_a_service(self) -> None:
        job = Services(service(max_restarts=1), program()).up().dies(code=0)
        assert job.begun == [("engine", [0])]
        (notice,) = job.told(Notice)
        assert notice.text == "engine:0 ended with exit code 0, too early; restart 1 of 1, alone"
        job.dies(code=0).obey()
        assert job.end is not None
        assert job.end[0] == EXIT_BUDGET

    def test_restarts_of_a_program_that_does_not_answer_have_the_words_of_its_agent(self) -> None:
        job = Services(service(), program()).up()
        job.dies(cause="silent", note="did not answer 3 times in a row: status 500")
        (notice,) = job.told(Notice)
        assert notice.text == "engine:0 did not answer 3 times in a row: status 500; restart 1 of 3, alone"

    def test_restarts_of_an_optional_service_end_and_the_job_goes_on(self) -> None:
        job = Services(service(optional=True, max_restarts=0), program()).up().dies(tail="Killed")
        assert job.told(Notice)[0].text.endswith("; the job goes on without it\nKilled")
        assert (job.phases()["engine"], job.worker().due, job.begun) == ("failed", NEVER, [])
        job.dies("train", code=0)
        assert job.end is not None
        assert job.end[0] == 0

    @pytest.mark.parametrize("fails", [fails_again, fails_again_in_place])
    def test_restarts_of_an_optional_service_may_end_while_it_is_formed_anew(
        self, fails: Callable[[], Services]
    ) -> None:
        job = fails().obey()
        assert job.phases() == {"train": "running", "engine": "failed"}

    def test_ranks_of_an_optional_service_end_by_order_when_it_has_lost_its_store(self) -> None:
        job = Services(program(), optional(2, restart="process")).running().dies("engine", 0)
        job.on(StoreEnded("engine", 1, job.now, "it was killed"))
        assert job.ended == [("engine", [0], TERM), ("engine", [1], TERM)]
        assert job.obey().phases() == {"train": "running", "engine": "failed"}

    def test_restarts_do_not_wait_for_a_service_that_ends_on_other_slots(self) -> None:
        scripts = RoleSpec("train", 1, Entry("script", "a.py"), max_restarts=1)
        engine = service(count=2, group=2, optional=True, max_restarts=0)
        job = Services(engine, scripts).up().dies("engine", 0)
        assert job.ended == [("engine", [1], TERM)]
        assert job.dies("train").begun == [("train", [0])]

    def test_restarts_of_a_group_are_of_all_its_ranks(self) -> None:
        job = Services(service(count=4, group=2), program()).up().dies(rank=3)
        assert (job.begun, job.ended) == ([], [("engine", [2], TERM)])
        assert job.obey().begun == [("engine", [2, 3])]
        assert [worker.incarnation for worker in job.state.roles["engine"].workers] == [0, 0, 1, 1]
        job.all_run("engine")
        assert job.phases()["engine"] == "starting"
        assert job.ready("engine", 2).phases()["engine"] == "running"

    def test_restarts_do_not_follow_while_the_job_stops(self) -> None:
        job = Services(service(), program()).up().dies("train", code=0)
        assert job.state.phase is JobPhase.STOPPING
        assert job.dies("engine").begun == []
        assert job.end is not None
        assert job.end[0] == 0


class TestANewMaster:
    def test_a_new_master_asks_again_for_ports_that_no_agent_has_told(self) -> None:
        job = Services(service(count=3), program(), nodes=("n0", "n1")).launched()
        job.on(Placed("n0", "engine", (0,), (place("n0", 0),)))
        before = job.state
        take_over(job)
        assert join(job, before, "n0").orders(Reserve) == [Reserve("engine", (2,))]
        assert join(job, before, "n1").orders(Reserve) == [Reserve("engine", (1,))]
        assert job.worker().place == place("n0", 0)
        job.reserve().on(Placed("n0", "engine", (2,), (place("n0", 2),)))
        assert sorted(job.begun) == [("engine", [0, 2]), ("engine", [1]), ("train", [0])]

    def test_a_new_master_starts_no_role_before_all_agents_are_back(self) -> None:
        job = Services(service(count=2), program("train", after=AFTER), nodes=("n0", "n1")).begin()
        job.all_run("engine").ready("engine", 0)
        before = job.state
        take_over(job)
        join(job, before, "n1")
        assert job.ready("engine", 1).begun == []

    def test_a_new_master_hears_which_ranks_are_ready(self) -> None:
        job = Services(service(count=2), program("train", after=AFTER)).begin()
        job.all_run("engine").ready("engine", 0)
        rejoin(job)
        assert job.begun == []
        assert [job.state.roles["engine"].up(worker) for worker in job.state.roles["engine"].workers] == [
            True,
            False,
        ]
        assert job.ready("engine", 1).begun == [("train", [0])]

    def test_a_new_master_waits_for_the_rest_of_a_back_off(self) -> None:
        job = Services(service(), program(), nodes=("n0",)).up().dies().dies()
        paid, due = job.worker().paid, job.worker().due
        job.now -= 1.5  # the takeover takes 2 s
        rejoin(job)
        assert job.begun == []
        assert job.delays == [pytest.approx(due - job.now)]
        assert (job.worker().paid, job.worker().due) == (paid, due)
        assert job.later(1.0).begun == [("engine", [0])]

    def test_a_new_master_starts_a_rank_whose_back_off_is_over(self) -> None:
        job = Services(service(), program()).up().dies().dies()
        rejoin(job)
        assert job.begun == [("engine", [0])]


class TestTheEnd:
    def chain(self) -> Services:
        """An engine, a router after it, and a primary role after that."""
        return Services(
            service(count=2), service("router", after=AFTER), program("train", after={"router": 0})
        ).up()

    def test_the_end_of_the_primary_role_ends_services_in_the_reverse_of_their_order(self) -> None:
        job = self.chain().dies("train", code=0)
        assert job.ended == [("router", [0], TERM)]
        assert job.phases() == {"engine": "running", "router": "stopping", "train": "succeeded"}
        assert job.obey().ended == [("engine", [0, 1], TERM)]
        assert job.end is None
        assert job.obey().end == (0, "train succeeded")

    def test_the_end_waits_for_all_primary_roles(self) -> None:
        job = Services(service(), program("a"), program("b"), primary=("a", "b")).up().dies("a", code=0)
        assert (job.state.phase, job.ended) == (JobPhase.RUNNING, [])
        assert job.dies("b", code=0).ended == [("engine", [0], TERM)]

    def test_the_end_of_services_of_one_wave_is_together(self) -> None:
        job = Services(service(), service("other"), program()).up().dies("train", code=0)
        assert job.ended == [("engine", [0], TERM), ("other", [0], TERM)]

    def test_the_end_by_a_signal_is_in_the_same_order(self) -> None:
        job = self.chain().on(Stop(2, "interrupted", code=130))
        assert job.ended == [("train", [0], 2)]
        assert job.obey().ended == [("router", [0], 2)]
        assert job.obey().ended == [("engine", [0, 1], 2)]
        job.obey()
        assert job.end is not None
        assert job.end[0] == 130

    def test_the_end_that_is_asked_for_twice_is_the_end_of_all_at_once(self) -> None:
        job = self.chain().on(Stop(2, "interrupted")).on(Stop(2, "interrupted"))
        assert sorted(job.ended) == [
            ("engine", [0, 1], KILL),
            ("router", [0], KILL),
            ("train", [0], KILL),
        ]

    def test_the_end_of_a_service_while_others_stop_does_not_start_it_again(self) -> None:
        job = self.chain().dies("train", code=0).dies("engine", 1)
        assert (job.begun, job.state.roles["engine"].living) == ([], 1)
        job.dies("router", code=0, sent=TERM, cause="order")
        assert job.ended == [("engine", [0], TERM)]
        assert job.obey().end == (0, "train succeeded")

    def test_the_end_comes_while_a_role_waits_that_never_started(self) -> None:
        job = Services(service(max_restarts=0), program("train", after=AFTER)).begin().dies()
        assert job.phases() == {"engine": "failed", "train": "stopped"}
        assert job.end is not None

    def test_the_end_of_a_job_of_services_alone_comes_when_it_is_stopped(self) -> None:
        job = Services(service(), primary=()).up()
        assert job.state.phase is JobPhase.RUNNING
        job.on(Stop(15, "stopped", code=143)).obey()
        assert job.end is not None
        assert job.end[0] == 143

    def test_the_end_of_a_job_of_optional_services_comes_when_none_is_left(self) -> None:
        job = Services(service(optional=True, max_restarts=0), primary=()).up().dies()
        assert job.end == (1, "no role is left")


class TestGroups:
    def test_groups_are_counted_by_their_heads(self) -> None:
        """The other ranks of a server run at once, and say nothing of its readiness."""
        job = Services(service(count=4, group=2), program("train", after={"engine": 1})).begin()
        assert job.all_run("engine").begun == []
        assert job.ready("engine", 2).begun == [("train", [0])]

    def test_groups_of_which_two_ranks_die_by_themselves_pay_for_each_rank_once(self) -> None:
        job = Services(service(count=2, group=2), program()).up()
        job.dies(rank=0)
        assert job.ended == [("engine", [1], TERM)]
        job.dies(rank=1)
        assert [len(job.worker(rank=rank).paid) for rank in (0, 1)] == [1, 1]
        assert job.begun == [("engine", [0, 1])]


class TestAnOptionalService:
    def test_an_optional_service_that_has_ended_as_a_whole_holds_nothing_up(self) -> None:
        """Such a service restarts as a role: it has torchrun's contract, and so a group."""
        job = Services(service(optional=True), program("train", after=AFTER)).begin()
        engine = replace(job.state.roles["engine"], phase=RolePhase.STARTING)
        assert waiting_to_start(job.state.with_role(engine)) != ()
        assert waiting_to_start(job.state.with_role(replace(engine, phase=RolePhase.STOPPED))) == ()

    def test_an_optional_service_gives_up_only_the_rank_whose_budget_is_spent(self) -> None:
        engine = service(count=2, optional=True, max_restarts=1, restart_delay=5.0)
        job = Services(engine, program()).up()
        job.dies(rank=0).ready("engine", 0).dies(rank=1)
        job.dies(rank=0)
        assert job.worker(rank=0).due == NEVER
        assert job.worker(rank=1).due != NEVER
        assert job.state.roles["engine"].phase is not RolePhase.FAILED


def test_another_port_is_free_three_times_only() -> None:
    job = Services(service(restart_delay=0.0), program()).begin()
    for free in (True, True, True, False):
        job.all_run("engine").dies(taken=True)
        paid = len(job.worker().paid)
        assert (paid == 0) is free
        job.reserve()
