"""The inventory of a host, over trees that stand in for its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unirun.collocation import Device, Node, local_topology
from unirun.collocation.devices import DeviceType
from unirun.collocation.host import local_devices, read_node, thin

FILES = {
    "proc/meminfo": "MemTotal:       1048576 kB\nMemFree:   1 kB",
    "sys/devices/system/node/node0/cpulist": "0-3",
    "sys/devices/system/node/node1/cpulist": "4-7",
    "sys/devices/system/node/node2/cpulist": "",
    "sys/bus/pci/devices/0000:01:00.0/numa_node": "1",
    "sys/bus/pci/devices/0000:02:00.0/numa_node": "2",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "8",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
    "proc/self/cgroup": "0::/",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
}
CPUS = set(range(8))


def node(
    root: Path,
    environ: dict[str, str],
    devices: tuple[Device, ...] = (),
    affinity: set[int] = CPUS,
    **files: str,
) -> Node:
    named = {f"sys/fs/cgroup/{name.replace('__', '.')}": text for name, text in files.items()}
    for name, text in (FILES | named).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return read_node("host", affinity, devices, environ, root)


def test_a_host_has_its_processors_its_memory_and_its_numa_nodes(tmp_path: Path) -> None:
    assert node(tmp_path, {}) == Node(
        "host",
        tuple(range(8)),
        memory=(1 << 30) - (16 << 20),
        numa=((0, (0, 1, 2, 3)), (1, (4, 5, 6, 7))),
    )


def test_a_device_is_near_the_numa_node_that_sysfs_says_unless_its_driver_has_said(tmp_path: Path) -> None:
    devices = (
        Device("0", "H", "0000:01:00.0"),
        Device("1", "H", "0000:01:00.0", numa=0),
        Device("2", "H", "0000:09:00.0"),
        Device("3", "H"),
    )
    assert [device.numa for device in node(tmp_path, {}, devices).devices] == [1, 0, -1, -1]


def test_a_numa_node_without_processors_counts_when_a_device_is_near_it(tmp_path: Path) -> None:
    found = node(tmp_path, {}, (Device("0", "H", "0000:02:00.0"),))
    assert [number for number, _ in found.numa] == [0, 1, 2]
    assert found.numa[2] == (2, ())


def test_the_topology_has_the_numa_nodes_that_drivers_tell() -> None:
    devices = (Device("0", "H", numa=0), Device("1", "H", "ffff:ff:1f.7"))
    assert local_topology(Node("host", (0,), devices)).device_numa == {"0": 0, "1": -1}


def test_processors_that_may_not_be_used_are_not_there(tmp_path: Path) -> None:
    found = node(tmp_path, {}, affinity={1, 2, 5, 6}, cpuset__cpus__effective="0-1,5-7")
    assert found.cpus == (1, 5, 6)
    assert [cpus for _, cpus in found.numa] == [(1,), (5, 6)]


def test_a_set_that_has_nothing_to_do_with_the_affinity_is_ignored(tmp_path: Path) -> None:
    assert node(tmp_path, {}, affinity={1, 2}, cpuset__cpus__effective="5").cpus == (1, 2)


@pytest.mark.parametrize(
    ("slurm", "quota", "cpus"),
    [
        ("4", "max 100000", (0, 1, 4, 5)),
        ("6", "200000 100000", (0, 4)),
        ("64", "max 100000", tuple(range(8))),
    ],
)
def test_of_slurms_number_and_the_quota_the_least_counts(
    tmp_path: Path, slurm: str, quota: str, cpus: tuple[int, ...]
) -> None:
    found = node(tmp_path, {"SLURM_CPUS_ON_NODE": slurm}, cpu__max=quota)
    assert found.cpus == cpus


@pytest.mark.parametrize(
    ("slurm", "cgroup", "memory"),
    [
        ("256", "max", 256 << 20),
        ("256", str(128 << 20), 128 << 20),
        ("999999", "max", (1 << 30) - (16 << 20)),
    ],
)
def test_of_several_limits_of_memory_the_least_counts(
    tmp_path: Path, slurm: str, cgroup: str, memory: int
) -> None:
    assert node(tmp_path, {"SLURM_MEM_PER_NODE": slurm}, memory__max=cgroup).memory == memory


def test_a_host_that_says_nothing_has_its_processors(tmp_path: Path) -> None:
    assert read_node("host", {0, 1}, (), {}, tmp_path) == Node("host", (0, 1))


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 64), st.integers(1, 8))
@example({0, 1, 2, 3, 4, 5, 11, 25, 53}, 7, 7)
def test_a_number_of_processors_is_taken_from_all_numa_nodes_evenly(
    usable: set[int], count: int, parts: int
) -> None:
    nodes = [range(64)[part::parts] for part in range(parts)]
    left = thin(sorted(usable), count, nodes)
    assert len(left) == min(count, len(usable))
    assert set(left) <= usable
    assert list(left) == sorted(left)
    for each in nodes:
        share = len(usable.intersection(each)) / len(usable) * len(left)
        assert abs(len(set(left).intersection(each)) - share) < 1


def eight(kind: str = "cuda") -> tuple[Device, ...]:
    return tuple(Device(str(number), "H", type=kind, uuid=f"GPU-{number}") for number in range(8))


@pytest.mark.parametrize(
    ("environ", "indices"),
    [
        ({}, [*"01234567"]),
        ({"SLURM_JOB_GPUS": "6,7"}, ["6", "7"]),
        ({"SLURM_JOB_GPUS": "6,7", "CUDA_VISIBLE_DEVICES": "2"}, ["2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
    ids=str,
)
def test_a_mask_goes_before_what_slurm_says(environ: dict[str, str], indices: list[str]) -> None:
    types = [DeviceType("cuda", eight, "CUDA_VISIBLE_DEVICES")]
    assert [device.index for device in local_devices(environ, types)] == indices
