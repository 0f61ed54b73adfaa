"""A planned job is unchanged after encoding as JSON."""

from __future__ import annotations

import pytest

from unirun.collocation import parse_fake
from unirun.collocation.host import told_topology
from unirun.errors import FrameError, PlacementError
from unirun.launcher.planned import PlannedJob, plan, plan_without
from unirun.spec.job import JobSpec
from unirun.spec.parse import parse_job

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
