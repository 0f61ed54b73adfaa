"""A planned job is unchanged after encoding as JSON."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from unirun.collocation import parse_fake
from unirun.collocation.host import told_topology
from unirun.errors import FrameError, PlacementError
from unirun.launcher.launch import tasks_of
from unirun.launcher.planned import PlannedJob, plan, plan_without
from unirun.spec.job import Entry, JobSpec
from unirun.spec.parse import parse_job

ROLE = {"count": 2, "program": "true", "slots": 1}
NODES = parse_fake("fake:nodes=3,devices=2,numa=2")


def spec(**more: object) -> JobSpec:
    """Two roles that call each other."""
    roles = {"actor": {"count": 2, "program": "true", "slots": 1}, "critic": {"count": 2, "program": "true"}}
    edges = [{"from": "actor", "to": "critic", "weight": "64MB"}]
    job = {"roles": roles, "edges": edges, "config": {"lr": 3e-4, "text": "${no} interpolation"}, **more}
    return parse_job(job, count_slots=lambda _: 1, run_id="job-1")


@pytest.mark.parametrize("more", [{}, {"spares": 1}, {"host_collocations": [["actor", "critic"]]}], ids=str)
def test_a_planned_job_is_the_same_after_json(more: dict[str, object]) -> None:
    planned = plan(spec(**more), NODES, told_topology)
    assert planned.placement.assignments
    assert PlannedJob.from_json(planned.to_json()) == planned


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"spec": 1, "inventory": {}, "placement": {}}'])
def test_invalid_json_of_a_planned_job_is_refused(text: str) -> None:
    with pytest.raises(FrameError):
        PlannedJob.from_json(text)


def test_a_planned_job_that_loses_a_node_keeps_its_survivors() -> None:
    before = plan(spec(), NODES, told_topology)
    lost = before.placement.assignments[0].node
    after = plan_without(before, [lost], told_topology)
    assert after.placement.lost == (lost,)
    kept = [each for each in before.placement.assignments if each.node != lost]
    assert {(each.role, each.rank, each.node) for each in kept} <= {
        (each.role, each.rank, each.node) for each in after.placement.assignments
    }


def test_a_job_that_has_no_room_is_not_planned() -> None:
    with pytest.raises(PlacementError):
        plan(spec(spares=1), parse_fake("fake:nodes=1,devices=2"), told_topology)


@pytest.mark.parametrize("program", ["actor", "critic", "both"])
def test_the_agent_of_the_first_rank_of_a_torch_role_gets_the_port_that_the_user_has_chosen(
    program: str,
) -> None:
    """Programs have no such port. Without a torch role it is the first one's."""
    job = spec(master_port=29500, roles={"actor": {**ROLE, "slots": 2}, "critic": ROLE}, edges=[])
    script = Entry("script", "a.py")
    roles = tuple(
        role if program in (role.name, "both") else replace(role, entry=script, contract="torchrun")
        for role in job.roles
    )
    planned = plan(replace(job, roles=roles), NODES, told_topology)
    role = "critic" if program == "actor" else "actor"
    first = next(each.node for each in planned.placement.of_role(role) if each.rank == 0)
    tasks = tasks_of(planned, ("node0",))
    assert len(tasks) == 3
    assert first == ("node2" if role == "critic" else "node0")
    assert {node: task.port for node, task in tasks.items()} == {
        node: 29500 if node == first else 0 for node in tasks
    }
