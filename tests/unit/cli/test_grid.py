"""Nodes × slots: pictures of placements. Those of the SVGs are kept in ``pictures``, and drawn anew with
``python -m tests.unit.cli.test_grid`` when they shall look otherwise. Look at them then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.cli import plan
from unirun.cli.plan import MAX_ROWS, WHOLE, Grid, Tenant, grid, svg, text
from unirun.collocation import Assignment, Device, Inventory, Node, Placement, parse_fake

FOLDER = Path(__file__).with_name("pictures")


def on(role: str, rank: int, node: str, *own: str, share: float = 1.0) -> Assignment:
    """A rank on devices."""
    return Assignment(role, rank, node, int(own[0]), 0, own, None, own, share)


def cpu(role: str, rank: int, node: str, place: int) -> Assignment:
    """A rank on a processor."""
    return Assignment(role, rank, node, place, 0, None, (place,), (str(place),))


def bare(role: str, rank: int, node: str, slot: int) -> Assignment:
    """A rank whose mask is left as it is."""
    return Assignment(role, rank, node, slot, rank)


def placed(
    *assignments: Assignment, spares: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Placement:
    return Placement(assignments, "", spares, excluded=excluded)


def picture_of(placement: Placement, inventory: str) -> Grid:
    """A node with a mask has CUDA devices, one without has processors."""
    types = {each.role: "cuda" if each.devices else "cpu" for each in placement.assignments}
    return grid(placement, parse_fake(inventory), types)


def drawn(placement: Placement, inventory: str, width: int = 110) -> str:
    return text(picture_of(placement, inventory), width=width)


MIXED = placed(
    *(on("actor", rank, "node0", str(rank), share=0.5) for rank in range(2)),
    *(on("critic", rank, "node0", str(rank), share=0.5) for rank in range(2)),
    on("rollout", 0, "node1", "0", "1"),
    *(on("reward", rank, "node1", "2", share=0.25) for rank in range(4)),
    cpu("judge", 0, "node1", 0),
    Assignment("trainer", 0, "node0", -1, 0),
    spares=("node2",),
)
MIXED_NODES = "fake:nodes=3,devices=3"


def many(nodes: int) -> Placement:
    return placed(
        *(on("actor", 2 * n + i, f"node{n:02}", str(i)) for n in range(nodes - 2) for i in range(2)),
        on("odd", 0, f"node{nodes - 2:02}", "1"),
        spares=(f"node{nodes - 1:02}",),
    )


def test_sharing_shares_spares_and_free_slots_are_seen() -> None:
    assert drawn(MIXED, MIXED_NODES) == (
        "NODE   cuda 0        cuda 1        cuda 2           cpu 0    no slot    FREE\n"
        "node0  actor:0 0.5   actor:1 0.5   ·                         trainer:0  1\n"
        "       critic:0 0.5  critic:1 0.5\n"
        "node1  rollout:0     rollout:0     reward:0-3 0.25  judge:0             0\n"
        "node2  ·             ·             ·                                    spare\n"
    )


def test_slots_that_do_not_fit_are_below() -> None:
    assert drawn(MIXED, MIXED_NODES, width=44) == (
        "NODE   cuda 0        cuda 1\n"
        "node0  actor:0 0.5   actor:1 0.5\n"
        "       critic:0 0.5  critic:1 0.5\n"
        "node1  rollout:0     rollout:0\n"
        "node2  ·             ·\n"
        "\n"
        "NODE   cuda 2           cpu 0\n"
        "node0  ·\n"
        "node1  reward:0-3 0.25  judge:0\n"
        "node2  ·\n"
        "\n"
        "NODE   no slot    FREE\n"
        "node0  trainer:0  1\n"
        "node1             0\n"
        "node2             spare\n"
    )


def test_nodes_that_are_not_used_are_told_apart() -> None:
    idle = placed(on("a", 0, "node0", "0"), spares=("node2",), excluded=("node1",))
    assert drawn(idle, "fake:nodes=3,devices=1") == (
        "NODE   cuda 0  FREE\nnode0  a:0     0\nnode1  ·       excluded\nnode2  ·       spare\n"
    )


def test_a_role_has_one_colour() -> None:
    lines = text(picture_of(MIXED, MIXED_NODES), colours=(31, 32)).splitlines()
    assert lines[1].startswith("node0  \x1b[31mactor:0 0.5 \x1b[0m  \x1b[31mactor:1 0.5 \x1b[0m  ·")
    assert lines[2].startswith("       \x1b[32mcritic:0 0.5\x1b[0m")
    plain = [re.sub("\x1b\\[\\d*m", "", line).rstrip() for line in lines]
    assert plain == drawn(MIXED, MIXED_NODES).splitlines()


def test_nodes_that_are_alike_are_told_in_one_line() -> None:
    assert drawn(many(12), "fake:nodes=12,devices=2") == (
        "NODE    cuda 0   cuda 1   FREE\n"
        "node00  actor:0  actor:1  0\n"
        "node01…node09 (9 nodes) as node00: actor:2-19\n"
        "node10  ·        odd:0    1\n"
        "node11  ·        ·        spare\n"
    )


def test_few_nodes_are_all_drawn() -> None:
    nodes = tuple(Node(f"n{n}", (0,), (Device("0", "H"),)) for n in range(WHOLE))
    picture = grid(placed(*(on("a", n, f"n{n}", "0") for n in range(WHOLE))), Inventory(nodes), {"a": "cuda"})
    assert [row.folded for row in picture.rows] == [""] * WHOLE


def test_nodes_beyond_the_most_are_summed_up() -> None:
    """Each node differs from the one before: nothing can be folded."""
    count = MAX_ROWS + 6
    ranks = [on("ab"[n % 2], n // 2, f"node{n:02}", "0") for n in range(count - 2)]
    placement = placed(*ranks, spares=(f"node{count - 1}",), excluded=(f"node{count - 2}",))
    lines = drawn(placement, f"fake:nodes={count},devices=2").splitlines()
    assert len(lines) == 1 + MAX_ROWS + 1
    assert lines[-2].startswith("node39")
    assert lines[-1] == "… 6 more nodes: a:20-21, b:20-21, 4 free slots, 1 spare, 1 excluded"


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=8))
def test_each_node_and_each_free_slot_is_told_once(runs: list[tuple[int, int]]) -> None:
    """Of nodes that are alike one after another, and of those beyond the most rows, too."""
    used = [1, *(count for count, times in runs for _ in range(times))]
    ranks = iter(range(2 * len(used)))
    placement = placed(
        *(
            on("a", next(ranks), f"node{n}", str(slot))
            for n, count in enumerate(used)
            for slot in range(count)
        )
    )
    nodes = tuple(Node(f"node{n}", (0,), (Device("0", "H"), Device("1", "H"))) for n in range(len(used)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "WHOLE", 2)
        patch.setattr(plan, "MAX_ROWS", 3)
        picture = grid(placement, Inventory(nodes), {"a": "cuda"})
    number, free = (
        int(found[1]) if (found := re.search(rf"(\d+) {what}", picture.rest)) else 0
        for what in ("more nodes", "free slots")
    )
    number += sum(1 + len(row.others) for row in picture.rows)
    free += sum(row.free * (1 + len(row.others)) for row in picture.rows)
    assert (number, free) == (len(used), 2 * len(used) - sum(used))


NODE = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from([0.5, 1.0]), st.sampled_from("01")), max_size=1
)


@examples(100)
@given(st.lists(NODE, min_size=1, max_size=6))
def test_a_node_that_is_folded_into_another_looks_like_it(kinds: list[list[tuple[str, float, str]]]) -> None:
    """Each kind of node is there twice, one after the other."""
    used = [kind for kind in kinds for _ in range(2)]
    ranks = iter(range(100))
    placed_on = [
        on(role, next(ranks), f"node{n}", slot, share=share)
        for n, node in enumerate(used)
        for role, share, slot in node
    ]
    nodes = tuple(Node(f"node{n}", (0,), (Device("0", "H"), Device("1", "H"))) for n in range(len(used)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "WHOLE", 0)
        rows = grid(placed(*placed_on), Inventory(nodes), dict.fromkeys("ab", "cuda")).rows
    for row in rows:
        alike = [sorted(used[int(name.removeprefix("node"))]) for name in (row.node, *row.others)]
        assert alike == alike[:1] * len(alike)


def test_a_rank_without_a_slot_takes_no_free_one() -> None:
    placement = placed(bare("a", 0, "node0", 0), bare("logger", 0, "node0", -1))
    (row,) = picture_of(placement, "fake:nodes=1,cpus=4").rows
    assert row.free == 3


def test_ranks_without_devices_of_their_own_are_on_places_for_processes() -> None:
    """More ranks than devices: who computes on which is not known, so none is said to be free."""
    placement = placed(*(bare("a", n, "node0", n) for n in range(2)), bare("b", 0, "node0", 2))
    assert drawn(placement, "fake:nodes=1,devices=2,cpus=4") == (
        "NODE   cpu 0  cpu 1  cpu 2  FREE\nnode0  a:0    a:1    b:0    1\n"
    )


def test_one_role_that_sees_all_devices_is_on_those_of_its_local_ranks() -> None:
    seen = placed(*(Assignment("a", n, "node0", n, n, own=(str(n),)) for n in range(2)))
    picture = grid(seen, parse_fake("fake:nodes=1,devices=3"), {"a": "cuda"})
    assert text(picture) == "NODE   cuda 0  cuda 1  cuda 2  FREE\nnode0  a:0     a:1     ·       1\n"


def test_devices_of_two_types_are_told_apart_by_what_the_role_names() -> None:
    node = Node("n0", (0,), (Device("0", "H"), Device("0", "N", type="npu")))
    placement = placed(on("a", 0, "n0", "0"), on("b", 0, "n0", "0"))
    assert text(grid(placement, Inventory((node,)), {"a": "cuda", "b": "npu"})) == (
        "NODE  cuda 0  npu 0  FREE\nn0    a:0     b:0    0\n"
    )


def test_a_long_name_of_a_device_is_cut() -> None:
    index = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
    node = Node("n0", (0,), (Device(index, "H"),))
    picture = grid(
        placed(Assignment("a", 0, "n0", 0, 0, (index,), None, (index,))), Inventory((node,)), {"a": "cuda"}
    )
    assert picture.columns == ("cuda GPU-5d5ba0d…",)


def test_a_long_list_of_ranks_is_cut() -> None:
    assert Tenant("a", tuple(range(0, 60, 2)), 1.0).text == "a:0,2,4,6,8,10,12,14,16,1…"
    assert Tenant("a", (1, 0, 2, 8), 0.5).text == "a:0-2,8 0.5"


PICTURES: dict[str, Callable[[], str]] = {
    "mixed.svg": lambda: svg(picture_of(MIXED, MIXED_NODES)),
    "many.svg": lambda: svg(picture_of(many(12), "fake:nodes=12,devices=2")),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_svgs_look_as_they_did(name: str) -> None:
    assert PICTURES[name]() == (FOLDER / name).read_text(encoding="utf-8")


def test_svg_shows_any_name() -> None:
    name = '<b>&amp;"\x1b'
    nodes = Inventory((Node(name, (0,), (Device("0", "H"),)),))
    picture = svg(grid(placed(on(name, 0, name, "0")), nodes, {name: "cuda"}))
    texts = [each.text for each in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert '<b>&amp;"\\x1b' in texts
    assert '<b>&amp;"\\x1b:0' in texts


def test_nothing_is_drawn_outside_of_the_svg() -> None:
    root = ElementTree.fromstring(PICTURES["mixed.svg"]())
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for each in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y = float(each.get("x", 0)), float(each.get("y", 0))
        assert x + float(each.attrib["width"]) <= width
        assert y + float(each.attrib["height"]) <= height


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        (FOLDER / name).write_text(picture(), encoding="utf-8")
