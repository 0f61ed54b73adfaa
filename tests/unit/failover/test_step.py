"""The master's decisions, one event at a time; its state is checked after each."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.documents import text_of
from tests.effort import examples
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.multi_node import nodes
from tests.unit.failover.random_walk import RandomWalk
from unirun.errors import EXIT_RENDEZVOUS, IllegalTransition, Refused
from unirun.failover.draft import AgentLost, Due, Event, OwnerLost, Record, Straggles, ToAgent, order_text
from unirun.failover.state import JobPhase, WorkerPhase
from unirun.failover.status_views import present, status_of
from unirun.values import WorkerId
from unirun.wire.messages import RoleChanged, StartRole, Stop, StopWorkers, View, WorkerOutput
from unirun.wire.reports import (
    Boundary,
    CallCount,
    Calls,
    FromWorker,
    GroupFormed,
    Health,
    Join,
    Listening,
    Metrics,
    Notice,
    Resilient,
    Sample,
    Serving,
    SpawnerReady,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)


class TestLaunching:
    def test_launching_waits_for_every_node(self) -> None:
        job = Job({"actor": 4}, nodes=("n0", "n1"))
        job.on(Join("n1", 1, "h", {"actor": "h:1"}))
        assert job.state.phase is JobPhase.LAUNCHING
        assert job.orders(StartRole) == []

    def test_launching_then_orders_every_role(self) -> None:
        job = Job({"actor": 2, "rollout": 3}).launched()
        assert job.state.phase is JobPhase.RUNNING
        actor, rollout = job.orders(StartRole)
        assert (actor.role, actor.generation, actor.restarts, actor.world_size) == ("actor", 0, 0, 2)
        assert [m.rank for m in rollout.members] == [0, 1, 2]
        assert rollout.endpoint == "127.0.0.1:2"
        assert job.phases() == {"actor": "starting", "rollout": "starting"}

    def test_launching_splits_a_role_over_its_nodes(self) -> None:
        job = Job({"actor": 3}, nodes=("n0", "n1")).launched()
        one, two = job.orders(StartRole)
        assert [
            c.node for c in job.commands if isinstance(c, ToAgent) and isinstance(c.message, StartRole)
        ] == [
            "n0",
            "n1",
        ]
        assert (one.local_world_size, one.group_rank, one.group_world_size) == (2, 0, 2)
        assert (two.local_world_size, two.group_rank, two.group_world_size) == (1, 1, 2)
        assert [(m.rank, m.local_rank) for m in (*one.members, *two.members)] == [(0, 0), (2, 1), (1, 0)]

    def test_launching_shows_all_roles_to_all_workers(self) -> None:
        job = Job({"actor": 2, "rollout": 1}).launched()
        assert [role.name for role in job.orders(View)[-1].roles] == ["actor", "rollout"]

    def test_launching_refuses_a_node_that_joins_twice_or_is_unknown(self) -> None:
        job = Job({"actor": 2}).launched()
        for node in ("n0", "n9"):
            with pytest.raises(Refused, match="joined twice, or has no place"):
                job.on(Join(node, 2, "h", {}))

    def test_launching_ends_when_a_node_does_not_come(self) -> None:
        job = Job({"actor": 2}, nodes=("n0", "n1"))
        job.on(Join("n0", 1, "h", {"actor": "h:1"}), Due.JOIN)
        assert job.state.phase is JobPhase.FAILED
        assert job.end == (EXIT_RENDEZVOUS, "n1 did not join within 60 s")

    def test_launching_does_not_mind_the_deadline_when_all_are_there(self) -> None:
        assert Job({"actor": 1}).running().on(Due.JOIN).commands == []

    def test_launching_tells_when_torch_is_imported(self) -> None:
        job = Job({"actor": 1}).on(SpawnerReady(1.25, "n0"))
        assert job.told(Notice) == [Notice("n0", "spawner ready in 1.2 s")]
        assert job.records == "spawner: n0: torch is imported after 1.25 s"


class TestARoleComesUp:
    def test_a_role_comes_up_and_runs_when_all_ranks_do(self) -> None:
        job = Job({"actor": 2}).launched()
        job.on(WorkerStarted(WorkerId("actor", 0, 0), 7), WorkerRunning(WorkerId("actor", 0, 0), 0))
        assert job.phases() == {"actor": "starting"}
        assert job.told(RoleChanged)[-1] == RoleChanged("actor", "starting", 0, 1, 2)
        job.on(WorkerStarted(WorkerId("actor", 1, 0), 8), WorkerRunning(WorkerId("actor", 1, 0), 0))
        assert job.phases() == {"actor": "running"}
        assert "running: role actor: every rank runs" in job.records

    def test_a_role_comes_up_even_when_a_hello_overtakes_the_news_of_the_fork(self) -> None:
        job = Job({"actor": 1}).launched()
        job.on(WorkerRunning(WorkerId("actor", 0, 0), 0), WorkerStarted(WorkerId("actor", 0, 0), 7))
        (worker,) = job.state.roles["actor"].workers
        assert (worker.phase, worker.pid) == (WorkerPhase.RUNNING, 7)

    def test_a_role_comes_up_and_watchers_learn_of_each_process(self) -> None:
        job = Job({"actor": 3}).launched().on(WorkerStarted(WorkerId("actor", 2, 0), 7))
        assert job.told(WorkerOutput) == [WorkerOutput(WorkerId("actor", 2, 0), 2, "n0")]

    def test_a_role_comes_up_and_a_rank_that_has_ended_well_counts_as_up(self) -> None:
        job = Job({"actor": 2}).launched()
        job.exits("actor", 0, 0)
        job.on(WorkerStarted(WorkerId("actor", 1, 0), 8), WorkerRunning(WorkerId("actor", 1, 0), 0))
        assert job.phases() == {"actor": "running"}


class TestTheEnd:
    def test_the_end_comes_when_all_ranks_have_ended_well(self) -> None:
        job = Job({"actor": 2}).running().exits("actor", 0)
        assert job.state.phase is JobPhase.RUNNING
        assert job.exits("actor", 1).state.phase is JobPhase.SUCCEEDED
        assert job.end == (0, "actor succeeded")

    def test_the_end_needs_the_primary_roles_only_and_stops_the_others(self) -> None:
        job = Job({"actor": 1, "rollout": 2}, primary=("actor",)).running().exits("actor", 0)
        assert job.state.phase is JobPhase.STOPPING
        assert job.orders(StopWorkers) == [StopWorkers("rollout", (0, 1), TERM, 30.0)]
        assert job.obey().state.phase is JobPhase.SUCCEEDED
        assert job.finish is not None
        assert job.finish.verdict.code == 0
        assert job.phases() == {"actor": "succeeded", "rollout": "stopped"}

    def test_the_end_does_not_come_with_a_role_that_is_not_primary(self) -> None:
        job = Job({"actor": 1, "rollout": 1}, primary=("actor",)).running().exits("rollout", 0)
        assert job.state.phase is JobPhase.RUNNING
        assert job.phases()["rollout"] == "succeeded"

    def test_the_end_is_final(self) -> None:
        job = Job({"actor": 1}).running().exits("actor", 0)
        state = job.state
        late = (Stop(TERM, "late"), AgentLost("n0", "late"), OwnerLost(), Join("n0", 1, "h", {}))
        job.on(*late, WorkerExited(WorkerId("actor", 0, 0), 1.0, 1, None), Due.JOIN)
        assert job.state == state
        assert job.commands == []


class TestNewsOfThePast:
    def test_late_news_of_an_earlier_incarnation_changes_nothing(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        state = job.state
        job.on(WorkerStarted(WorkerId("actor", 0, 0), 7), WorkerRunning(WorkerId("actor", 0, 0), 0))
        job.exits("actor", 0, 1, incarnation=0)
        assert job.state == state

    def test_late_news_that_is_told_twice_counts_once(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 5}).running().exits("actor", 0, 1)
        state = job.exits("actor", 0, 1).state
        assert state.roles["actor"].restarts == 1
        assert len(state.failures) == 1

    @pytest.mark.parametrize(
        ("event", "says"),
        [
            (WorkerRunning(WorkerId("nobody", 0, 0), 0), "no role nobody"),
            (WorkerRunning(WorkerId("actor", 9, 0), 0), "no worker actor:9"),
            (WorkerRunning(WorkerId("actor", -1, 0), 0), "no worker actor:-1"),
            (WorkerExited(WorkerId("actor", 0, 3), 1.0, 0, None), "has no incarnation 3 yet"),
        ],
    )
    def test_late_news_about_what_cannot_be_is_refused(self, event: Event, says: str) -> None:
        with pytest.raises(IllegalTransition, match=says):
            Job({"actor": 1}).running().on(event)


def test_a_notice_is_recorded_and_passed_on() -> None:
    job = Job({"actor": 1}).running()
    job.on(Notice("actor:0", "is slow"), Sample("n0", {}, {}))  # type: ignore[arg-type]
    assert job.told(Notice) == [Notice("actor:0", "is slow")]
    assert job.records == "notice: actor:0: is slow"


def test_the_status_tells_what_the_state_holds() -> None:
    job = Job({"actor": 2}, restarts={"actor": 1}).running()
    status = status_of(job.state, {"actor:0": 5_000_000, "actor:9": 1}, {"actor:0": 1.5})
    (role,) = status.roles
    assert (status.phase, status.code, role.phase, role.max_restarts) == ("running", None, "running", 1)
    assert (role.workers[0].memory, role.workers[0].cpu, role.workers[0].pid) == (5_000_000, 1.5, 1)
    ended = status_of(job.exits("actor", 0).exits("actor", 1).state, {"actor:0": 1}, {})
    assert (ended.phase, ended.code, ended.reason) == ("succeeded", 0, "actor succeeded")
    assert [(w.pid, w.exit, w.memory) for w in ended.roles[0].workers] == [(None, "exit code 0", None)] * 2


def test_who_attaches_late_is_told_what_is_there() -> None:
    job = Job({"actor": 2}).launched().on(WorkerStarted(WorkerId("actor", 1, 0), 8))
    assert present(job.state) == [
        RoleChanged("actor", "starting", 0, 0, 2),
        WorkerOutput(WorkerId("actor", 1, 0), 1, "n0"),
    ]


NEWS: list[Callable[[WorkerId], Event]] = [
    lambda who: WorkerStarted(who, 7),
    lambda who: WorkerRunning(who, 0),
    lambda who: WorkerExited(who, 5.0, 1, None),
    lambda who: Straggles(who, "it is slow"),
    *(
        (lambda who, said=said: FromWorker(who, said))
        for said in (
            Listening({"socket": "late"}),
            Serving({"socket": "late"}, True),
            GroupFormed(0),
            Resilient(inside=True),
            Boundary(),
            Metrics({"loss": 0.5}, 5.0),
            Calls((CallCount("actor", "sum", 2, 10, 10, 0.5, ((0, 0),)),)),
            Health(ready=True, since=5.0, why=""),
        )
    ),
]
"""All that is said of a worker, but for what asks for an answer."""


class TestLateNews:
    @pytest.mark.parametrize("news", NEWS)
    @pytest.mark.parametrize("rank", [0, 3, 5])
    def test_late_news_of_a_worker_before_or_of_a_rank_that_is_no_more_change_nothing(
        self, news: Callable[[WorkerId], Event], rank: int
    ) -> None:
        """The role was started with four ranks, has had six, and has two."""
        job = Job({"actor": 6}, restarts={"actor": 3}, inventory=nodes(3), least={"actor": 2}).running()
        spec = job.state.spec
        of_four = replace(spec.role("actor"), count=4, most=6)
        job.state = replace(job.state, spec=replace(spec, roles=(of_four,)))
        job.losses_apart = False
        job.on(AgentLost("n1", "it is gone"), AgentLost("n2", "it is gone")).obey().all_run("actor")
        before = job.state
        assert len(before.roles["actor"].workers) == 2
        assert job.on(news(WorkerId("actor", rank, 0))).state == before

    @pytest.mark.parametrize("news", NEWS[:-2])
    @pytest.mark.parametrize(
        "who", [WorkerId("actor", 6, 0), WorkerId("actor", -1, 0), WorkerId("actor", 0, 7)]
    )
    def test_late_news_are_never_of_a_worker_that_has_not_been(
        self, news: Callable[[WorkerId], Event], who: WorkerId
    ) -> None:
        job = Job({"actor": 2}).running()
        before = job.state
        with pytest.raises(IllegalTransition):
            job.on(news(who))
        assert job.state is before


@examples(40)
@given(st.integers(0, 2**32))
def test_what_is_told_of_a_history_has_a_documented_kind_and_is_about_parts_of_the_job(seed: int) -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", text_of("docs/events.md"), re.MULTILINE)
    kinds = {kind for row in rows for kind in re.findall(r"`(\w+)`", row)}
    walk = RandomWalk(seed)
    for _, state in walk.steps(80):
        parts = {*state.roles, *state.nodes}
        for command in walk.job.commands:
            about: tuple[str, ...] = ()
            match command:
                case Record(kind=kind, text=text, about=about):
                    assert kind in kinds
                    assert text
                case ToAgent(node, message) if (told := order_text(node, message)) is not None:
                    text, *rest = told
                    about = (*rest, node)
                    assert node in text
            assert {each.partition(":")[0] for each in about} <= parts, command
