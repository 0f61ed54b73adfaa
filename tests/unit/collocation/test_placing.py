"""From a job's spec to places: what the planner is asked, and what follows for each worker."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.brute_force import check
from tests.unit.collocation.samples import TRAINER, hosts, job, masks, ranks, role
from unirun.collocation import (
    Assignment,
    Device,
    Inventory,
    Node,
    Ties,
    place,
    place_again,
)
from unirun.collocation.host import Cpu, Topology
from unirun.collocation.placing import request_of
from unirun.collocation.planning import plan
from unirun.errors import PlacementError
from unirun.spec.job import JobSpec

counts = st.dictionaries(st.sampled_from(["actor", "rollout", "critic"]), st.integers(1, 5), min_size=1)


class TestAJobThatSaysNothingOfPlacesOnOneNode:
    """It runs as under torchrun, whatever its roles."""

    @given(counts, st.integers(0, 12), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
    def test_a_job_without_placement_options_has_a_slot_for_every_rank(
        self, counts: dict[str, int], devices: int, numas: int, virtual: bool, trained: bool, shared: bool
    ) -> None:
        roles = [*ranks(**counts), *([TRAINER] if trained else [])]
        shared = shared and len(counts) > 1 and len({*counts.values()}) == 1
        groups = (tuple(counts),) if shared else ()
        spec = job(*roles, virtual_local_rank=virtual, collocations=groups)
        inventory = hosts(f"cpus=4,devices={devices},numa={numas}")
        same, placement = place(spec, inventory)
        assert same == spec
        assert place(spec, inventory) == (spec, placement), "planning is deterministic"
        assert [(a.role, a.rank, a.local_rank) for a in placement.assignments] == [
            (each.name, rank, rank) for each in roles for rank in range(each.count)
        ], "all ranks, once, roles and ranks in order"
        assert placement.nodes == ("node0",)
        seats = [a for a in placement.assignments if a.role != "trainer"]
        needed = counts[next(iter(counts))] if shared else sum(counts.values())
        slots = [a.slot for a in seats[:needed]]
        assert [a.slot for a in seats] == slots * (len(counts) if shared else 1), "who shares, shares by rank"
        assert len({*slots}) == needed, "others have slots of their own"
        assert all((a.slot, a.own, a.devices) == (-1, (), None) for a in placement.of_role("trainer"))
        given_out = [a for a in seats if a.devices is not None]
        assert bool(given_out) == (devices >= needed and (len(roles) > 1 or virtual))
        assert given_out in ([], seats), "all masks or none"
        assert given_out or slots == [*range(needed)], (
            "where there are no devices to choose, places are in turn"
        )
        for each in given_out:
            assert each.devices
            assert each.devices[0 if virtual else each.local_rank] == str(each.slot), (
                "cuda:LOCAL_RANK is its own"
            )
            assert each.share == (1 / len(counts) if shared else 1)
        if given_out:
            check(request_of(spec, inventory), placement, inventory.nodes)

    def test_with_one_role_lets_every_worker_see_all_devices(self) -> None:
        _, placement = place(job(*ranks(actor=4)), hosts("devices=8,numa=4"))
        assert masks(placement) == {"actor": [None] * 4}
        assert placement.note == "one role: every worker sees all devices and chooses by LOCAL_RANK"
        assert [(a.own, a.numa) for a in placement.assignments] == [
            (("0",), 0),
            (("1",), 0),
            (("2",), 1),
            (("3",), 1),
        ]

    def test_gives_roles_devices_of_their_own(self) -> None:
        _, placement = place(job(*ranks(actor=2, rollout=1)), hosts("devices=8"))
        assert masks(placement) == {"actor": [("0", "1"), ("0", "1")], "rollout": [("2",)]}
        assert placement.note == "3 of 8 devices of node0 are in use, one per rank"

    def test_gives_out_no_devices_when_there_are_too_few(self) -> None:
        _, placement = place(job(*ranks(actor=2, rollout=2)), hosts("devices=3"))
        assert masks(placement) == {"actor": [None] * 2, "rollout": [None] * 2}
        assert placement.note == "4 ranks on 3 devices: CUDA_VISIBLE_DEVICES is left as it is"
        assert {(a.own, a.share, a.numa) for a in placement.assignments} == {((), 1.0, -1)}

    def test_with_a_virtual_local_rank_shows_each_worker_its_own_device(self) -> None:
        _, placement = place(job(*ranks(actor=3), virtual_local_rank=True), hosts("devices=4"))
        assert masks(placement) == {"actor": [("0",), ("1",), ("2",)]}
        assert [a.local_rank for a in placement.assignments] == [0, 1, 2], (
            "filters can still tell ranks apart"
        )

    @given(counts, st.integers(0, 12), st.booleans(), st.booleans(), st.integers(1, 3))
    def test_is_the_same_beside_roles_that_need_no_slot(
        self, counts: dict[str, int], devices: int, virtual: bool, trained: bool, services: int
    ) -> None:
        roles = [*ranks(**counts), *([TRAINER] if trained else [])]
        beside = [role(f"s{number}", number, slots=0.0) for number in range(1, services + 1)]
        inventory = hosts(f"cpus=4,devices={devices}")
        _, alone = place(job(*roles, virtual_local_rank=virtual), inventory)
        spec = job(*beside[:1], *roles, *beside[1:], virtual_local_rank=virtual)
        _, placement = place(spec, inventory)
        assert {each.name: placement.of_role(each.name) for each in roles} == {
            each.name: alone.of_role(each.name) for each in roles
        }
        assert placement.note.startswith(alone.note.split(";")[0])
        for each in (each for service in beside for each in placement.of_role(service.name)):
            assert (each.slot, each.own, each.cpus) == (-1, (), None)
            assert each.devices == (() if devices else None), "two roles never use one device by accident"

    def test_of_roles_that_need_no_slot_is_on_the_first_node(self) -> None:
        services = [role("engine", 2, slots=0.0), role("gateway", 1, slots=0.0)]
        _, placement = place(job(*services), hosts("devices=2"))
        assert masks(placement) == {"engine": [(), ()], "gateway": [()]}
        assert placement.masks == dict.fromkeys(["engine", "gateway"], "CUDA_VISIBLE_DEVICES")
        assert placement.note == "1 node in use; engine and gateway need no slot"
        _, placement = place(job(*(role(f"s{n}", 1, slots=0.0) for n in range(100))), hosts("devices=2"))
        assert placement.note == "1 node in use; 100 roles need no slot"

    def test_has_places_for_processes_where_there_are_no_devices(self) -> None:
        inventory = Inventory((Node("host", (0, 1, 2, 3)),))
        _, placement = place(job(*ranks(actor=2)), inventory)
        assert placement.assignments == (
            Assignment("actor", 0, "host", 0, 0, own=("0",), numa=0),
            Assignment("actor", 1, "host", 1, 1, own=("1",), numa=0),
        )
        assert placement.note == "host has no accelerator: each rank has a CPU slot"

    def test_mig_instances_are_not_assigned(self) -> None:
        node = Node("host", (0,), (Device("0", "H", type="mig"), Device("1", "H")))
        _, placement = place(job(*ranks(actor=1, critic=1)), Inventory((node,)))
        assert placement.note == "2 ranks on 1 devices: CUDA_VISIBLE_DEVICES is left as it is"

    def test_gives_a_trainer_no_device(self) -> None:
        _, placement = place(job(*ranks(actor=2), TRAINER), hosts("devices=2"))
        assert masks(placement) == {"actor": [("0", "1"), ("0", "1")], "trainer": [None]}
        assert [a.slot for a in placement.assignments] == [0, 1, -1]

    def test_shares_out_devices_between_roles_that_are_collocated(self) -> None:
        spec = job(*ranks(actor=2, critic=1, rollout=2), collocations=(("rollout", "actor"),))
        _, placement = place(spec, hosts("devices=3"))
        pair = ("0", "1")
        assert masks(placement) == {"actor": [pair, pair], "critic": [("2",)], "rollout": [pair, pair]}
        assert [(a.role, a.slot, a.own, a.share) for a in placement.assignments] == [
            ("actor", 0, ("0",), 0.5),
            ("actor", 1, ("1",), 0.5),
            ("critic", 2, ("2",), 1.0),
            ("rollout", 0, ("0",), 0.5),
            ("rollout", 1, ("1",), 0.5),
        ]
        note = "3 of 3 devices of node0 are in use, one per rank, rollout and actor share theirs"
        assert placement.note == note
        _, crowded = place(spec, hosts("devices=2"))
        assert crowded.note == "3 ranks on 2 devices: CUDA_VISIBLE_DEVICES is left as it is"

    def test_does_not_fit_when_a_role_must_be_spread(self) -> None:
        with pytest.raises(PlacementError, match="actor per_node 4 fits") as caught:
            place(job(role("actor", 4, per_node=2), role("critic", 2)), hosts("devices=0"))
        error = caught.value
        assert (error.exit_code, error.role, error.needed, error.available) == (3, "actor", 4, 2)
        assert error.constraint == "actor per_node 2"
        assert place(job(role("actor", 4, per_node=4)), hosts("devices=0"))

    @pytest.mark.parametrize("counts", [{"a": 1000}, {"a": 380}, dict.fromkeys("abcdefgh", 125)])
    def test_a_job_without_placement_options_may_have_many_ranks(self, counts: dict[str, int]) -> None:
        _, placement = place(job(*ranks(**counts)), hosts("cpus=64"))
        assert {name: len(placement.of_role(name)) for name in counts} == counts

    def test_a_job_without_placement_options_is_planned_again_as_it_was_planned(self) -> None:
        """The planner's request has all that it takes: nothing else decides about devices."""
        spec, inventory = job(*ranks(actor=2, critic=1)), hosts("devices=4")
        _, placement = place(spec, inventory)
        assert plan(request_of(spec, inventory), inventory).assignments == placement.assignments


class TestProcessorsNearADevice:
    """``numa_binding``, on four processors in two NUMA nodes with a device each."""

    TOPOLOGY = Topology(
        tuple(Cpu(cpu, cpu // 2, 0, (cpu,), (cpu,)) for cpu in range(4)), {"0": 0, "1": 1, "2": 1}
    )

    def bound(self, spec: JobSpec, devices: int) -> list[object]:
        _, placement = place(spec, hosts(f"cpus=4,devices={devices}"), topology=lambda _: self.TOPOLOGY)
        return [a.cpus for a in placement.assignments]

    def test_follow_local_ranks_where_one_role_sees_all_devices(self) -> None:
        assert self.bound(job(*ranks(actor=2), numa_binding="node"), 2) == [(0, 1), (2, 3)]

    def test_follow_devices_that_are_given_to_ranks_but_not_a_trainer(self) -> None:
        spec = job(*ranks(actor=1, critic=1), TRAINER, numa_binding="node")
        assert self.bound(spec, 2) == [(0, 1), (2, 3), None]

    def test_are_taken_in_turn_where_there_are_fewer_devices_than_ranks(self) -> None:
        assert self.bound(job(*ranks(actor=3), numa_binding="node"), 2) == [(0, 1), (2, 3), (0, 1)]

    def test_processors_are_those_near_all_devices_of_a_rank(self) -> None:
        spec = job(role("actor", 1, slots=2.0), role("judge", 1, device="cpu"), numa_binding="node")
        assert self.bound(spec, 2) == [(0, 1, 2, 3), (0,)], "who has asked for processors has those"

    def test_without_numa_binding_or_devices_no_rank_is_bound(self) -> None:
        assert self.bound(job(*ranks(actor=2)), 2) == [None, None]
        assert self.bound(job(*ranks(actor=2), numa_binding="node"), 0) == [None, None]

    def test_are_those_of_the_node_that_a_rank_is_on(self) -> None:
        """The second node has its processors the other way round."""
        second = Topology(self.TOPOLOGY.cpus, {"0": 1, "1": 0})
        spec, inventory = job(*ranks(actor=4), numa_binding="node"), hosts("nodes=2,cpus=4,devices=2")
        of = {"node0": self.TOPOLOGY, "node1": second}
        _, placement = place(spec, inventory, topology=lambda node: of[node.name])
        assert [(a.node, a.cpus) for a in placement.assignments] == [
            ("node0", (0, 1)),
            ("node0", (2, 3)),
            ("node1", (2, 3)),
            ("node1", (0, 1)),
        ]

    def test_are_as_the_inventory_tells_when_nobody_else_does(self) -> None:
        spec, inventory = job(*ranks(actor=8), numa_binding="node"), hosts("nodes=2,cpus=8,devices=4,numa=2")
        _, placement = place(spec, inventory)
        near = [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7)]
        assert [a.cpus for a in placement.assignments] == [*near, *near]

    def test_are_those_of_the_new_node_for_a_rank_that_moves(self) -> None:
        small = Node("small", (7,), (Device("0", "H", numa=0), Device("1", "H", numa=0)))
        inventory = Inventory((*hosts("nodes=2,cpus=4,devices=2,numa=2").nodes, small))
        spec = job(role("actor", 4, device="cuda"), numa_binding="node", spares=1)
        spec, before = place(spec, inventory)
        _, after = place_again(spec, inventory, before, ["node0"])
        assert [(a.node, a.cpus) for a in after.assignments] == [
            ("small", (7,)),
            ("small", (7,)),
            ("node1", (0, 1)),
            ("node1", (2, 3)),
        ]

    def test_numa_binding_with_too_few_processors_is_refused(self) -> None:
        """Of two devices on one processor the second gets none to itself."""
        first, second = (
            hosts("cpus=4,devices=2").nodes[0],
            Node("small", (0,), (Device("0", "H"), Device("1", "H"))),
        )
        spec = job(*ranks(actor=4), numa_binding="exclusive")
        with pytest.raises(PlacementError, match="no processor of NUMA node 0 is left for device 1"):
            place(spec, Inventory((first, second)))


def test_all_that_a_job_says_is_asked_for() -> None:
    spec = job(
        role("actor", 4, per_node=2, slots=0.5),
        role("rollout", 8, least=2, slots=2.0, per_group=4, devices=("0", "1")),
        role("judge", 1, device="cpu"),
        TRAINER,
        host_collocations=(("actor", "judge"),),
        separations=(("actor", "rollout"),),
        isolations=(("rollout", "judge"),),
        spares=1,
        exclude_nodes=("node3", "node33"),
    )
    ties = Ties({("actor", "rollout"): 5.0}, (("actor", "rollout"), ("judge",)))
    request = request_of(spec, hosts("nodes=4,devices=8"), ties)
    actor, rollout, judge, trainer = request.roles
    assert (actor.device, actor.slots, actor.per_node, actor.least) == ("cuda", Fraction(1, 2), 2, 4)
    assert (rollout.least, rollout.count, rollout.per_group, rollout.devices) == (2, 8, 4, ("0", "1"))
    assert (judge.device, trainer.device) == ("cpu", None)
    assert (request.together, request.apart) == (spec.host_collocations, spec.separations)
    assert (request.isolated, request.spares) == (spec.isolations, 1)
    assert request.ties == ties
    assert request.tainted == {"node3"}, "of other nodes the planner knows nothing"


def test_as_many_ranks_as_there_is_room_for_are_the_jobs() -> None:
    spec, placement = place(job(role("rollout", 8, least=2, slots=2.0)), hosts("devices=6"))
    assert spec.role("rollout").count == 3 == len(placement.assignments)
    with pytest.raises(PlacementError) as caught:
        place(job(role("rollout", 8, least=4, slots=2.0)), hosts("devices=6"))
    assert caught.value.role == "rollout"


@given(
    st.integers(1, 3),
    st.integers(0, 8),
    st.integers(0, 2),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_a_role_that_is_placed_again_and_again_may_become_as_large_as_it_was_to_be(
    least: int, more: int, fixed: int, lost: list[int]
) -> None:
    """Nodes are lost one after the other; the spec of each placement is that of the one before."""
    inventory = hosts("nodes=4,devices=2")
    spec = job(role("rollout", least + more, least=least), *ranks(critic=fixed)[: bool(fixed)])
    wanted = {each.name: each.count for each in spec.roles}
    try:
        spec, placement = place(spec, inventory)
        for count in range(len(lost) + 1):
            rollout = spec.role("rollout")
            assert rollout.most == wanted["rollout"]
            assert least <= rollout.count <= rollout.most
            assert all(each.most is None for each in spec.roles if each is not rollout)
            for each in spec.roles:
                assert each.count == len(placement.of_role(each.name))
            left = 2 * (4 - len(set(lost[:count])))
            assert rollout.count == min(wanted["rollout"], left - fixed) or count, (
                "all that there is room for"
            )
            gone = [f"node{number}" for number in lost[: count + 1]]
            spec, placement = place_again(spec, inventory, placement, gone)
    except PlacementError as error:
        left = 2 * (4 - len(set(lost)))
        assert left < least + fixed, error


def test_ranks_on_processors_are_bound_to_their_own() -> None:
    _, placement = place(job(role("actor", 2, device="cpu", slots=2.0)), hosts("cpus=4"))
    assert [a.cpus for a in placement.assignments] == [(0, 1), (2, 3)]
    _, crowded = place(job(role("actor", 4, device="cpu")), hosts("cpus=2"))
    assert [a.cpus for a in crowded.assignments] == [(0,), (1,), (0,), (1,)]


def test_a_virtual_local_rank_shows_each_worker_its_own_devices_wherever_it_is() -> None:
    spec = job(*ranks(actor=4), virtual_local_rank=True)
    _, placement = place(spec, hosts("nodes=2,devices=2"))
    assert masks(placement) == {"actor": [("0",), ("1",), ("0",), ("1",)]}


def test_a_type_that_no_node_has_does_not_fit() -> None:
    with pytest.raises(PlacementError, match="actor"):
        place(job(role("actor", 1, device="cuda")), hosts("devices=0"))
    elsewhere = replace(role("actor", 1), device="tpu")
    with pytest.raises(PlacementError, match="tpu"):
        place(job(elsewhere), hosts("devices=1"))


def test_all_that_is_wrong_with_places_is_one_error_with_every_cause() -> None:
    spec = job(
        role("actor", 4, per_node=2, slots=0.75, device="cuda"),
        role("critic", 2, per_node=1, slots=0.75, device="cuda"),
        role("judge", 1, device="cpu", devices=("0",)),
        collocations=(("actor", "critic"),),
        separations=(("actor", "critic"),),
        isolations=(("actor", "critic"),),
    )
    with pytest.raises(PlacementError) as caught:
        place(spec, hosts("nodes=4,devices=2"))
    assert [fault.where for fault in caught.value.faults] == [
        "judge.devices",
        "actor.count",
        "actor.per_node",
        "actor.slots",
        "isolations[0]",
        "separations[0]",
    ]


def test_workers_are_shown_their_devices_by_the_variable_of_their_type() -> None:
    spec = job(role("actor", 1), role("judge", 1, device="cpu"), TRAINER)
    assert place(spec, hosts("devices=2"))[1].masks == {"actor": "CUDA_VISIBLE_DEVICES"}
    assert place(spec, hosts("devices=2,type=npu"))[1].masks == {}, "nobody here knows that type"


@pytest.mark.parametrize(("slots", "own"), [(0.5, True), (1.0, False), (2.0, True)])
def test_a_rank_whose_device_is_not_that_of_its_local_rank_is_told_of(slots: float, own: bool) -> None:
    placement = place(job(role("actor", 2, slots=slots), *ranks(critic=1)), hosts("devices=8"))[1]
    assert ("each rank of actor sees its own devices only" in placement.note) == own


class TestRolesBesideOthers:
    """They have one rank on each node of the other role, and change nothing for the planner."""

    @staticmethod
    def beside(engines: int) -> JobSpec:
        engine = role("engine", engines, device="cuda")
        return job(*ranks(actor=2), engine, role("engine-weights", 1, slots=0.0, beside="engine"))

    @given(st.integers(1, 8), st.lists(st.integers(0, 4), max_size=4, unique=True))
    def test_each_node_of_the_other_role_has_one_whatever_is_lost(
        self, engines: int, losses: list[int]
    ) -> None:
        inventory = hosts("nodes=5,cpus=8,devices=2")
        spec, placement = place(self.beside(engines), inventory)
        lost: list[str] = []
        for node in [None, *(f"node{number}" for number in losses)]:
            if node is not None:
                before, lost = placement, [*lost, node]
                try:
                    spec, placement = place_again(spec, inventory, before, lost)
                except PlacementError:
                    return
                old, new = before.of_role("engine-weights"), placement.of_role("engine-weights")
                assert len(new) >= len(old), "with fewer all would start again"
                assert all(b.node == a.node or a.node == node for a, b in zip(old, new, strict=False))
            else:
                old, new = (), placement.of_role("engine-weights")
            here = Counter(a.node for a in new)
            assert all(here[a.node] == 1 for a in new[len(old) :]), "one more for a node that had none"
            there = placement.of_role("engine-weights")
            assert {a.node for a in there} >= {a.node for a in placement.of_role("engine")}
            assert {a.node for a in there}.isdisjoint(lost)
            assert len(there) == spec.role("engine-weights").count
            assert [a.rank for a in there] == [*range(len(there))]
            assert all((a.slot, a.own, a.devices) == (-1, (), ()) for a in there)

    def test_the_others_are_placed_as_without_them(self) -> None:
        inventory = hosts("nodes=3,cpus=8,devices=2")
        whole = self.beside(4)
        _, placement = place(whole, inventory)
        _, alone = place(replace(whole, roles=whole.roles[:-1]), inventory)
        assert placement.assignments[: len(alone.assignments)] == alone.assignments

    def test_ties_with_them_count_for_nothing(self) -> None:
        inventory = hosts("nodes=3,cpus=8,devices=2")
        ties = Ties(
            {("actor", "engine-weights"): 9.0, ("actor", "engine"): 1.0}, (("actor", "engine-weights"),)
        )
        whole = self.beside(2)
        _, placement = place(whole, inventory, ties=ties)
        _, alone = place(
            replace(whole, roles=whole.roles[:-1]), inventory, ties=Ties({("actor", "engine"): 1.0})
        )
        assert placement.assignments[: len(alone.assignments)] == alone.assignments

    def test_they_outlive_the_other_role_where_they_are(self) -> None:
        inventory = hosts("nodes=3,cpus=8,devices=2")
        spec, placement = place(self.beside(4), inventory)
        left = replace(spec, roles=tuple(each for each in spec.roles if each.name != "engine"))
        nodes = [a.node for a in placement.of_role("engine-weights")]
        _, after = place_again(left, inventory, placement, nodes[:1])
        assert [a.node for a in after.of_role("engine-weights")] == ["node0", *nodes[1:]]

    def test_they_get_no_more_ranks_once_the_other_role_has_ended(self) -> None:
        inventory = hosts("nodes=3,cpus=8,devices=2")
        spec, placement = place(self.beside(2), inventory)
        left = replace(spec, roles=tuple(each for each in spec.roles if each.name != "engine"))
        _, after = place_again(left, inventory, placement, [])
        assert after.of_role("engine-weights") == placement.of_role("engine-weights")
