"""The nodes of a job and the places of its ranks in the context: all that a planner and an agent need comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.failover.context.states import kept, many
from unirun.collocation import Assignment, Device, Inventory, Node, Placement
from unirun.failover.context import decode, encode
from unirun.failover.state import JobState, new_job

ROLES = ("role0", "role1")
RANKS = 3
names = st.text("abc", min_size=1, max_size=3)
indices = st.lists(st.sampled_from("0123"), unique=True).map(tuple)
processors = st.lists(st.integers(0, 40), unique=True).map(lambda found: tuple(sorted(found)))
links = st.lists(st.tuples(st.sampled_from("0123"), st.sampled_from(["NV4", "PIX", "SYS"]))).map(tuple)
devices = st.builds(
    Device,
    index=st.sampled_from("0123"),
    name=names,
    type=st.sampled_from(["cuda", "npu"]),
    memory=st.integers(0, 2**40),
    numa=st.integers(-1, 1),
    links=links,
)
numa = st.tuples(st.integers(0, 3), processors)
nodes = st.builds(
    Node,
    name=names,
    cpus=processors,
    devices=st.lists(devices, max_size=3).map(tuple),
    memory=st.integers(0, 2**40),
    numa=st.lists(numa, max_size=2).map(tuple),
)
inventories = st.lists(nodes, max_size=4, unique_by=lambda node: node.name).map(
    lambda found: Inventory(tuple(found))
)


def place(role: str, rank: int) -> st.SearchStrategy[Assignment]:
    return st.builds(
        Assignment,
        role=st.just(role),
        rank=st.just(rank),
        node=names,
        slot=st.integers(-1, 9),
        local_rank=st.integers(0, 9),
        devices=st.none() | indices,
        cpus=st.none() | processors.filter(len),
        own=indices,
        share=st.floats(0.1, 1.0),
        numa=st.integers(-1, 3),
    )


placements = st.builds(
    Placement,
    assignments=st.tuples(*(place(role, rank) for role in ROLES for rank in range(RANKS))),
    note=st.text(max_size=5),
    spares=st.lists(names).map(tuple),
    crossing=st.floats(0, 100),
    excluded=st.lists(names).map(tuple),
    lost=st.lists(names).map(tuple),
    masks=st.dictionaries(st.sampled_from(ROLES), st.sampled_from(["CUDA_VISIBLE_DEVICES", "ASCEND"])),
)


def job(placement: Placement, inventory: Inventory) -> JobState:
    spec = many(len(ROLES) * RANKS, 1, roles=len(ROLES)).spec
    return new_job(spec, placement, started=1.0, logs="/logs", inventory=inventory)


@given(placements, inventories)
def test_a_placement_and_an_inventory_are_restored(placement: Placement, inventory: Inventory) -> None:
    state = job(placement, inventory)
    assert decode(encode(state)) == kept(state)
