"""Every rank gets a place, once; devices are handed out when that can be done right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.collocation import Assignment, Device, Inventory, Node, Placement, plan_placement
from unirun.collocation.numa import Cpu, Topology
from unirun.errors import PlacementError
from unirun.spec import Entry, JobSpec, RoleSpec

ENTRY = Entry("script", "a.py")


def job(counts: dict[str, int], **more: object) -> JobSpec:
    roles = tuple(RoleSpec(name, count, ENTRY) for name, count in counts.items())
    return JobSpec("job", "job-1", roles, tuple(counts), **more)  # type: ignore[arg-type]


def host(devices: int = 0) -> Inventory:
    named = tuple(Device(str(index), "H", "") for index in range(devices))
    return Inventory((Node("host", (0, 1, 2, 3), named), Node("spare", (0,))))


def masks(placement: Placement) -> dict[str, list[tuple[str, ...] | None]]:
    found: dict[str, list[tuple[str, ...] | None]] = {}
    for place in placement.assignments:
        found.setdefault(place.role, []).append(place.devices)
    return found


counts = st.dictionaries(st.sampled_from(["actor", "rollout", "critic"]), st.integers(1, 5), min_size=1)


@given(counts, st.integers(0, 12), st.booleans())
def test_whatever_the_job_and_the_host(counts: dict[str, int], devices: int, virtual: bool) -> None:
    spec, inventory = job(counts, virtual_local_rank=virtual), host(devices)
    placement = plan_placement(spec, inventory)
    places = placement.assignments
    expected = [(name, rank) for name, count in counts.items() for rank in range(count)]
    assert [(p.role, p.rank) for p in places] == expected, "all ranks, once, roles and ranks in order"
    assert sorted(p.slot for p in places) == list(range(len(expected))), "slots are unique and without gaps"
    assert placement.nodes == ("host",)
    assert plan_placement(spec, inventory) == placement, "planning is deterministic"
    assert [p.local_rank for p in places] == [rank for _, rank in expected]
    for name in counts:
        assert placement.of_role(name) == tuple(p for p in places if p.role == name)
    handed = [p for p in places if p.devices is not None]
    assert handed in ([], list(places)), "all masks or none"
    for place in handed:
        known = {str(index) for index in range(devices)}
        assert place.devices
        assert set(place.devices) <= known
        own = place.devices[0 if virtual else place.local_rank]
        assert own == str(place.slot), "cuda:LOCAL_RANK is a device of its own"


def test_one_role_sees_all_devices_as_under_torchrun() -> None:
    placement = plan_placement(job({"actor": 4}), host(8))
    assert masks(placement) == {"actor": [None] * 4}
    assert placement.note == "one role: every worker sees all devices and chooses by LOCAL_RANK"


def test_roles_get_devices_of_their_own() -> None:
    placement = plan_placement(job({"actor": 2, "rollout": 1}), host(8))
    assert masks(placement) == {"actor": [("0", "1"), ("0", "1")], "rollout": [("2",)]}
    assert placement.note == "3 of 8 devices of host are in use, one per rank"


def test_too_few_devices_are_not_handed_out() -> None:
    placement = plan_placement(job({"actor": 2, "rollout": 2}), host(3))
    assert masks(placement) == {"actor": [None] * 2, "rollout": [None] * 2}
    assert placement.note == "4 ranks on 3 devices: CUDA_VISIBLE_DEVICES is left as it is"


def test_a_virtual_local_rank_sees_its_own_device_only() -> None:
    placement = plan_placement(job({"actor": 3}, virtual_local_rank=True), host(4))
    assert masks(placement) == {"actor": [("0",), ("1",), ("2",)]}
    assert [p.local_rank for p in placement.assignments] == [0, 1, 2], "filters can still tell ranks apart"


def test_without_devices_a_slot_is_a_place() -> None:
    placement = plan_placement(job({"actor": 2}), host())
    assert placement.assignments == (
        Assignment("actor", 0, "host", 0, 0),
        Assignment("actor", 1, "host", 1, 1),
    )
    assert "has no accelerator" in placement.note


def test_processors_follow_the_devices_when_that_is_asked_for() -> None:
    cpus = tuple(Cpu(cpu, cpu // 2, 0, (cpu,), (cpu,)) for cpu in range(4))
    topology = Topology(cpus, {"0": 0, "1": 1})
    spec = job({"actor": 3}, numa_binding="node")
    placement = plan_placement(spec, host(2), topology)
    assert [p.cpus for p in placement.assignments] == [(0, 1), (2, 3), (0, 1)]
    assert [p.cpus for p in plan_placement(spec, host(2)).assignments] == [None] * 3


@pytest.mark.parametrize("count", [10_000])
def test_a_large_job_is_planned_at_once(count: int) -> None:
    assert len(plan_placement(job({"actor": count, "rollout": count}), host()).assignments) == 2 * count


class TestRolesThatShareDevices:
    SPEC = job(
        {"actor": 2, "critic": 1, "rollout": 2},
        collocations=(("rollout", "actor"),),
    )

    def test_have_their_slots_and_masks_in_common(self) -> None:
        placement = plan_placement(self.SPEC, host(3))
        assert [(p.role, p.rank, p.slot) for p in placement.assignments] == [
            *(("actor", 0, 0), ("actor", 1, 1), ("critic", 0, 2), ("rollout", 0, 0), ("rollout", 1, 1))
        ]
        pair = ("0", "1")
        assert masks(placement) == {"actor": [pair, pair], "critic": [("2",)], "rollout": [pair, pair]}
        assert (
            placement.note
            == "3 of 3 devices of host are in use, one per rank, rollout and actor share theirs"
        )

    def test_are_told_when_devices_are_too_few_even_so(self) -> None:
        placement = plan_placement(self.SPEC, host(2))
        assert placement.note == "3 ranks on 2 devices: CUDA_VISIBLE_DEVICES is left as it is"


def test_a_trainer_takes_no_device() -> None:
    spec = job({"actor": 2})
    trainer = RoleSpec("trainer", 1, Entry("trainer", "ppo:T"))
    placement = plan_placement(replace(spec, roles=(*spec.roles, trainer)), host(2))
    assert masks(placement) == {"actor": [("0", "1"), ("0", "1")], "trainer": [None]}
    assert [p.slot for p in placement.assignments] == [0, 1, 2]


def test_a_role_that_must_be_spread_does_not_fit_one_node() -> None:
    spec = job({"actor": 4})
    actor = replace(spec.roles[0], per_node=2)
    with pytest.raises(PlacementError, match="has 4 ranks with 2 on a node: that takes 2 nodes") as caught:
        plan_placement(replace(spec, roles=(actor,)), host())
    assert (caught.value.role, caught.value.needed, caught.value.available) == ("actor", 4, 2)
    assert plan_placement(replace(spec, roles=(replace(actor, per_node=4),)), host())
