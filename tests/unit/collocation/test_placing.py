"""From a job's spec to places: what the planner is asked, and what follows for each worker."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from unirun.collocation import Inventory, parse_fake, place, plan_placement
from unirun.collocation.placing import request_of
from unirun.errors import PlacementError
from unirun.spec import Entry, JobSpec, RoleSpec

ENTRY = Entry("script", "a.py")


def job(*roles: RoleSpec, **more: Any) -> JobSpec:
    return JobSpec("job", "job-1", roles, tuple(role.name for role in roles), **more)


def role(name: str, count: int, **more: Any) -> RoleSpec:
    return RoleSpec(name, count, more.pop("entry", ENTRY), **more)


def hosts(text: str) -> Inventory:
    return parse_fake(f"fake:{text}")


def test_a_job_that_says_nothing_of_places_runs_as_under_torchrun() -> None:
    spec, inventory = job(role("actor", 2), role("rollout", 2)), hosts("devices=4")
    assert place(spec, inventory) == (spec, plan_placement(spec, inventory))


def test_all_that_a_job_says_is_asked_for() -> None:
    spec = job(
        role("actor", 4, per_node=2, slots=0.5),
        role("rollout", 8, least=2, slots=2.0, per_group=4, devices=("0", "1")),
        role("judge", 1, device="cpu"),
        role("trainer", 1, entry=Entry("trainer", "ppo:T")),
        host_collocations=(("actor", "judge"),),
        separations=(("actor", "rollout"),),
        isolations=(("rollout", "judge"),),
        spares=1,
    )
    request = request_of(spec, hosts("nodes=4,devices=8"), {("actor", "rollout"): 5.0})
    actor, rollout, judge, trainer = request.roles
    assert (actor.device, actor.slots, actor.per_node, actor.least) == ("cuda", Fraction(1, 2), 2, 4)
    assert (rollout.least, rollout.count, rollout.per_group, rollout.devices) == (2, 8, 4, ("0", "1"))
    assert (judge.device, trainer.device) == ("cpu", None)
    assert (request.together, request.apart) == (spec.host_collocations, spec.separations)
    assert (request.isolated, request.spares) == (spec.isolations, 1)
    assert request.weights == {("actor", "rollout"): 5.0}


def test_as_many_ranks_as_there_is_room_for_are_the_jobs() -> None:
    spec, placement = place(job(role("rollout", 8, least=2, slots=2.0)), hosts("devices=6"))
    assert spec.role("rollout").count == 3 == len(placement.assignments)
    with pytest.raises(PlacementError) as caught:
        place(job(role("rollout", 8, least=4, slots=2.0)), hosts("devices=6"))
    assert caught.value.role == "rollout"


def test_ranks_on_processors_are_bound_to_their_own() -> None:
    _, placement = place(job(role("actor", 2, device="cpu", slots=2.0)), hosts("cpus=4"))
    assert [a.cpus for a in placement.assignments] == [(0, 1), (2, 3)]
    _, crowded = place(job(role("actor", 4, device="cpu")), hosts("cpus=2"))
    assert [a.cpus for a in crowded.assignments] == [(0,), (1,), (0,), (1,)]


def test_roles_that_share_devices_have_a_part_of_each() -> None:
    spec = job(
        role("actor", 2, device="cuda"), role("critic", 2, device="cuda"), collocations=(("actor", "critic"),)
    )
    _, placement = place(spec, hosts("devices=2"))
    assert {(a.role, a.rank, a.own, a.share) for a in placement.assignments} == {
        (name, rank, (str(rank),), 0.5) for name in ("actor", "critic") for rank in (0, 1)
    }
    assert {a.devices for a in placement.assignments} == {("0", "1")}


def test_a_type_that_no_node_has_does_not_fit() -> None:
    with pytest.raises(PlacementError, match="actor"):
        place(job(role("actor", 1, device="cuda")), hosts("devices=0"))
    elsewhere = replace(role("actor", 1), device="tpu")
    with pytest.raises(PlacementError, match="tpu"):
        place(job(elsewhere), hosts("devices=1"))
