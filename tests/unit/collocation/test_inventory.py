"""The devices of a host, and those that a mask leaves."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.collocation import Device, Inventory, Node, accelerators, count_slots, local_inventory
from unirun.collocation.inventory import MIG, visible

DEVICES = tuple(Device(str(index), "H", f"0000:0{index}:00.0") for index in range(4))


def left(mask: str | None) -> list[str]:
    return [device.index for device in visible(DEVICES, mask)]


@pytest.mark.parametrize(
    ("mask", "indices"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("1,-1,2", ["1"]),
        ("1,9,2", ["1"]),
        ("NoDevFiles", []),
        ("GPU-abc,GPU-def", ["GPU-abc", "GPU-def"]),
        ("MIG-1", ["MIG-1"]),
    ],
)
def test_a_mask_is_read_as_cuda_reads_it(mask: str | None, indices: list[str]) -> None:
    assert left(mask) == indices


@given(st.permutations(["0", "1", "2", "3"]), st.integers(0, 4))
def test_a_mask_gives_its_devices_in_its_order(order: list[str], count: int) -> None:
    assert left(",".join(order[:count])) == order[:count]
    assert all(device in DEVICES for device in visible(DEVICES, ",".join(order)))


LINKED = (
    Device("0", "H", uuid="GPU-aa11", memory=80, links=(("1", "nvlink"), ("2", "system"))),
    Device("1", "H", uuid="GPU-aa22", memory=80, links=(("0", "nvlink"), ("2", "system"))),
    Device("2", "H", uuid="GPU-bb33", memory=80, links=(("0", "system"), ("1", "system"))),
    Device("MIG-cc", "H 1g.10gb", uuid="MIG-cc", type=MIG),
)


def test_links_are_told_between_the_devices_that_are_left() -> None:
    assert [device.links for device in visible(LINKED, "2,1")] == [(("1", "system"),), (("2", "system"),)]


def test_a_mask_by_uuid_stays_as_it_is_and_its_devices_are_known() -> None:
    first, second = visible(LINKED, "GPU-b,GPU-aa11")
    assert (first.index, first.uuid, first.memory) == ("GPU-b", "GPU-bb33", 80)
    assert second.links == (("GPU-b", "system"),)


def test_the_beginning_of_two_uuids_names_neither() -> None:
    assert visible(LINKED, "GPU-aa") == (Device("GPU-aa", "NVIDIA", uuid="GPU-aa"),)


def test_a_part_of_a_gpu_is_given_to_roles_only_when_a_mask_names_it() -> None:
    assert [device.index for device in accelerators(Node("host", (0,), LINKED))] == ["0", "1", "2"]
    masked = Node("host", (0,), visible(LINKED, "MIG-cc"))
    assert [device.index for device in accelerators(masked)] == ["MIG-cc"]
    assert count_slots("gpu", Inventory((Node("host", (0,), LINKED),))) == 3


def inventory(devices: int) -> Inventory:
    return Inventory((Node("host", (0, 2, 4), DEVICES[:devices]),))


@pytest.mark.parametrize(
    ("kind", "devices", "count"),
    [("cpu", 0, 3), ("cpu", 4, 3), ("auto", 0, 3), ("auto", 4, 4), ("gpu", 2, 2)],
)
def test_slots_are_counted(kind: str, devices: int, count: int) -> None:
    assert count_slots(kind, inventory(devices)) == count


@pytest.mark.parametrize(
    ("kind", "says"), [("gpu", "node host has no GPU"), ("xpu", "no way to count 'xpu'")]
)
def test_what_is_not_there_cannot_be_counted(kind: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        count_slots(kind, inventory(0))


def test_this_host_has_the_processors_that_this_process_may_use() -> None:
    (node,) = local_inventory({"CUDA_VISIBLE_DEVICES": ""}).nodes
    assert set(node.cpus) <= os.sched_getaffinity(0)
    assert node.memory > 1 << 20
    assert node.devices == ()
