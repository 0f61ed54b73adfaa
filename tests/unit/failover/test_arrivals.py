"""Nodes that join a running job: who is let in, and which roles grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.json import encode as to_json
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.context.states import kept
from tests.unit.failover.job import KILL, TERM, Job
from tests.unit.failover.multi_node import gone, nodes, places, ranks, scripts
from tests.unit.failover.takeover import join, take_over
from unirun.collocation import Device, Node
from unirun.errors import Refused
from unirun.failover.context import decode, encode, urgent
from unirun.failover.draft import GROWTH_DELAY, Absent, After, AgentLost, Arrived, Due, ToGuest
from unirun.failover.nodes import made_up, next_life, trouble
from unirun.failover.state import JOB_ENDS
from unirun.values import WorkerId
from unirun.wire.frames import from_json
from unirun.wire.messages import Dismissed, Grow, Offer, Ready, StartRole, StopWorkers
from unirun.wire.reports import (
    Boundary,
    FromWorker,
    GroupFormed,
    Join,
    Resilient,
    Serving,
    WorkerRunning,
    WorkerStarted,
)

OURS = {"python": "3.13"}


def offer(node: str, *, devices: int = 2, **more: object) -> Offer:
    there = Node(node, (0,), tuple(Device(str(number), "") for number in range(devices)))
    return Offer(node, node, -1, to_json(to_builtins(there)).decode(), OURS, **more)  # type: ignore[arg-type]


def elastic(of: int = 2, spares: int = 0) -> Job:
    """Two to eight actors on nodes with two devices each."""
    return scripts(8, of=of, least={"actor": 2}, spares=spares).running()


def elastic_workloads() -> Job:
    """The same, as workloads of which the number may change."""
    job = Job(
        {"actor": 8},
        kinds={"actor": "workload"},
        restarts={"actor": 2},
        inventory=nodes(2),
        least={"actor": 2},
    )
    spec = replace(job.state.spec, roles=tuple(replace(role, elastic=True) for role in job.state.spec.roles))
    job.state = replace(job.state, spec=spec)
    return serving(job.launched())


def serving(job: Job) -> Job:
    """All workers take calls, in the present generation."""
    job.all_run("actor")
    role = job.state.roles["actor"]
    for worker in role.workers:
        who = WorkerId("actor", worker.rank, worker.incarnation)
        job.on(
            FromWorker(who, GroupFormed(role.opened)),
            FromWorker(who, Serving({"socket": "here"}, recoverable=True)),
        )
    return job


def come(job: Job, *names: str) -> Job:
    """Nodes come, and their agents join."""
    for name in names:
        job.on(Arrived(offer(name))).on(job.join(name))
    return job


def survivors() -> Job:
    """Two to eight actors of a script, four of which are in a function that survives."""
    job = scripts(8, of=2, least={"actor": 2}).running()
    for rank in range(4):
        job.on(FromWorker(WorkerId("actor", rank, 0), Resilient(inside=True)))
    return job


class TestABoundary:
    def test_a_boundary_is_when_ranks_that_survive_get_more_of_them_and_keep_their_processes(self) -> None:
        job = come(survivors(), "n2")
        job.on(Due.GROWTH)
        assert (job.orders(StopWorkers), job.orders(StartRole), job.phases()) == (
            [],
            [],
            {"actor": "running"},
        )
        job.on(Due.VIEW)
        assert [role.grows for role in job.seen["n0"].roles] == [True]
        job.on(FromWorker(WorkerId("actor", 1, 0), Boundary()))
        assert ranks(job) == {"n2": [4, 5]}
        assert {order.world_size for order in job.orders(StartRole)} == {6}
        assert (job.orders(StopWorkers), job.phases()) == ([], {"actor": "reforming"})
        assert "actor grows from 4 to 6 ranks, and those that it has keep their memory" in job.records
        assert [role.grows for role in job.seen["n0"].roles] == [False]
        assert job.on(FromWorker(WorkerId("actor", 2, 0), Boundary())).orders(StartRole) == []
        job.all_run("actor")
        for worker in job.state.roles["actor"].workers:
            job.on(FromWorker(WorkerId("actor", worker.rank, worker.incarnation), GroupFormed(1)))
        assert (job.phases(), job.state.roles["actor"].restarts) == ({"actor": "running"}, 0)

    def test_a_boundary_of_elastic_workloads_is_told_by_their_trainer_and_they_keep_their_processes(
        self,
    ) -> None:
        job = Job(
            {"actor": 8, "trainer": 1},
            kinds={"actor": "workload", "trainer": "trainer"},
            restarts={"actor": 2},
            inventory=nodes(2),
            least={"actor": 2},
        )
        spec = job.state.spec
        elastic = tuple(replace(role, elastic=role.name == "actor") for role in spec.roles)
        job.state = replace(job.state, spec=replace(spec, roles=elastic))
        job = serving(job.launched().all_run("trainer"))
        before = len(job.state.roles["actor"].workers)
        come(job, "n2").on(Due.GROWTH)
        assert job.state.roles["actor"].grows
        assert (job.orders(StopWorkers), job.orders(StartRole)) == ([], [])
        trainer = WorkerId("trainer", 0, 0)
        assert job.on(FromWorker(trainer, Boundary("nobody"))).orders(StartRole) == []
        job.on(FromWorker(trainer, Boundary("actor")))
        assert [(order.role, order.generation, order.world_size) for order in job.orders(StartRole)] == [
            ("actor", 1, before + 2)
        ]
        assert (job.orders(StopWorkers), job.phases()["actor"]) == ([], "reforming")
        role = serving(job).state.roles["actor"]
        assert (role.phase.value, role.restarts, len(role.workers)) == ("running", 0, before + 2)
        assert {worker.incarnation for worker in role.workers} == {0}

    def test_a_boundary_of_a_role_that_does_not_grow_changes_nothing(self) -> None:
        job = survivors()
        before = job.state
        job.on(FromWorker(WorkerId("actor", 1, 0), Boundary()))
        assert job.state.roles == before.roles

    def test_a_boundary_without_room_ends_the_wait(self) -> None:
        """A node has come and is gone again."""
        job = come(survivors(), "n2")
        job.on(Due.GROWTH).on(gone("n2")).on(FromWorker(WorkerId("actor", 1, 0), Boundary()))
        assert (job.orders(StartRole), job.state.roles["actor"].grows) == ([], False)

    def test_a_boundary_counts_for_the_next_master(self) -> None:
        job = come(survivors(), "n2")
        job.on(Due.GROWTH)
        assert decode(encode(job.state)).roles["actor"].grows

    @pytest.mark.parametrize("marked", [False, True])
    def test_a_boundary_is_not_waited_for_by_a_role_that_has_succeeded(self, *, marked: bool) -> None:
        """The node comes before its end, or after it."""
        job = Job({"actor": 8, "critic": 1}, inventory=nodes(2), least={"actor": 2}).running()
        ranks = range(len(job.state.roles["actor"].workers))
        for rank in ranks:
            job.on(FromWorker(WorkerId("actor", rank, 0), Resilient(inside=True)))
        if marked:
            come(job, "n2").on(Due.GROWTH)
        assert job.state.roles["actor"].grows == marked
        for rank in ranks:
            job.exits("actor", rank)
        if not marked:
            come(job, "n2").on(Due.GROWTH)
        assert (job.phases()["actor"], job.state.roles["actor"].grows) == ("succeeded", False)

    def test_a_boundary_is_not_waited_for_by_ranks_that_start_again_before_the_function(self) -> None:
        job = come(survivors(), "n2")
        job.on(Due.GROWTH).on(FromWorker(WorkerId("actor", 1, 0), Resilient(inside=False)))
        job.exits("actor", 0, 1).obey().all_run("actor")
        assert any(isinstance(c, After) and c.event == Due.GROWTH for c in job.commands)
        job.on(Due.GROWTH).obey()
        assert len(job.state.roles["actor"].workers) == 6


def happens(job: Job, what: str, rank: int, number: int) -> None:
    """One of the things that may happen to ranks that survive, and to their nodes."""
    role = job.state.roles["actor"]
    worker = role.workers[rank % len(role.workers)]
    who = WorkerId("actor", worker.rank, worker.incarnation)
    match what:
        case "boundary" if worker.live:
            job.on(FromWorker(who, Boundary()))
        case "dies" if worker.live:
            job.exits("actor", worker.rank, by=KILL)
        case "run":
            for each in role.workers:
                if each.live:
                    each_who = WorkerId("actor", each.rank, each.incarnation)
                    job.on(
                        WorkerStarted(each_who, 7),
                        WorkerRunning(each_who, role.opened),
                        FromWorker(each_who, GroupFormed(role.opened)),
                        FromWorker(each_who, Resilient(inside=True)),
                    )
        case "lost" if len(job.state.agents) > 1:
            job.on(gone([*job.state.agents][rank % len(job.state.agents)]))
        case "come":
            come(job, f"m{number}")
        case "grow":
            job.on(Due.GROWTH)
        case "view":
            job.on(Due.VIEW)


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["boundary", "dies", "run", "run", "lost", "come", "grow", "grow", "view"]),
            st.integers(0, 7),
        ),
        max_size=30,
    )
)
def test_whatever_happens_ranks_that_survive_grow_as_one_role(what: list[tuple[str, int]]) -> None:
    """The invariants hold after each event. When all has settled, every place has a rank that runs."""
    job = scripts(8, of=2, restarts=40, least={"actor": 2}).running()
    happens(job, "run", 0, 0)
    for number, (each, rank) in enumerate(
        [*what, *4 * [("run", 0), ("grow", 0), ("boundary", 0)], ("run", 0)]
    ):
        happens(job, each, rank, number)
        job.obey()
        if job.state.phase in JOB_ENDS:
            return
        assert decode(encode(job.state)) == kept(job.state)
    role = job.state.roles["actor"]
    assert role.phase == "running"
    assert len(role.workers) == len(job.state.placement.of_role("actor"))
    assert job.state.agents.keys().isdisjoint(job.state.newcomers), "a node is offered again"


class TestAMadeUpNode:
    def test_a_made_up_node_has_the_resources_of_its_name_or_of_the_first_node(self) -> None:
        state = elastic().on(gone("n1")).state
        [first, second] = state.inventory.nodes
        second = replace(second, memory=7)
        state = replace(state, inventory=replace(state.inventory, nodes=(first, second)))
        for name, like in (("n1", second), ("n7", first)):
            bare = Offer(name, "here", -1, "", OURS)
            offered = made_up(state, bare)
            assert from_json(Node, offered.inventory) == like
            assert trouble(state, replace(offered, node=next_life(state, name)), OURS) is None


class TestWhoIsLetIn:
    def test_a_node_with_another_name_and_the_same_versions(self) -> None:
        assert trouble(elastic().state, offer("n2"), OURS) is None

    @pytest.mark.parametrize(
        ("offered", "problem"),
        [
            (offer("n1"), "the job has a node called n1"),
            (offer("n9", faults=(("it has no script", "put it there"),)), "it has no script"),
            (replace(offer("n9"), versions={"python": "3.12"}), "it has python 3.12, here it is 3.13"),
        ],
    )
    def test_a_node_that_does_not_fit_the_job_is_refused(self, offered: Offer, problem: str) -> None:
        refusal = trouble(elastic(of=3).state, offered, OURS)
        assert refusal is not None
        assert refusal.problem == problem

    def test_a_host_that_was_lost_comes_back_under_its_name_with_the_number_of_its_life(self) -> None:
        job = elastic(of=3)
        assert next_life(job.state, "n2") == "n2", "it is there"
        assert next_life(job.state, "n9") == "n9", "it has never been there"
        job.on(gone("n2"))
        assert next_life(job.state, "n2") == "n2.2"
        come(job, "n2.2")
        assert next_life(job.state, "n2") == "n2.2", "its second life goes on"
        refusal = trouble(job.state, offer("n2.2"), OURS)
        assert refusal is not None
        assert refusal.problem == "the job has a node called n2.2"
        job.on(gone("n2.2"))
        assert next_life(job.state, "n2") == "n2.3"

    def test_the_agent_of_a_life_that_is_over_is_not_that_of_the_next_one(self) -> None:
        job = come(elastic(of=3).on(gone("n2")), "n2.2")
        before = job.state
        with pytest.raises(Refused):
            job.on(job.join("n2"))
        assert job.state is before
        assert "n2.2" in job.state.agents
        assert "n2" not in job.state.agents

    def test_not_more_than_the_job_may_have_but_one_in_the_place_of_a_lost_one(self) -> None:
        job = elastic()
        job.state = replace(job.state, spec=replace(job.state.spec, most_nodes=2))
        assert trouble(job.state, offer("n2"), OURS) == Dismissed(
            "the job has 2 nodes, the most that it may have", "see --nnodes"
        )
        assert trouble(job.on(gone("n1")).state, offer("n2"), OURS) is None

    def test_nobody_when_the_job_ends(self) -> None:
        job = elastic()
        for rank in range(4):
            job.exits("actor", rank)
        assert trouble(job.state, offer("n2"), OURS) == Dismissed("the job is ending")

    def test_of_two_with_one_name_the_second_is_dismissed(self) -> None:
        job = elastic().on(Arrived(offer("n2")), Arrived(offer("n2")))
        answers = [command.message for command in job.commands if isinstance(command, ToGuest)]
        assert [type(answer) for answer in answers] == [Ready, Dismissed]


class TestANodeThatHasCome:
    def test_it_is_in_the_store_before_it_is_let_in(self) -> None:
        job = elastic()
        before = job.state
        job.on(Arrived(offer("n2")))
        assert urgent(before, job.state)
        assert kept(job.state) == decode(encode(job.state))
        assert job.state.nodes == ("n0", "n1", "n2")

    @pytest.mark.parametrize("dies", [True, False])
    def test_one_that_does_not_join_in_time_is_given_up_and_may_come_again(self, *, dies: bool) -> None:
        """Its agent has died before it had a stream to the master; also when another master has come since."""
        job = scripts(of=2).running()
        before = job.on(Arrived(offer("n2"))).state
        if dies:
            job.commands = take_over(job)
        (due,) = (c for c in job.commands if isinstance(c, After) and c.event == Absent("n2"))
        assert due.delay == job.state.spec.join_timeout
        if dies:
            join(job, before, "n0")
            join(job, before, "n1")
        job.on(Due.JOIN)
        assert not job.state.given_up("n2")
        assert job.on(due.event).state.given_up("n2")
        assert (next_life(job.state, "n2"), job.phases()) == ("n2.2", {"actor": "running"})

    def test_one_that_joins_in_time_stays(self) -> None:
        job = scripts(of=2).running().on(Arrived(offer("n2"))).on(Join("n2", 1, "n2", {}))
        before = job.state
        assert job.on(Absent("n2")).state == before

    def test_it_is_a_spare_for_a_job_that_does_not_grow(self) -> None:
        job = come(scripts(of=2).running(), "n2").on(Due.GROWTH)
        assert job.commands == []
        assert job.state.placement.spares == ("n2",)
        job.on(gone("n1")).exits("actor", 0, by=TERM, asked=TERM).exits("actor", 1, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1], "n2": [2, 3]}


class TestGrowth:
    def test_a_role_that_may_have_more_ranks_starts_again_with_them_and_spends_no_restart(self) -> None:
        job = come(elastic(), "n2")
        assert After(GROWTH_DELAY, Due.GROWTH) in job.commands
        job.on(Due.GROWTH)
        assert job.orders(StopWorkers) == [
            StopWorkers("actor", (0, 1), TERM, 30.0),
            StopWorkers("actor", (2, 3), TERM, 30.0),
        ]
        assert "n2 joined; actor grows from 4 to 6 ranks" in job.records
        assert kept(job.state) == decode(encode(job.state))
        job.obey()
        assert ranks(job) == {"n0": [0, 1], "n1": [2, 3], "n2": [4, 5]}
        (order, *_) = job.orders(StartRole)
        assert (order.world_size, order.restarts, order.generation) == (6, 0, 1)
        assert job.all_run("actor").phases() == {"actor": "running"}
        assert job.state.failures == ()

    def test_nodes_that_come_within_a_second_are_one_restart(self) -> None:
        job = come(elastic(), "n2", "n3").on(Due.GROWTH).obey().all_run("actor").on(Due.GROWTH)
        assert job.commands == []
        assert (len(places(job)), job.state.roles["actor"].generation) == (8, 1)

    def test_a_role_that_starts_again_after_a_failure_grows_when_it_runs(self) -> None:
        job = elastic().exits("actor", 0, 1)
        come(job, "n2").on(Due.GROWTH)
        assert job.commands == []
        job.obey()
        for rank in (1, 2, 3):
            job.exits("actor", rank, by=TERM, asked=TERM)
        job.all_run("actor")
        assert After(GROWTH_DELAY, Due.GROWTH) in job.commands
        assert len(places(job.on(Due.GROWTH))) == 6

    def test_a_role_grows_though_a_spare_is_lost_at_that_moment(self) -> None:
        job = come(elastic(), "n2", "n3")
        job.losses_apart = False
        job.on(AgentLost("n3", "its stream ended"), Due.GROWTH)
        assert len(places(job)) == 4
        assert After(GROWTH_DELAY, Due.GROWTH) in job.commands
        assert len(places(job.on(Due.GROWTH))) == 6

    def test_ranks_that_a_role_had_once_go_on_with_the_next_incarnation(self) -> None:
        job = elastic(of=3)
        job.exits("actor", 0, 1)
        for rank in range(1, 6):
            job.exits("actor", rank, by=TERM, asked=TERM)
        job.all_run("actor").on(gone("n2"))
        for rank in range(4):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert len(job.all_run("actor").state.roles["actor"].workers) == 4
        come(job, "n3").on(Due.GROWTH).obey()
        started = {m.rank: m.incarnation for order in job.orders(StartRole) for m in order.members}
        assert started == {0: 3, 1: 3, 2: 3, 3: 3, 4: 2, 5: 2}

    def test_a_node_that_is_lost_before_the_role_has_grown_takes_the_new_ranks_with_it(self) -> None:
        job = come(elastic(), "n2").on(Due.GROWTH).on(gone("n2"))
        for rank in range(4):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1], "n1": [2, 3]}
        assert job.all_run("actor").phases() == {"actor": "running"}
        come(job, "n3").on(Due.GROWTH).obey()
        started = {m.rank: m.incarnation for order in job.orders(StartRole) for m in order.members}
        assert started == {0: 2, 1: 2, 2: 2, 3: 2, 4: 0, 5: 0}, "the new ranks have never run"

    def test_workloads_keep_their_number_because_callers_rely_on_it(self) -> None:
        job = Job({"actor": 8}, kinds={"actor": "workload"}, inventory=nodes(2), least={"actor": 2}).running()
        assert come(job, "n2").on(Due.GROWTH).commands == []

    def test_elastic_workloads_grow_when_a_visitor_asks_and_not_before(self) -> None:
        job = come(elastic_workloads(), "n2").on(Due.GROWTH)
        assert job.commands == []
        job.on(Grow("actor"))
        assert "more ranks were asked for; actor grows from 4 to 6 ranks" in job.records
        job.obey()
        assert ranks(job) == {"n0": [0, 1], "n1": [2, 3], "n2": [4, 5]}
        assert serving(job).state.roles["actor"].restarts == 0

    def test_nothing_happens_when_there_is_no_room_or_another_role_is_named(self) -> None:
        job = elastic_workloads()
        assert job.on(Grow("actor")).commands == []
        assert come(job, "n2").on(Grow("critic")).commands == []

    def test_elastic_workloads_become_fewer_when_a_node_is_lost(self) -> None:
        job = elastic_workloads().on(gone("n1"))
        for rank in (0, 1):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert ranks(job) == {"n0": [0, 1]}
        assert serving(job).phases() == {"actor": "running"}

    def test_nodes_that_the_job_holds_back_are_not_used(self) -> None:
        job = elastic(spares=1)
        assert places(job) == ["n0", "n0"]
        come(job, "n2", "n3").on(Due.GROWTH)
        assert len({*places(job)}) == 3

    def test_a_new_master_does_what_was_due(self) -> None:
        job = come(elastic(), "n2")
        before = job.state
        take_over(job)
        for node in ("n0", "n1", "n2"):
            join(job, before, node)
        assert After(GROWTH_DELAY, Due.GROWTH) in job.commands
        assert len(places(job.on(Due.GROWTH))) == 6
