"""Pictures of graphs: those of the ready ones are kept in ``pictures``, and drawn anew with
``python -m tests.unit.collocation.graph.test_pictures`` when they shall look otherwise. Look at them then."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.collocation.graph.scenarios import SCENARIOS
from tests.unit.collocation.graph.strategies import any_graphs
from unirun.collocation.graph import Edge, Role, RoleGraph
from unirun.collocation.graph.svg import LOOKS, dot, heights, layout, look, mermaid, svg, tree
from unirun.spec.read import printable

FOLDER = Path(__file__).with_name("pictures")
STATES = {"rollout": "running", "reward": "restarting", "actor": "failed", "critic": "waiting"}
FORMS: dict[str, Callable[[RoleGraph], str]] = {
    "svg": svg,
    "states.svg": lambda graph: svg(graph, STATES),
    "mmd": lambda graph: mermaid(graph, STATES),
    "dot": lambda graph: dot(graph, STATES),
    "txt": lambda graph: tree(graph, STATES),
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_ready_graphs_look_as_they_did(name: str, form: str) -> None:
    assert FORMS[form](SCENARIOS[name]()) == (FOLDER / f"{name}.{form}").read_text()


names = st.text(max_size=10) | st.sampled_from(
    ["a", '"', "end", "<b>&amp;", "\\n", "\x1b[31m", "\ud800", "#35;"]
)


@st.composite
def named(draw: st.DrawFn) -> RoleGraph:
    """Graphs whose roles and invocations have any names."""
    unique = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    ends = st.sampled_from(unique)
    edges = draw(st.lists(st.builds(Edge, ends, ends, names), max_size=5))
    return RoleGraph(tuple(Role(name, 2) for name in unique), tuple(edges))


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@given(named())
def test_svg_shows_any_name(graph: RoleGraph) -> None:
    shown = texts(svg(graph))
    for role in graph.roles:
        assert f"{printable(role.name)} ×2" in shown
    for edge in graph.edges:
        if edge.source != edge.target:
            assert any(text.startswith(printable(edge.invocation)) for text in shown)
    svg(graph).encode()


@given(named())
def test_dot_quotes_any_name(graph: RoleGraph) -> None:
    lines = dot(graph).splitlines()
    assert len(lines) == 4 + len(graph.roles) + len(graph.edges)
    quoted = r'"(?:[^"\\]|\\.)*"'
    for line in lines[3:-1]:
        assert re.fullmatch(rf"    r\d+( -> r\d+)? \[(\w+=({quoted}|\w+)(, )?)+\];", line), line
    labels = [re.search(rf"label=({quoted})", line) for line in lines[3 : 3 + len(graph.roles)]]
    read = [re.sub(r"\\(.)", r"\1", label[1][1:-1]) for label in labels if label]
    assert read == [f"{printable(role.name)} ×2" for role in graph.roles]


@given(named())
def test_mermaid_takes_any_name(graph: RoleGraph) -> None:
    first, *lines = mermaid(graph).splitlines()
    assert first == "flowchart LR"
    assert len(lines) == len(graph.roles) + len(graph.edges)
    harmless = r"""(?:[\w .:·×()⟵⟷-]|#\d+;)*"""
    for line in lines:
        assert re.fullmatch(rf'    r\d+(\["{harmless}"\]| --\>\|"{harmless}"\| r\d+)', line), line
    shown = [re.sub(r"#(\d+);", lambda m: chr(int(m[1])), line.partition('"')[2][:-2]) for line in lines]
    assert shown[: len(graph.roles)] == [f"{printable(role.name)} ×2" for role in graph.roles]


@given(named(), st.booleans())
def test_a_terminal_is_sent_nothing_to_obey(graph: RoleGraph, colour: bool) -> None:
    states = {role.name: "running" for role in graph.roles}
    shown = tree(graph, states, colour=colour)
    plain = re.sub(r"\x1b\[(32|0)m", "", shown) if colour else shown
    assert all(printable(line) == line for line in plain.split("\n"))
    assert plain == tree(graph, states)
    for role in graph.roles:
        assert f"{printable(role.name)} ×2" in plain


def test_a_tree_unfolds_a_role_once() -> None:
    assert tree(SCENARIOS["multimodal"]()).count("(above)") == 2


def test_a_tree_of_a_long_chain_has_all_of_it() -> None:
    roles = [str(number) for number in range(3000)]
    edges = tuple(Edge(a, b) for a, b in pairwise(roles))
    shown = tree(RoleGraph(tuple(Role(name) for name in roles), edges))
    assert len(shown.splitlines()) == 3000


def test_colours_are_those_of_states() -> None:
    graph = RoleGraph((Role("actor", 2), Role("rollout", 2)))
    shown = tree(graph, {"actor": "failed", "rollout": "unheard of"}, colour=True)
    assert shown == "\x1b[31mactor ×2\x1b[0m  failed\nrollout ×2  unheard of\n"
    assert look("failed").fill in svg(graph, {"actor": "failed"})
    assert look("failed").fill in dot(graph, {"actor": "failed"})
    assert look("failed").fill in mermaid(graph, {"actor": "failed", "nobody": "failed"})


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("state", [*LOOKS, ""])
def test_words_in_boxes_are_legible(state: str) -> None:
    assert contrast(look(state).fill, look(state).text) >= 7


def test_words_at_lines_are_legible() -> None:
    picture = ElementTree.fromstring(svg(SCENARIOS["multimodal"]()))
    background = next(picture.iter(f"{SVG}rect")).get("fill", "")
    labels = [each for each in picture.iter(f"{SVG}text") if each.get("text-anchor") is None]
    assert labels
    assert all(contrast(background, each.get("fill", "")) >= 7 for each in labels)
    assert all(
        contrast(background, each.get("stroke", "")) >= 4.5
        for each in picture.iter(f"{SVG}path")
        if each.get("stroke")
    )


@given(any_graphs([*"abcdefgh"]))
def test_nothing_in_a_picture_lies_on_something_else(graph: RoleGraph) -> None:
    picture = ElementTree.fromstring(svg(graph))
    width, height = (float(picture.get(side, "0")) for side in ("width", "height"))
    boxes = []
    for each in [*picture.iter(f"{SVG}rect")][1:]:
        x, y, w, h = (float(each.get(key, "0")) for key in ("x", "y", "width", "height"))
        assert x >= 0 <= y
        assert x + w <= width
        assert y + h <= height
        boxes.append((x, y, w, h))
    for each in picture.iter(f"{SVG}text"):
        if each.get("text-anchor") is None:
            size = len(each.text or "") * 13 * 0.6
            boxes.append((float(each.get("x", "0")), float(each.get("y", "0")) - 7, size, 14.0))
    for number, (x, y, w, h) in enumerate(boxes):
        for other_x, other_y, other_w, other_h in boxes[:number]:
            apart = x + w <= other_x or other_x + other_w <= x or y + h <= other_y or other_y + other_h <= y
            assert apart, (boxes[number], (other_x, other_y, other_w, other_h))


@given(any_graphs())
def test_calls_go_to_the_right_but_those_that_close_a_circle(graph: RoleGraph) -> None:
    plan = layout(graph)
    level = {point: number for number, layer in enumerate(plan.layers) for point in layer}
    for (source, target), chain in plan.chains.items():
        turned = (source, target) in plan.turned
        assert (chain[0], chain[-1]) == ((target, source) if turned else (source, target))
        assert [level[point] for point in chain] == [*range(level[chain[0]], level[chain[-1]] + 1)]
    # One that is waited for is turned only where there is a circle of such.
    waiting = tuple(edge for edge in graph.edges if not edge.asynchronous)
    if not layout(RoleGraph(graph.roles, waiting)).turned:
        assert not plan.turned & {(edge.source, edge.target) for edge in waiting}
    middle = heights(plan, dict.fromkeys(level, 10.0), 5.0)
    assert min(middle.values()) >= 5 - 1e-6
    for layer in plan.layers:
        places = [middle[point] for point in layer]
        assert all(b - a >= 15 - 1e-6 for a, b in pairwise(places))


def test_programs_have_boxes_of_their_own() -> None:
    graph = RoleGraph((Role("actor", 2), Role("engine", 2, "vllm")))
    assert texts(svg(graph)) == ["actor ×2", "engine ×2", "vllm"]
    corners = [each.get("rx") for each in ElementTree.fromstring(svg(graph)).iter(f"{SVG}rect")]
    assert corners[1:] == ["8", "0"]
    assert '[["engine ×2<br/>vllm"]]' in mermaid(graph)
    assert dot(graph).count("shape=component") == 1
    assert tree(graph, {"engine": "running"}).splitlines() == ["actor ×2", "engine ×2  vllm  running"]


def test_a_picture_of_nothing_is_a_picture() -> None:
    assert texts(svg(RoleGraph(()))) == []
    assert tree(RoleGraph(())) == ""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in SCENARIOS.items():
        for form, draw in FORMS.items():
            (FOLDER / f"{name}.{form}").write_text(draw(make()))


def test_the_tree_of_a_job_that_runs_has_the_addresses_of_its_programs() -> None:
    addresses = tuple(f"h:{port}" for port in range(1, 7))
    graph = RoleGraph((Role("engine", 6, "vllm", addresses), Role("train", 2)))
    first, second = tree(graph, {"engine": "running"}).splitlines()
    assert first == "engine ×6  vllm  running  h:1  h:2  h:3  h:4  and 2 more"
    assert second == "train ×2"
