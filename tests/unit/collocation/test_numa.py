"""Processors near a device, on the topologies that torch's own documentation of the modes describes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.collocation import parse_fake
from unirun.collocation.host import Cpu, Topology, near_cpus, read_topology, told_topology
from unirun.collocation.limits import parse_cpu_list
from unirun.errors import PlacementError


def two_sockets() -> Topology:
    """2 sockets of 2 NUMA nodes each, 4 cores of 2 threads a node, an L3 for every 2 cores; 2 devices a node."""
    cpus = []
    for cpu in range(32):
        core = cpu % 16
        numa = core // 4
        cache = tuple(c + t * 16 for t in range(2) for c in range(core // 2 * 2, core // 2 * 2 + 2))
        cpus.append(Cpu(cpu, numa, numa // 2, (core, core + 16), tuple(sorted(cache))))
    return Topology(tuple(cpus), {str(device): device // 2 for device in range(8)})


def test_node_binds_to_every_processor_of_the_devices_numa_node() -> None:
    assert near_cpus("node", "3", two_sockets()) == (4, 5, 6, 7, 20, 21, 22, 23)


def test_socket_binds_to_every_node_of_the_devices_socket() -> None:
    assert near_cpus("socket", "3", two_sockets()) == (*range(8), *range(16, 24))


def test_exclusive_divides_whole_cores_among_the_devices_of_a_node() -> None:
    assert near_cpus("exclusive", "2", two_sockets()) == (4, 5, 20, 21)
    assert near_cpus("exclusive", "3", two_sockets()) == (6, 7, 22, 23)


def test_exclusive_gives_the_lowest_devices_the_cores_that_are_left_over() -> None:
    cpus = tuple(Cpu(cpu, 0, 0, (cpu,), (cpu,)) for cpu in range(5))
    topology = Topology(cpus, {"0": 0, "1": 0})
    assert near_cpus("exclusive", "0", topology) == (0, 1, 2)
    assert near_cpus("exclusive", "1", topology) == (3, 4)


def test_core_complex_gives_each_device_of_a_node_another_cache() -> None:
    assert near_cpus("core-complex", "2", two_sockets()) == (4, 5, 20, 21)
    assert near_cpus("core-complex", "3", two_sockets()) == (6, 7, 22, 23)


def test_a_node_with_more_devices_than_cores_is_refused() -> None:
    topology = Topology((Cpu(0, 0, 0, (0,), (0,)),), {"0": 0, "1": 0})
    with pytest.raises(PlacementError, match="no processor of NUMA node 0 is left for device 1"):
        near_cpus("exclusive", "1", topology)


def test_a_kernel_without_numa_counts_as_one_node() -> None:
    topology = Topology((Cpu(0, 0, 0, (0,), (0,)), Cpu(1, 0, 0, (1,), (1,))), {"0": -1})
    assert near_cpus("node", "0", topology) == (0, 1)


@given(
    st.integers(1, 64), st.integers(1, 16), st.sampled_from(["node", "socket", "exclusive", "core-complex"])
)
def test_a_worker_is_bound_to_processors_that_it_may_use(cores: int, devices: int, mode: str) -> None:
    cpus = tuple(Cpu(c, 0, 0, (c, c + 1000), (c // 4,)) for c in range(cores))
    topology = Topology(cpus, {str(device): 0 for device in range(devices)})
    bound = []
    for device in range(devices):
        try:
            bound.append(near_cpus(mode, str(device), topology))
        except PlacementError:
            assert mode in ("exclusive", "core-complex")
            continue
    assert all(set(cpus) <= set(range(cores)) for cpus in bound)
    if mode == "exclusive":
        assert len({cpu for cpus in bound for cpu in cpus}) == sum(map(len, bound))


def test_the_topology_is_read_from_sysfs(tmp_path: Path) -> None:
    files = {
        "devices/system/node/node0/cpulist": "0",
        "devices/system/node/node1/cpulist": "1",
        "devices/system/cpu/cpu1/topology/physical_package_id": "1",
        "devices/system/cpu/cpu1/topology/thread_siblings_list": "1,3",
        "devices/system/cpu/cpu1/cache/index3/shared_cpu_list": "1-3",
        "bus/pci/devices/0000:41:00.0/numa_node": "1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    topology = read_topology((0, 1), {"0": "0000:41:00.0", "1": "0000:42:00.0"}, tmp_path)
    assert topology.cpus == (Cpu(0, 0, 0, (0,), (0,)), Cpu(1, 1, 1, (1, 3), (1, 2, 3)))
    assert topology.device_numa == {"0": 1, "1": -1}


def test_lists_of_processors_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpu_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert parse_cpu_list("") == ()


def test_nodes_that_are_alike_have_one_topology() -> None:
    """So ten thousand of them are read once."""
    one, other = parse_fake("fake:nodes=2,devices=2,cpus=4,numa=2").nodes
    (third,) = parse_fake("fake:devices=2,cpus=4").nodes
    assert told_topology(one) is told_topology(other)
    assert told_topology(one).cpus == tuple(
        Cpu(cpu, cpu // 2, cpu // 2, (cpu,), (cpu // 2 * 2, cpu // 2 * 2 + 1)) for cpu in range(4)
    )
    assert told_topology(one).device_numa == {"0": 0, "1": 1}
    assert told_topology(third).device_numa == {"0": 0, "1": 0}
