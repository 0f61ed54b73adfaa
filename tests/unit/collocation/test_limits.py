"""Limits of control groups, on trees as kernels and containers lay them out, and those of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.collocation.limits import Limits, cgroup_limits, least, slurm_devices, slurm_limits

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
34 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
35 31 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids"""


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    everything = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts} | {
        f"sys/fs/cgroup/{name}": text for name, text in files.items()
    }
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_limits_of_a_group_of_cgroup_version_2(tmp_path: Path) -> None:
    files = {
        "job/cpu.max": "250000 100000",
        "job/cpuset.cpus.effective": "0-3,8",
        "job/memory.max": "1073741824",
    }
    limits = cgroup_limits(tree(tmp_path, "0::/job", V2_MOUNT, files))
    assert limits == Limits(frozenset({0, 1, 2, 3, 8}), 2, 1 << 30)


def test_a_group_above_may_have_the_narrower_limit(tmp_path: Path) -> None:
    files = {
        "user.slice/cpu.max": "100000 100000",
        "user.slice/memory.max": "max",
        "user.slice/job/cpu.max": "max 100000",
        "user.slice/job/memory.max": "4096",
        "memory.max": "8192",
    }
    limits = cgroup_limits(tree(tmp_path, "0::/user.slice/job", V2_MOUNT, files))
    assert limits == Limits(None, 1, 4096)


@pytest.mark.parametrize(("quota", "cpus"), [("50000 100000", 1), ("1000 100000", 1), ("399999 100000", 3)])
def test_a_quota_is_a_whole_number_of_processors_and_at_least_one(
    tmp_path: Path, quota: str, cpus: int
) -> None:
    assert cgroup_limits(tree(tmp_path, "0::/", V2_MOUNT, {"cpu.max": quota})).cpu_count == cpus


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
        "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "cpuset/b/cpuset.effective_cpus": "2,4-5",
        "memory/c/d/memory.limit_in_bytes": "9223372036854771712",
        "memory/c/memory.limit_in_bytes": "2147483648",
    }
    groups = "5:pids:/a\n4:memory:/c/d\n3:cpuset:/b\n2:cpu,cpuacct:/a\n1:name=systemd:/a\n0::/a"
    limits = cgroup_limits(tree(tmp_path, groups, V1_MOUNTS, files))
    assert limits == Limits(frozenset({2, 4, 5}), 3, 2 << 30)


@pytest.mark.parametrize(
    ("mounts", "groups", "folder"), [(V2_MOUNT, "0::/", ""), (V1_MOUNTS, "5:pids:/", "pids/")]
)
@pytest.mark.parametrize(("text", "pids"), [("max", None), ("4096", 4096)])
def test_processes_are_limited_in_both_versions(
    tmp_path: Path, mounts: str, groups: str, folder: str, text: str, pids: int | None
) -> None:
    assert cgroup_limits(tree(tmp_path, groups, mounts, {f"{folder}pids.max": text})).pids == pids


def test_a_group_of_cgroup_version_1_without_limits(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpuset/cpuset.effective_cpus": "",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    groups = "4:memory:/\n3:cpuset:/\n2:cpu,cpuacct:/"
    assert cgroup_limits(tree(tmp_path, groups, V1_MOUNTS, files)) == Limits()


def test_a_container_that_sees_the_hosts_path_has_its_group_at_the_mount(tmp_path: Path) -> None:
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw"
    files = {"memory.max": "4096", "inner/memory.max": "1024"}
    assert cgroup_limits(tree(tmp_path, "0::/docker/abc", mount, files)).memory == 4096
    (tmp_path / "proc/self/cgroup").write_text("0::/docker/abc/inner\n")
    assert cgroup_limits(tmp_path).memory == 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/elsewhere\n")
    assert cgroup_limits(tmp_path).memory == 4096
    (tmp_path / "proc/self/cgroup").write_text("0::/../../outside\n")
    assert cgroup_limits(tmp_path).memory == 4096


def test_a_mount_point_may_have_a_space(tmp_path: Path) -> None:
    mount = r"30 23 0:26 / /sys/fs/cgroup/a\040b rw - cgroup2 cgroup2 rw"
    assert cgroup_limits(tree(tmp_path, "0::/", mount, {"a b/memory.max": "4096"})).memory == 4096


def test_a_host_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == Limits()
    assert cgroup_limits(tree(tmp_path, "", "not a mount\n1 2 - x", {})) == Limits()


def test_the_limits_of_this_process_can_be_read() -> None:
    limits = cgroup_limits()
    assert limits.cpu_count is None or limits.cpu_count >= 1
    assert limits.memory is None or limits.memory > 1 << 20


TEXT = st.text(max_size=12) | st.sampled_from(
    ["max", "-1", "0", "max 100000", "0-", "1-2-3", "99999999999999"]
)


@given(st.lists(TEXT, min_size=6, max_size=6))
def test_any_content_of_the_files_gives_limits(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzzed"
    names = ("cpu.max", "cpuset.cpus.effective", "memory.max")
    tree(root, "0::/", V2_MOUNT, dict(zip(names, texts, strict=False)))
    cgroup_limits(root)
    (root / "proc/self/cgroup").write_text(texts[3])
    (root / "proc/self/mountinfo").write_text(f"{texts[4]} - {texts[5]}")
    cgroup_limits(root)


LIMITS = st.builds(
    Limits,
    st.none() | st.frozensets(st.integers(0, 9)),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 99),
)


@given(LIMITS, LIMITS, LIMITS)
def test_of_several_limits_the_least_counts_in_any_order(a: Limits, b: Limits, c: Limits) -> None:
    assert least(a, b, c) == least(c, least(b, a))
    assert least(a, Limits()) == a


@pytest.mark.parametrize(
    ("environ", "limits"),
    [
        ({}, Limits()),
        ({"SLURM_CPUS_ON_NODE": "8"}, Limits(cpu_count=8)),
        ({"SLURM_MEM_PER_NODE": "1024"}, Limits(memory=1 << 30)),
        ({"SLURM_MEM_PER_NODE": "0"}, Limits()),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}, Limits(cpu_count=4, memory=2 << 30)),
        ({"SLURM_MEM_PER_CPU": "512"}, Limits()),
        ({"SLURM_CPUS_ON_NODE": "many", "SLURM_MEM_PER_NODE": "-3"}, Limits()),
    ],
    ids=str,
)
def test_limits_of_a_slurm_job_step(environ: dict[str, str], limits: Limits) -> None:
    assert slurm_limits(environ) == limits


@pytest.mark.parametrize(
    ("environ", "seen", "mask"),
    [
        ({}, 8, None),
        ({"SLURM_JOB_GPUS": "4,5"}, 8, "4,5"),
        ({"SLURM_JOB_GPUS": "0-3,6"}, 8, "0,1,2,3,6"),
        ({"SLURM_JOB_GPUS": "4,5", "SLURM_STEP_GPUS": "5"}, 8, "5"),
        ({"SLURM_JOB_GPUS": "4,5"}, 2, None),
        ({"SLURM_JOB_GPUS": "(null)"}, 8, None),
    ],
    ids=str,
)
def test_slurms_devices_are_a_mask_unless_a_cgroup_hides_the_others(
    environ: dict[str, str], seen: int, mask: str | None
) -> None:
    assert slurm_devices(environ, seen) == mask
