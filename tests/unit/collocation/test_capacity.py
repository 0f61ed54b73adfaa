"""More ranks on one host than it can have processes for are refused before anything starts; what may work is not."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from unirun.collocation.limits import (
    DESCRIPTORS,
    PROGRAM_MEMORY,
    WORKER_MEMORY,
    Ceilings,
    host_ceilings,
    refuse_impossible,
)
from unirun.errors import EXIT_PLACEMENT, PlacementError
from unirun.spec.job import Entry, EntryKind, JobSpec, RoleSpec


def refused(
    ceilings: Ceilings, kind: EntryKind = "script", nodes: int = 1, **counts: int
) -> PlacementError | None:
    roles = tuple(RoleSpec(name, count, Entry(kind, "a.py")) for name, count in counts.items())
    spec = JobSpec("job", "job-1", roles, tuple(counts))
    ranks = [(name, f"n{rank % nodes}") for name, count in counts.items() for rank in range(count)]
    try:
        refuse_impossible(spec, ranks, ceilings)
    except PlacementError as error:
        return error
    return None


class TestProcesses:
    PIDS = Ceilings(processes=((32768, "kernel.pid_max", "sysctl -w kernel.pid_max=4194304"),))

    def test_too_many_processes_are_refused_with_the_limit_and_how_to_raise_it(self) -> None:
        error = refused(self.PIDS, actor=99_999, critic=1)
        assert error is not None
        assert str(error) == (
            "100000 ranks need 100008 processes on this host, and kernel.pid_max allows 32768;"
            " ask for fewer, or raise it: sysctl -w kernel.pid_max=4194304"
        )
        assert (error.role, error.needed, error.exit_code) == ("actor", 100_000, EXIT_PLACEMENT)
        assert refused(self.PIDS, actor=error.available - 1, critic=1) is None, "so many are possible"
        assert refused(self.PIDS, actor=error.available, critic=1) is not None

    def test_processes_of_others_are_not_counted(self) -> None:
        assert refused(self.PIDS, actor=32_000) is None

    def test_processes_of_simulated_nodes_are_counted_together(self) -> None:
        assert refused(self.PIDS, nodes=16, actor=40_000) is not None

    def test_processes_without_a_limit_are_accepted(self) -> None:
        assert refused(Ceilings(), actor=99_999) is None


class TestDescriptors:
    def test_descriptors_are_those_of_the_fullest_node(self) -> None:
        ceilings = Ceilings(descriptors=4096)
        assert refused(ceilings, actor=4096 - DESCRIPTORS) is None
        error = refused(ceilings, actor=4096)
        assert error is not None
        assert "4096 ranks of one node need 4160 descriptors" in str(error)
        assert refused(ceilings, nodes=2, actor=4096) is None
        assert refused(ceilings, nodes=2, actor=2 * (4096 - DESCRIPTORS)) is None
        assert refused(ceilings, nodes=2, actor=2 * (4096 - DESCRIPTORS) + 1) is not None


class TestMemory:
    def test_memory_is_the_least_that_a_rank_needs(self) -> None:
        ceilings = Ceilings(memory=1000 * WORKER_MEMORY)
        assert refused(ceilings, actor=1000) is None
        error = refused(ceilings, actor=1001)
        assert error is not None
        assert "1001 ranks need at least 4004 MiB, and this host allows 4000 MiB" in str(error)
        assert error.available == 1000

    def test_memory_of_programs_is_less(self) -> None:
        assert refused(Ceilings(memory=5000 * PROGRAM_MEMORY), "program", actor=5000) is None


class TestThisHost:
    def test_this_host_accepts_usual_jobs(self) -> None:
        assert refused(host_ceilings(), actor=64, rollout=64) is None

    def test_ceilings_are_read_from_the_kernel(self, tmp_path: Path) -> None:
        files = {"proc/sys/kernel/pid_max": "32768\n", "proc/sys/kernel/threads-max": "1000\n"}
        files["proc/meminfo"] = (
            "MemTotal:        1024 kB\nHugePages_Total:       0\nSwapTotal:       512 kB\n"
        )
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        found = host_ceilings(tmp_path)
        limits = {name: most for most, name, _ in found.processes if name.startswith("kernel")}
        assert limits == {"kernel.pid_max": 32768, "kernel.threads-max": 1000}
        assert found.memory == 1536 << 10

    def test_a_host_without_these_files_has_no_ceilings(self, tmp_path: Path) -> None:
        found = host_ceilings(tmp_path)
        assert not [name for _, name, _ in found.processes if name != "ulimit -u"]
        assert found.memory is None

    def test_the_ulimit_of_processes_does_not_apply_to_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = {resource.RLIMIT_NPROC: (500, 900), resource.RLIMIT_NOFILE: (1024, 4096)}
        monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        names = {name: most for most, name, _ in host_ceilings().processes}
        assert names["ulimit -u"] == 500
        assert host_ceilings().descriptors == 4096, "the agent raises its own limit so far"
        monkeypatch.setattr("os.geteuid", lambda: 0)
        assert "ulimit -u" not in {name for _, name, _ in host_ceilings().processes}
