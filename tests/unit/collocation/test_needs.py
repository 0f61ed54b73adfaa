"""Processors and memory that ranks need of their node: never more than it has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.samples import TRAINER, hosts, job, role
from unirun.collocation import Inventory, Node, place, place_again
from unirun.collocation.placing import shown_need
from unirun.errors import PlacementError
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import parse_size

GB = 10**9


def service(name: str, count: int, **needs: Any) -> RoleSpec:
    return role(name, count, slots=0.0, **needs)


def refused(spec: JobSpec, inventory: str) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        place(spec, hosts(inventory))
    return caught.value


def test_what_a_node_has_may_be_used_to_the_last() -> None:
    roles = (role("actor", 2, cpus=2, memory=10 * GB), service("engine", 1, cpus=4, memory=20 * GB))
    spec, placement = place(job(*roles), hosts("devices=2,cpus=8,memory=40GB"))
    assert len(placement.assignments) == 3
    assert spec.roles == roles
    assert {each.cpus for each in placement.assignments} == {None}, "nobody is bound"


def test_too_few_processors_are_told_with_roles_and_what_fits() -> None:
    error = refused(job(role("actor", 2, cpus=2), service("engine", 1, cpus=5)), "cpus=8")
    assert error.problem == (
        "actor needs room for 2 ranks and there is room for 1 besides the other roles "
        "(9 cpus (actor 2 × 2, engine 1 × 5) are needed, 8 are there, 1 node)"
    )
    assert error.nearest == ("actor=1", "actor cpus 1", "engine cpus 4", "adding 1 node")
    assert (error.role, error.needed, error.available, error.constraint) == ("actor", 2, 1, "cpus")


def test_too_little_memory_is_told_with_what_fits() -> None:
    error = refused(job(service("engine", 3, memory=30 * GB)), "memory=80GB")
    assert error.problem == (
        "engine needs room for 3 ranks and there is room for 2 "
        "(90.0 GB of memory (engine 3 × 30.0 GB) are needed, 80.0 GB are there, 1 node)"
    )
    assert error.remedy == "engine=2 fits, or engine memory 26GB, or adding 1 node"
    error = refused(job(service("engine", 1, memory=80 * GB + 1)), "memory=80GB")
    assert "80000000001 B of memory (engine 1 × 80.0 GB) are needed, 80000000000 B are there" in error.problem


def test_all_processors_are_those_of_the_node_and_for_one_rank_only() -> None:
    alone = service("engine", 1, cpus="all")
    place(job(alone), hosts("cpus=3"))
    assert refused(job(replace(alone, count=2)), "cpus=3").nearest == (
        "engine=1",
        "engine cpus 1",
        "adding 1 node",
    )
    assert refused(job(alone, service("proxy", 1, cpus=1)), "cpus=3").nearest[0] == "engine cpus 2"
    _, placement = place(job(replace(alone, count=2)), hosts("nodes=2,cpus=3"))
    assert placement.nodes == ("node0", "node1")


def test_a_trainer_has_needs_as_others() -> None:
    error = refused(job(role("actor", 1, cpus=2), replace(TRAINER, cpus=3)), "cpus=4")
    assert error.nearest == ("actor cpus 1", "trainer cpus 2", "adding 1 node")


def test_ranks_are_on_more_nodes_where_one_has_too_little() -> None:
    engines = service("engine", 4, cpus=6)
    _, placement = place(job(engines), hosts("nodes=4,cpus=12"))
    assert [each.node for each in placement.assignments] == ["node0", "node0", "node1", "node1"]
    spec = job(role("actor", 2, cpus=6), service("judge", 1, cpus=8))
    _, placement = place(spec, hosts("nodes=2,cpus=12,devices=2"))
    assert [each.node for each in placement.assignments] == ["node0", "node0", "node1"]


def test_of_many_roles_those_that_need_most_are_told() -> None:
    services = [service(f"s{number}", 1, cpus=1 + number // 95) for number in range(100)]
    error = refused(job(*services), "cpus=64")
    assert (
        "105 cpus (s0 1 × 1, s95 1 × 2, s96 1 × 2, s97 1 × 2, s98 1 × 2, s99 1 × 2, 94 more roles) are needed"
        in (error.problem)
    )


def test_memory_that_is_not_known_is_enough() -> None:
    place(job(service("engine", 1, memory=10**15)), Inventory((Node("host", (0, 1)),)))


def test_a_node_that_is_lost_leaves_its_ranks_to_nodes_that_have_what_they_need() -> None:
    spec = job(role("actor", 2, cpus=6, device="cuda"))
    inventory = hosts("nodes=3,cpus=8,devices=2")
    spec, before = place(spec, inventory)
    _, after = place_again(spec, inventory, before, ["node0"])
    assert {each.node for each in after.assignments} == {"node1", "node2"}
    with pytest.raises(
        PlacementError, match=r"there is room for 1 \(2 cuda slots .* 12 cpus \(actor 2 × 6\)"
    ):
        place_again(spec, inventory, before, ["node0", "node2"])


@pytest.mark.parametrize(
    ("needs", "said"),
    [({}, ""), ({"cpus": 1}, "1 cpu"), ({"cpus": "all", "memory": 64 * GB}, "all cpus, 64.0 GB")],
)
def test_needs_are_shown_in_a_few_words(needs: dict[str, Any], said: str) -> None:
    assert shown_need(service("engine", 1, **needs)) == said


kinds = st.fixed_dictionaries(
    {"count": st.integers(1, 4), "slots": st.sampled_from([0.0, 0.0, 1.0, 2.0])},
    optional={
        "cpus": st.integers(1, 6) | st.just("all"),
        "memory": st.integers(1, 40).map(GB.__mul__),
        "per_node": st.just(1),
    },
)


@given(
    st.lists(kinds, min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(10, 90),
    st.integers(0, 4),
)
def test_no_node_ever_has_more_than_it_can_give_and_each_offer_fits(
    roles: list[dict[str, Any]], nodes: int, cpus: int, memory: int, devices: int
) -> None:
    spec = job(*(role(f"r{number}", **keys) for number, keys in enumerate(roles)))
    inventory = hosts(f"nodes={nodes},cpus={cpus},memory={memory}GB,devices={devices}")
    try:
        spec, placement = place(spec, inventory)
    except PlacementError as error:
        event(f"short of {error.constraint if error.constraint in ('cpus', 'memory') else 'slots'}")
        assert 0 <= error.available < error.needed
        for offer in error.nearest:
            if not {*offer.split()} & {"adding", "without", "slots", "per_node"}:
                place(changed(spec, offer), inventory)
        return
    event("fits")
    for node in inventory.nodes:
        here = [spec.role(each.role) for each in placement.assignments if each.node == node.name]
        assert sum(len(node.cpus) if each.cpus == "all" else each.cpus or 0 for each in here) <= cpus
        assert sum(each.memory or 0 for each in here) <= memory * GB


def changed(spec: JobSpec, offer: str) -> JobSpec:
    """The job as an offer, which a user reads, says."""
    for part in offer.replace(",", " and").split(" and "):
        name, _, rest = part.strip().partition(" ")
        key, value = rest.split() if rest else ("count", name.partition("=")[2])
        name = name.partition("=")[0]
        roles = tuple(
            replace(each, **{key: parse_size(value)}) if each.name == name else each for each in spec.roles
        )
        spec = replace(spec, roles=roles)
    return spec
