"""A SIGKILL is the kernel's for lack of memory when its counts or its log say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unirun.failover.diagnosis import OOM_KILLED
from unirun.launcher.notes import PERHAPS, Kills, explain, kills_so_far

LOG = b"6,1,2,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 9\noom_kill 7\n")
    return tmp_path


def group(place: Path, text: str, counts: str, numbers: str) -> Kills:
    (place / "proc/self/cgroup").write_text(text)
    file = place / "mounts" / counts
    file.parent.mkdir(parents=True)
    file.write_text(numbers)
    return kills_so_far(place / "proc", place / "mounts")


def test_the_own_group_is_counted_with_version_2(place: Path) -> None:
    assert group(place, "0::/user/job\n", "user/job/memory.events", "oom 5\noom_kill 3\n") == Kills(3, 7)


def test_the_own_group_is_not_counted_with_version_1(place: Path) -> None:
    text = "4:cpu,memory:/job\n1:name=systemd:/\n0::/\n"
    assert group(place, text, "memory/job/memory.oom_control", "under_oom 0\noom_kill 2\n") == Kills(None, 7)


def test_a_kernel_that_does_not_count_the_own_group_counts_the_host(place: Path) -> None:
    assert group(place, "0::/\n", "elsewhere", "") == Kills(None, 7)


def test_the_counts_are_read_from_this_kernel() -> None:
    assert kills_so_far().host >= 0


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (Kills(0, 7), Kills(1, 8), OOM_KILLED),
        (Kills(0, 7), Kills(0, 7), ""),
        (Kills(None, 7), Kills(None, 7), ""),
        # A process of another control group, or a worker in one of its own.
        (Kills(0, 7), Kills(0, 8), PERHAPS),
        (Kills(None, 7), Kills(None, 8), PERHAPS),
    ],
)
def test_a_kill_is_explained_by_what_was_counted_meanwhile(
    tmp_path: Path, before: Kills, now: Kills, says: str
) -> None:
    assert explain(4242, before, now, tmp_path / "none") == says


@pytest.mark.parametrize("now", [Kills(0, 8), Kills(1, 8)])
def test_the_log_of_the_kernel_names_the_process_and_no_other(tmp_path: Path, now: Kills) -> None:
    (tmp_path / "log").write_bytes(LOG)
    assert explain(4242, Kills(0, 7), now, tmp_path / "log") == OOM_KILLED
    assert explain(42, Kills(0, 7), now, tmp_path / "log") == ""


def test_records_of_the_log_that_are_overwritten_while_it_is_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").touch()
    records: list[bytes | OSError] = [b"booted", BrokenPipeError(), LOG, BrokenPipeError(), BlockingIOError()]

    def read(handle: int, size: int) -> bytes:
        record = records.pop(0)
        if isinstance(record, OSError):
            raise record
        return record

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        said = explain(4242, Kills(0, 7), Kills(0, 8), tmp_path / "log")
    assert (said, records) == (OOM_KILLED, [])


def test_without_the_log_a_kill_in_another_group_is_only_perhaps_that_of_the_process() -> None:
    assert explain(4242, Kills(None, 7), Kills(None, 8), None) == PERHAPS
