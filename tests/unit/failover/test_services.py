"""The master's decisions when ranks of services end: alone, without a process group, and without a rendezvous store."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.failover.losses import nodes, ranks
from tests.unit.failover.services import Services, program, service
from tests.unit.job.job import TERM, Job
from unirun.collocation import Device, Inventory, Node, place
from unirun.errors import EXIT_PLACEMENT
from unirun.job.events import AgentLost, LossesDue, ToAgent
from unirun.job.state import NEVER, ROLE_ENDS, JobPhase, new_job
from unirun.spec import RoleSpec
from unirun.wire.messages import Drain, Reserve, StartRole, StopWorkers
from unirun.wire.reports import Notice, Placed


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
    job.on(AgentLost("n1", "it is gone"), LossesDue())
    assert job.state.phase is JobPhase.RUNNING
    assert [w.rank for w in job.state.roles["engine"].workers if not w.live] == lost
    assert "the job goes on without it" in job.records
    assert job.orders(StartRole) == []


class TestAnOptionalServiceThatFitsNowhereElse:
    """There are as many slots as ranks, and a node is lost."""

    def lost(self, job: Services, node: str) -> None:
        """The loss of a node. The job goes on."""
        job.on(AgentLost(node, "it is gone"), LossesDue())
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

    def test_it_is_not_given_up_when_another_role_has_no_room_either(self) -> None:
        job = placed(engines(count=1, optional=True), trainer(count=3, restart="process"), slots=(2, 2))
        job.on(AgentLost(job.worker().node, "it is gone"), LossesDue())
        assert job.state.verdict is not None
        assert job.state.verdict.code == EXIT_PLACEMENT
        assert "goes on without" not in job.records


def test_a_rank_that_waits_for_its_start_pays_nothing_for_the_loss_of_its_node() -> None:
    """All of its restarts are spent; the last one is about to come."""
    job = placed(engines(max_restarts=2), trainer(), slots=(1, 1, 1)).dies()
    job.all_run("engine").dies()
    assert len(job.worker().paid) == 2
    before = job.worker()
    job.on(AgentLost(before.node, "it is gone"), LossesDue())
    assert job.state.phase is JobPhase.RUNNING
    assert (job.worker().paid, job.worker().due) == (before.paid, before.due)
    assert asked_for_ports(job) == [node for node in ("n1", "n2") if node != job.worker("train").node]


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
    return job.up()


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
