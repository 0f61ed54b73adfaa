"""Nodes and places of ranks as documents: all that a planner and an agent need comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.master.persistence.documents import applied
from unirun.collocation import Assignment, Device, Inventory, Node, NumaNode, Placement
from unirun.master.persistence.placements import (
    RANKS,
    inventory_documents,
    placement_documents,
    placement_head,
    read_inventory,
    read_placement,
)

ROLES = ("actor", "critic")
names = st.sampled_from(["n0", "n1", "n2"])
indices = st.lists(st.sampled_from("0123"), unique=True).map(tuple)
processors = st.lists(st.integers(0, 40), unique=True).map(lambda found: tuple(sorted(found)))
links = st.lists(st.tuples(st.sampled_from("0123"), st.sampled_from(["NV4", "PIX", "SYS"]))).map(tuple)
devices = st.builds(
    Device,
    index=st.sampled_from("0123"),
    name=st.just(""),
    type=st.sampled_from(["cuda", "npu"]),
    numa=st.integers(-1, 1),
    links=links,
)
numa = st.builds(NumaNode, st.integers(0, 3), processors)
machines = st.builds(
    Node,
    name=st.text("abc", min_size=1, max_size=3),
    cpus=processors,
    devices=st.lists(devices, max_size=3).map(tuple),
    numa=st.lists(numa, max_size=2).map(tuple),
)
places = st.builds(
    Assignment,
    role=st.sampled_from(ROLES),
    rank=st.integers(0, 9),
    node=names,
    slot=st.integers(-1, 9),
    local_rank=st.integers(0, 9),
    devices=st.none() | indices,
    cpus=st.none() | processors.filter(len),
    own=indices,
    share=st.floats(0.1, 1.0),
    numa=st.integers(-1, 3),
)


@given(st.lists(machines, max_size=4, unique_by=lambda node: node.name))
def test_an_inventory_is_found_again(nodes: list[Node]) -> None:
    inventory = Inventory(tuple(nodes))
    assert read_inventory(applied({}, inventory_documents(inventory))) == inventory


@given(
    st.lists(places, max_size=6),
    st.lists(places, max_size=6),
    st.text(max_size=5),
    st.lists(names).map(tuple),
    st.lists(names).map(tuple),
    st.lists(names).map(tuple),
    st.floats(0, 100),
    st.dictionaries(st.sampled_from(ROLES), st.sampled_from(["CUDA_VISIBLE_DEVICES", "ASCEND"])),
)
def test_a_placement_is_found_again_from_what_has_changed(
    first: list[Assignment],
    then: list[Assignment],
    note: str,
    spares: tuple[str, ...],
    excluded: tuple[str, ...],
    lost: tuple[str, ...],
    crossing: float,
    masks: dict[str, str],
) -> None:
    def in_order(found: list[Assignment]) -> tuple[Assignment, ...]:
        return tuple(sorted(found, key=lambda place: ROLES.index(place.role)))

    before = Placement(in_order(first), "")
    after = Placement(in_order(then), note, spares, crossing, excluded, lost, masks)
    documents = applied({}, placement_documents(None, before, ROLES))
    documents = applied(documents, placement_documents(before, after, ROLES))
    assert read_placement(placement_head(after), ROLES, documents) == after


def test_who_moves_is_written_with_few_others() -> None:
    ranks = tuple(Assignment("actor", rank, "n0", rank, rank) for rank in range(10 * RANKS))
    before = Placement(ranks, "")
    moved = (*ranks[:-1], Assignment("actor", 10 * RANKS - 1, "n1", 0, 0))
    assert list(placement_documents(before, Placement(moved, ""), ("actor",))) == ["placement/actor/9"]
