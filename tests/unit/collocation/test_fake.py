"""Nodes that are not there, by what is written of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.collocation import is_fake, parse_fake
from unirun.errors import SpecError


def test_the_nodes_are_alike_and_have_names_in_their_order() -> None:
    nodes = parse_fake("fake:nodes=12,devices=8,numa=2,cpus=64,memory=512GB").nodes
    assert [node.name for node in nodes] == [f"node{number:02}" for number in range(12)]
    assert {len(node.devices) for node in nodes} == {8}
    assert {node.memory for node in nodes} == {512 * 10**9}


def test_devices_and_processors_are_spread_over_the_numa_nodes() -> None:
    (node,) = parse_fake("fake:devices=5,numa=2,cpus=8").nodes
    assert [device.numa for device in node.devices] == [0, 0, 0, 1, 1]
    assert [cpus for _, cpus in node.numa] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert node.devices[3].links == (("0", "system"), ("1", "system"), ("2", "system"), ("4", "nvlink"))


def test_nvlink_joins_as_many_as_are_asked_for() -> None:
    def links(text: str) -> list[str]:
        (node,) = parse_fake(f"fake:devices=4,numa=2,{text}").nodes
        return [near for _, near in node.devices[1].links]

    assert links("nvlink=1") == ["numa", "system", "system"]
    assert links("nvlink=2") == ["nvlink", "system", "system"]
    assert links("nvlink=3") == ["nvlink", "nvlink", "system"], "across NUMA nodes too"
    assert links("nvlink=8") == ["nvlink"] * 3


def test_a_node_with_one_numa_node_has_none_to_tell_of() -> None:
    assert parse_fake("fake:").nodes[0].numa == ()


def test_the_type_and_the_name_are_as_written() -> None:
    (node,) = parse_fake("fake:devices=1,type=xpu,name=h").nodes
    assert (node.name, node.devices[0].type) == ("h0", "xpu")


def test_a_text_that_asks_for_such_nodes_begins_with_fake() -> None:
    assert is_fake("fake:nodes=1")
    assert not is_fake("nodes.yaml")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("fake:nodes=0", ["fake:nodes: expected a whole number from 1 to 100000, found '0'"]),
        ("fake:nvlink=0", ["fake:nvlink: expected a whole number from 1 to 1024, found '0'"]),
        ("fake:node=4", ["fake:node: unknown key"]),
        ("fake:nodes", ["fake:nodes: it has no value"]),
        ("fake:nodes=", ["fake:nodes: it has no value"]),
        ("fake:nodes=1,nodes=2", ["fake:nodes: it is there twice: 1 and 2"]),
        ("fake:nodes=1,,numa=1", ["fake:: there is nothing between two commas"]),
        ("fake:memory=much", ["fake:memory: 'much' is no number of bytes"]),
        ("fake:type=cpu", ["fake:type: 'cpu' is no type of devices"]),
        ("fake:name=1", ["fake:name: '1' is no name of nodes"]),
        ("fake:numa=4,cpus=2", ["fake:numa: 4 NUMA nodes of 2 processors"]),
        ("fake:nodes=x,devices=-1,hue=3", ["fake:hue", "fake:nodes", "fake:devices"]),
    ],
)
def test_every_fault_is_named(text: str, faults: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_fake(text)
    found = [str(fault) for fault in caught.value.faults]
    assert [fault.startswith(each) for fault, each in zip(found, faults, strict=True)] == [True] * len(faults)


KEY = st.sampled_from(["nodes", "devices", "nvlink", "numa", "cpus", "memory", "type", "name", "", "x"])
PART = st.tuples(KEY, st.sampled_from(["=", "==", ""]), st.integers(-1, 20).map(str) | st.text(max_size=6))


@given(st.text(max_size=40) | st.lists(PART.map("".join), max_size=6).map(",".join))
def test_whatever_is_written_gives_nodes_or_faults(text: str) -> None:
    try:
        inventory = parse_fake(f"fake:{text}")
    except SpecError as error:
        assert all(fault.where.startswith("fake:") for fault in error.faults)
    else:
        assert inventory.nodes


@given(st.integers(1, 50), st.integers(0, 16), st.integers(1, 8), st.integers(8, 64))
def test_what_is_asked_for_is_there(nodes: int, devices: int, numa: int, cpus: int) -> None:
    found = parse_fake(f"fake:nodes={nodes},devices={devices},numa={numa},cpus={cpus}").nodes
    assert len(found) == nodes
    assert len({node.name for node in found}) == nodes
    assert list(found) == sorted(found, key=lambda node: node.name)
    for node in found:
        assert [device.index for device in node.devices] == [str(number) for number in range(devices)]
        assert not node.numa or sorted(cpu for _, cpus in node.numa for cpu in cpus) == list(node.cpus)
        assert all(len(device.links) == devices - 1 for device in node.devices)
