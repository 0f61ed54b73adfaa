"""The master's decisions when ranks of services end: alone, without a process group, and without a rendezvous store."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import TERM, Job
from tests.unit.failover.multi_node import nodes, ranks
from tests.unit.failover.services import Services, program, service
from tests.unit.failover.takeover import rejoin
from unirun.collocation import Device, Inventory, Node, place
from unirun.errors import EXIT_PLACEMENT
from unirun.failover.draft import AgentLost, Due, ToAgent
from unirun.failover.policy import budget_for
from unirun.failover.state import NEVER, ROLE_ENDS, JobPhase, RolePhase, new_job
from unirun.spec.job import Entry, RoleSpec
from unirun.wire.messages import Drain, Drained, Reserve, StartRole, StopWorkers
from unirun.wire.reports import Notice, Placed

AFTER_TRAIN = {"train": 0}


@pytest.fixture
def job() -> Job:
    """Four ranks of a service on two of three nodes, and a script beside them."""
    job = Job(
        {"engine": 4, "train": 1},
        restarts={"engine": 2},
        kinds={"engine": "program"},
        primary=("train",),
        inventory=nodes(4),
    )
    engine = replace(job.state.role_spec("engine"), contract="none", service=True)
    spec = replace(job.state.spec, roles=(engine, job.state.role_spec("train")))
    role = replace(job.state.roles["engine"], is_program=True)
    job.state = replace(job.state.with_role(role), spec=spec)
    return job.running()


def test_a_rank_restarts_alone(job: Job) -> None:
    job.exits("engine", 1, 3)
    (order,) = job.orders(StartRole)
    assert [(member.rank, member.incarnation) for member in order.members] == [(1, 1)]
    assert job.orders(StopWorkers) == []


def test_an_end_with_0_is_a_failure(job: Job) -> None:
    job.exits("engine", 1, 0)
    assert "exit: engine:1 ended: exit code 0, too early" in job.records
    assert ranks(job) == {"n0": [1]}


def test_a_rank_that_moves_and_ends_with_0_has_not_failed(job: Job) -> None:
    assert {worker.node for worker in job.state.roles["engine"].workers} == {"n0", "n1"}
    job.on(Drain("n1"))
    (order,) = job.orders(StopWorkers)
    for rank in order.ranks:
        job.exits("engine", rank, 0, asked=TERM)
        assert f"exit: engine:{rank} ended: killed by SIGTERM" in job.records
    assert job.state.failures == ()
    assert job.state.roles["engine"].restarts == 0
    assert [worker.node for worker in job.state.roles["engine"].live] == ["n0", "n0", "n3", "n3"]


def test_ranks_that_move_take_the_others_of_their_group_with_them(job: Job) -> None:
    """Ranks 0 to 3 are one server on two nodes, of which one is drained."""
    job.state = replace(
        job.state,
        spec=replace(
            job.state.spec,
            roles=tuple(
                replace(role, group=4) if role.name == "engine" else role for role in job.state.spec.roles
            ),
        ),
    )
    job.on(Drain("n1"))
    (order,) = job.orders(StopWorkers)
    stays = sorted({0, 1, 2, 3} - {*order.ranks})
    job.exits("engine", order.ranks[0], 0, asked=TERM)
    others = {rank for each in job.orders(StopWorkers) for rank in each.ranks}
    assert others >= {*stays}
    for rank in (*order.ranks[1:], *stays):
        job.exits("engine", rank, 0, asked=TERM)
    assert {member.rank for each in job.orders(StartRole) for member in each.members} == {0, 1, 2, 3}


def test_the_job_goes_on_without_the_ranks_of_an_optional_service_on_a_lost_node(job: Job) -> None:
    roles = (
        replace(role, optional=True, max_restarts=0) if role.name == "engine" else role
        for role in job.state.spec.roles
    )
    job.state = replace(job.state, spec=replace(job.state.spec, roles=tuple(roles)))
    lost = [worker.rank for worker in job.state.roles["engine"].workers if worker.node == "n1"]
    job.on(AgentLost("n1", "it is gone"), Due.LOSSES)
    assert job.state.phase is JobPhase.RUNNING
    assert [w.rank for w in job.state.roles["engine"].workers if not w.live] == lost
    assert "the job goes on without it" in job.records
    assert job.orders(StartRole) == []


class TestAnOptionalServiceThatFitsNowhereElse:
    """There are as many slots as ranks, and a node is lost."""

    def lost(self, job: Services, node: str) -> None:
        """The loss of a node. The job goes on."""
        job.on(AgentLost(node, "it is gone"), Due.LOSSES)
        assert job.state.phase is JobPhase.RUNNING

    def test_it_is_given_up_and_the_others_go_on(self) -> None:
        job = placed(engines(count=2, optional=True), trainer(count=2), slots=(2, 2))
        self.lost(job, "n0")
        assert job.phases() == {"engine": "failed", "train": "running"}
        notice = job.told(Notice)[0]
        assert "it fits nowhere else: engine needs room for 2 ranks" in notice.text
        assert notice.text.endswith("; the job goes on without it")
        assert (job.begun, job.ended) == ([], [])

    def test_only_its_lost_ranks_are_given_up(self) -> None:
        job = placed(engines(count=4, optional=True), trainer(count=2), slots=(2, 2, 2))
        self.lost(job, "n0")
        workers = job.state.roles["engine"].workers
        assert [worker.rank for worker in workers if worker.live] == [2, 3]
        assert (job.begun, job.ended) == ([], [])
        assert job.dies(rank=2).begun == [("engine", [2])]

    def test_others_of_the_lost_node_are_placed_again_without_it(self) -> None:
        """The trainer moves to the spare slot, of which the engine on the lost node would have needed one more."""
        job = placed(trainer(restart="process"), engines(count=3, optional=True), slots=(2, 2, 1))
        node = job.worker("train").node
        (there,) = (worker for worker in job.state.roles["engine"].workers if worker.node == node)
        self.lost(job, node)
        assert job.begun == [("train", [0])]
        assert job.worker(rank=there.rank).due == NEVER
        others = {worker.rank for worker in job.state.roles["engine"].workers} - {there.rank}
        assert all(job.worker(rank=rank).live for rank in others)
        assert len({(place.node, place.own) for place in job.state.placement.assignments}) == 4

    def test_it_is_given_up_as_a_group(self) -> None:
        job = placed(engines(count=4, group=4, per_node=2, optional=True), trainer(count=2), slots=(2, 2, 2))
        self.lost(job, "n0")
        assert job.ended == [("engine", [2], TERM), ("engine", [3], TERM)]
        for rank in (2, 3):
            job.exits("engine", rank, by=TERM, asked=TERM)
        assert job.phases() == {"engine": "failed", "train": "running"}

    def test_it_is_given_up_as_a_whole_when_it_restarts_as_a_whole(self) -> None:
        job = placed(engines(count=4, restart="role", optional=True), trainer(count=2), slots=(2, 2, 2))
        self.lost(job, "n0")
        assert job.ended == [("engine", [2, 3], TERM)]
        for rank in (2, 3):
            job.exits("engine", rank, by=TERM, asked=TERM)
        assert job.state.roles["engine"].phase in ROLE_ENDS
        assert job.phases()["train"] == "running"

    def test_one_of_scripts_is_given_up_as_a_whole(self) -> None:
        entry = Entry("script", "a.py")
        scripts = RoleSpec("engine", 2, entry, service=True, optional=True, max_restarts=1)
        job = placed(scripts, trainer(), slots=(1, 1, 1))
        self.lost(job, job.worker().node)
        assert job.told(Notice)[0].source == "engine:0-1"
        assert job.ended == [("engine", [1], TERM)]

    def test_it_is_given_up_although_it_has_not_started_there_yet(self) -> None:
        job = placed(engines(optional=True), trainer(), slots=(1, 1, 1))
        job.on(Drain(job.worker().node))
        job.exits("engine", 0, by=TERM, asked=TERM)
        self.lost(job, *asked_for_ports(job))
        assert job.phases() == {"engine": "failed", "train": "running"}
        assert "goes on without it" in job.told(Notice)[0].text

    def test_it_is_given_up_although_it_has_not_left_its_node_yet(self) -> None:
        job = placed(engines(optional=True), trainer(), slots=(1, 1, 1))
        left = job.worker().node
        job.on(Drain(left))
        self.lost(job, *({"n0", "n1", "n2"} - {left, job.worker("train").node}))
        job.exits("engine", 0, by=TERM, asked=TERM)
        assert job.phases() == {"engine": "failed", "train": "running"}

    def test_its_other_ranks_and_roles_start_although_it_has_no_ports_there(self) -> None:
        job = placed(engines(count=2, optional=True), trainer(), slots=(1, 1, 1, 1))
        job.on(Drain(job.worker().node))
        job.exits("engine", 0, by=TERM, asked=TERM)
        self.lost(job, *asked_for_ports(job))
        assert job.dies("train").begun == [("train", [0])]
        assert job.dies("engine", 1).begun == [("engine", [1])]

    def test_it_is_given_up_while_it_waits_for_another_role(self) -> None:
        job = on_nodes(engines(optional=True, after=AFTER_TRAIN), trainer(), slots=(1, 1)).begin()
        self.lost(job, place_of(job))
        assert job.phases() == {"engine": "failed", "train": "starting"}
        assert "goes on without it" in job.told(Notice)[0].text
        assert job.all_run("train").begun == []

    @pytest.mark.parametrize("restart", ["process", "role"])
    def test_roles_that_wait_for_it_start_without_it(self, restart: str) -> None:
        engine = engines(optional=True, after=AFTER_TRAIN, restart=restart)
        router = engines(name="router", after={"engine": 0}, slots=0.0)
        job = on_nodes(engine, router, trainer(), slots=(1, 1)).begin()
        router_at, lost = place_of(job, "router"), place_of(job)
        self.lost(job, lost)
        if router_at == lost:
            job.reserve()
        assert ("router", [0]) in job.begun
        assert job.state.roles["engine"].phase in ROLE_ENDS

    def test_the_ranks_that_have_room_start_when_their_turn_comes(self) -> None:
        job = on_nodes(engines(count=2, optional=True, after=AFTER_TRAIN), trainer(), slots=(1, 1, 1)).begin()
        self.lost(job, place_of(job, rank=1))
        assert job.all_run("train").begun == [("engine", [0])]
        assert job.ready("engine", 0).phases() == {"engine": "running", "train": "running"}
        assert job.worker(rank=1).due == NEVER

    def test_it_is_given_up_before_the_job_has_started(self) -> None:
        job = on_nodes(engines(optional=True), trainer(), slots=(1, 1))
        lost, left = place_of(job), place_of(job, "train")
        job.on(job.join(lost), AgentLost(lost, "it is gone"), Due.LOSSES)
        assert job.on(job.join(left)).begun == [("train", [0])]
        assert job.phases() == {"engine": "failed", "train": "starting"}

    def test_it_is_given_up_when_its_node_never_joins(self) -> None:
        job = on_nodes(engines(count=2, optional=True), trainer(), slots=(1, 1, 1))
        missing = place_of(job, rank=1)
        job.on(*(job.join(node) for node in job.state.nodes if node != missing), Due.JOIN).reserve()
        assert sorted(job.begun) == [("engine", [0]), ("train", [0])]
        assert job.worker(rank=1).due == NEVER

    def test_it_is_given_up_while_it_waits_for_its_next_start(self) -> None:
        job = placed(engines(optional=True), trainer(), slots=(1, 1)).dies()
        job.ready().dies()
        assert job.worker().due > job.now
        self.lost(job, job.worker().node)
        assert job.phases() == {"engine": "failed", "train": "running"}
        assert job.later(100).begun == []

    def test_it_is_given_up_while_its_ranks_end_to_start_again_together(self) -> None:
        job = placed(engines(count=2, restart="role", optional=True), trainer(), slots=(1, 1, 1)).dies()
        self.lost(job, job.worker(rank=0).node)
        job.exits("engine", 1, by=TERM, asked=TERM)
        assert job.phases() == {"engine": "failed", "train": "running"}
        assert job.later(100).begun == []

    def test_it_is_given_up_while_it_waits_for_its_next_start_as_a_whole(self) -> None:
        job = placed(engines(restart="role", optional=True), trainer(), slots=(1, 1)).dies()
        job.ready().dies()
        assert job.phases()["engine"] == "restarting"
        self.lost(job, job.worker().node)
        assert job.phases() == {"engine": "failed", "train": "running"}
        job.on(Drain("n0"))
        assert not any("formed anew" in told.problem for told in job.told(Drained))

    def test_it_is_given_up_although_others_have_made_it_start_again_as_a_whole(self) -> None:
        """A rank that has its own budget, in a role of which all ranks were told to end."""
        job = placed(engines(count=2, optional=True), trainer(), slots=(1, 1, 1))
        job.state = job.state.with_role(replace(job.state.roles["engine"], phase=RolePhase.RESTARTING))
        self.lost(job, job.worker(rank=0).node)
        assert job.ended == []
        job.exits("engine", 1, by=TERM, asked=TERM)
        assert job.begun == [("engine", [1])]
        job.state = job.state.with_role(replace(job.state.roles["engine"], phase=RolePhase.RESTARTING))
        self.lost(job, job.worker(rank=1).node)
        assert job.phases() == {"engine": "failed", "train": "running"}

    def test_it_has_ended_when_the_nodes_of_the_last_ranks_that_were_told_to_end_are_lost(self) -> None:
        job = placed(engines(count=2, group=2, per_node=1, optional=True), trainer(), slots=(1, 1, 1))
        self.lost(job, job.worker(rank=0).node)
        assert job.ended == [("engine", [1], TERM)]
        self.lost(job, job.worker(rank=1).node)
        assert job.phases() == {"engine": "failed", "train": "running"}

    @pytest.mark.parametrize("starts", [1, 2])
    def test_it_stays_given_up_although_the_order_to_start_it_was_lost_with_a_master(
        self, starts: int
    ) -> None:
        engine = engines(count=2, group=2, optional=True, max_restarts=starts - 1)
        job = on_nodes(engine, trainer(), slots=(3,)).begin()
        if starts == 2:
            job.dies().exits("engine", 1, by=TERM, asked=TERM)
        job.dies()
        rejoin(job, lost=[("engine", 1, starts - 1)])
        assert [who for who, _ in job.begun] == []
        assert job.later(100).begun == []
        assert job.worker(rank=1).due == NEVER

    def test_it_is_given_up_when_another_role_could_not_restart_with_fewer_ranks_to_make_room(self) -> None:
        train = trainer(count=2, least=1, contract="torchrun", restart="role", max_restarts=0)
        job = placed(engines(optional=True), train, slots=(1, 2))
        self.lost(job, place_of(job))
        assert job.phases() == {"engine": "failed", "train": "running"}
        assert "train has room for 1 of 2 ranks" in job.told(Notice)[0].text

    def test_it_is_not_given_up_when_another_role_has_no_room_either(self) -> None:
        job = placed(engines(count=1, optional=True), trainer(count=3, restart="process"), slots=(2, 2))
        job.on(AgentLost(job.worker().node, "it is gone"), Due.LOSSES)
        assert job.state.verdict is not None
        assert job.state.verdict.code == EXIT_PLACEMENT
        assert "goes on without" not in job.records


def test_a_rank_that_waits_for_its_start_pays_nothing_for_the_loss_of_its_node() -> None:
    """All of its restarts are spent; the last one is about to come."""
    job = placed(engines(max_restarts=2), trainer(), slots=(1, 1, 1)).dies()
    job.all_run("engine").dies()
    assert len(job.worker().paid) == 2
    before = job.worker()
    job.on(AgentLost(before.node, "it is gone"), Due.LOSSES)
    assert job.state.phase is JobPhase.RUNNING
    assert (job.worker().paid, job.worker().due) == (before.paid, before.due)
    assert asked_for_ports(job) == [node for node in ("n1", "n2") if node != job.worker("train").node]


def test_of_ranks_that_end_together_the_budget_is_that_of_the_one_with_the_least_left() -> None:
    job = Services(service(count=3, max_restarts=2), program()).up().dies(rank=1).ready("engine", 1)
    role, now = job.state.roles["engine"], job.now
    left = {
        ranks: budget_for(job.state, role, now, ranks).left for ranks in [(0,), (1,), (0, 1), (1, 2), (0, 2)]
    }
    assert left == {(0,): 2, (1,): 1, (0, 1): 1, (1, 2): 1, (0, 2): 2}


@pytest.mark.parametrize("arrived", [False, True])
def test_a_rank_pays_for_the_loss_of_a_node_only_if_it_runs_there(*, arrived: bool) -> None:
    """Its node is drained, and then the one is lost to which it is to move, or has moved."""
    job = placed(engines(), trainer(), slots=(1, 1, 1, 1)).on(Drain("n0"))
    target = place_of(job)
    if arrived:
        job.obey().reserve()
        job.all_run("engine")
    job.on(AgentLost(target, "it is gone"), Due.LOSSES)
    assert place_of(job) not in ("n0", target)
    assert (job.state.roles["engine"].restarts, len(job.worker().paid)) == (arrived, arrived)


def test_a_companion_is_heard_that_came_when_engines_moved_to_more_nodes() -> None:
    entry = Entry("module", "companion")
    companion = RoleSpec(
        *("engine-weights", 1, entry), restart="process", slots=0.0, service=True, beside="engine"
    )
    job = placed(engines(count=2), replace(companion, max_restarts=5), trainer(), slots=(2, 1, 1, 1))
    job.on(AgentLost(place_of(job), "it is gone"), Due.LOSSES).reserve()
    assert job.state.sizes["engine-weights"] == 2
    job.all_run("engine-weights")
    assert job.phases()["engine-weights"] == "running"


class TestARankThatMovesTwice:
    """Its node is drained, and then the one on which it has not started yet, as that looks for ports."""

    def moving(self, job: Services) -> str:
        """A rank has left its node. Returns the one that was asked for its ports."""
        job.on(Drain(job.worker().node))
        job.exits("engine", 0, by=TERM, asked=TERM)
        (node,) = asked_for_ports(job)
        return node

    def test_ports_that_it_does_not_need_any_more_may_be_missing(self) -> None:
        job = placed(engines(), trainer(), slots=(1, 1, 1, 1))
        first = self.moving(job)
        job.on(Drain(first))
        (second,) = asked_for_ports(job)
        assert second != first
        job.on(Placed(first, "engine", (0,), (), "none is free"))
        assert job.state.phase is JobPhase.RUNNING
        job.on(Placed(second, "engine", (0,), (), "none is free"))
        assert job.state.verdict is not None
        assert job.state.verdict.reason == f"engine:0 cannot start on {second}: none is free"


def asked_for_ports(job: Services) -> list[str]:
    """The nodes whose agents are asked."""
    return [c.node for c in job.commands if isinstance(c, ToAgent) and isinstance(c.message, Reserve)]


def placed(*roles: RoleSpec, slots: tuple[int, ...]) -> Services:
    """A running job on nodes of so many slots."""
    return on_nodes(*roles, slots=slots).up()


def on_nodes(*roles: RoleSpec, slots: tuple[int, ...]) -> Services:
    """A job that has not begun, on nodes of so many slots."""
    counts = {f"n{n}": count for n, count in enumerate(slots)}
    inventory = Inventory(
        tuple(
            Node(name, (0,), tuple(Device(str(n), "gpu") for n in range(count)))
            for name, count in counts.items()
        )
    )
    job = Services(*roles, nodes=tuple(counts))
    spec, placement = place(replace(job.state.spec, roles=roles), inventory)
    job.state = new_job(spec, placement, started=job.now, logs="/logs", inventory=inventory)
    return job


def place_of(job: Services, name: str = "engine", rank: int = 0) -> str:
    """The node that a rank is, or shall be, on."""
    return job.state.placement.of_role(name)[rank].node


def engines(**more: Any) -> RoleSpec:
    return service(**{"slots": 1.0, **more})


def trainer(**more: Any) -> RoleSpec:
    return program("train", **{"slots": 1.0, "max_restarts": 1, **more})


@pytest.mark.parametrize("code", [126, 127])
def test_a_program_that_cannot_be_executed_ends_the_job_at_its_first_start(job: Job, code: int) -> None:
    job.exits("engine", 1, code)
    assert job.state.phase is JobPhase.STOPPING
    assert job.state.verdict is not None
    assert f"engine:1 ended with exit code {code}, before it was up" in job.state.verdict.reason


def test_later_that_may_be_an_accident(job: Job) -> None:
    job.exits("engine", 1, 3)
    job.all_run("engine").exits("engine", 1, 127)
    assert job.state.phase is JobPhase.RUNNING
