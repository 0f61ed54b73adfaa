"""The rest of a finished job is measured to the byte, and removed only while no master leads the job."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import JobError, StoreError
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import clear_here, clear_in, create_job, size_here, size_in
from unirun.rendezvous.election import Term, campaign, index_key, job_prefix, leader_of
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, Lease, Outcome, Put
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.handshake import new_token

PREFIX = job_prefix("run-1")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """A finished job with logs, some of them elsewhere."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    job, lock = create_job("run-1", new_token(), str(tmp_path / "logs"))
    os.close(lock)
    for number in range(3):
        folder = job.worker_logs(WorkerId("actor", number, 0))
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_bytes(b"x" * 10_000 * number)
    return job


def du(*folders: Path) -> int:
    """Disk usage by ``du``."""
    command = ["du", "-scB1", *map(str, folders)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2])


class TestClearHere:
    @pytest.mark.starts_processes
    def test_the_size_of_a_job_directory_is_that_of_du(self, job: JobDir, tmp_path: Path) -> None:
        assert size_here(job) == du(job.path, tmp_path / "logs" / "run-1") > 30_000

    def test_clearing_a_job_directory_returns_its_size(self, job: JobDir, tmp_path: Path) -> None:
        size = size_here(job)
        assert clear_here(job) == size
        assert not job.path.exists()
        assert [*(tmp_path / "logs").iterdir()] == []

    def test_files_that_vanish_meanwhile_are_not_counted(
        self, job: JobDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone, lstat, size = job.token, os.lstat, size_here(job)

        def look(path: str) -> os.stat_result:
            if Path(path) == gone:
                raise FileNotFoundError(path)
            return lstat(path)

        blocks = lstat(gone).st_blocks * 512
        monkeypatch.setattr(os, "lstat", look)
        assert size_here(job) == size - blocks

    def test_a_job_directory_that_another_has_removed_has_size_0(self, job: JobDir) -> None:
        clear_here(job)
        assert size_here(job) == 0


@given(st.dictionaries(st.text("abé/0", max_size=5), st.text(max_size=20)), st.booleans())
def test_the_size_of_a_job_in_a_store_is_that_of_its_keys_and_values(
    values: dict[str, str], indexed: bool
) -> None:
    ours = {f"{PREFIX}{key}x": value for key, value in values.items()}
    if indexed:
        ours[index_key("run-1")] = "é"
    store = MemoryStore()
    # A job whose id begins like this one has nothing to do with it.
    store.txn([], [Put(f"{job_prefix('run-10')}x", "other"), Put(index_key("run-10"), "other")])
    store.txn([], [Put(key, value) for key, value in ours.items()])
    size = sum(len(key) + len(value.encode()) for key, value in ours.items())
    assert size_in(store, "run-1") == size
    assert clear_in(store, "run-1", ended=True) == size
    assert {item.key for item in store.get_prefix("").items if "epoch" not in item.key} == {
        f"{job_prefix('run-10')}x",
        index_key("run-10"),
    }


def lead(store: MemoryStore) -> Term:
    term = campaign(store, PREFIX, UnixAddress("/x", "far"), 7, ttl=60)
    assert term is not None
    return term


class Interrupted(MemoryStore):
    """Calls hooks just before the first lease is granted, or before the first transaction after that."""

    def __init__(self) -> None:
        super().__init__()
        self.txn([], [Put(f"{PREFIX}head", "{}")])
        self.before_grant: list[Callable[[], object]] = []
        self.before_removal: list[Callable[[], object]] = []

    def grant(self, ttl: float) -> Lease:
        while self.before_grant:
            self.before_grant.pop()()
        return super().grant(ttl)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        while deletes and self.before_removal:
            self.before_removal.pop()()
        return super().txn(compares, puts, deletes)


class TestClearInStore:
    @pytest.fixture
    def store(self) -> Interrupted:
        return Interrupted()

    @pytest.fixture(autouse=True)
    def nobody_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wait = time.sleep

        def sleep(seconds: float) -> None:
            # Threads that other tests have left may wait.
            if threading.current_thread() is not threading.main_thread():
                return wait(seconds)
            raise AssertionError(f"waited {seconds} s for a master that cannot come, or is there")

        monkeypatch.setattr(time, "sleep", sleep)

    def test_clearing_a_job_without_keys_returns_0_at_once(self) -> None:
        assert clear_in(MemoryStore(), "run-1", ended=False) == 0

    def test_clearing_an_ended_job_does_not_wait_for_a_master(self, store: Interrupted) -> None:
        assert clear_in(store, "run-1", ended=True) > 0
        assert store.get_prefix("").items == ()

    def test_clearing_a_job_with_a_master_is_refused_at_once(self, store: Interrupted) -> None:
        lead(store)
        with pytest.raises(JobError, match=r"job run-1 is led on host far; stop it there"):
            clear_in(store, "run-1", ended=False)

    def test_clearing_that_loses_the_election_names_the_leader(self, store: Interrupted) -> None:
        store.before_grant.append(lambda: lead(store))
        with pytest.raises(JobError, match=r"job run-1 is led on host far; stop it there"):
            clear_in(store, "run-1", ended=True)
        assert store.get(f"{PREFIX}head") is not None

    def test_clearing_that_loses_to_a_vanished_leader_names_no_host(self, store: Interrupted) -> None:
        store.before_grant.append(lambda: lead(store).resign())
        with pytest.raises(JobError, match=r"job run-1 is led; stop it there"):
            clear_in(store, "run-1", ended=True)
        assert store.get(f"{PREFIX}head") is not None

    def test_clearing_that_is_deposed_deletes_nothing(self, store: Interrupted) -> None:
        store.before_removal.append(
            lambda: campaign(store, PREFIX, UnixAddress("/x", "far"), 7, ttl=60, deposing=1)
        )
        with pytest.raises(StoreError, match="another took job run-1 while it was being removed"):
            clear_in(store, "run-1", ended=True)
        assert store.get(f"{PREFIX}head") is not None
        leader = leader_of(store, PREFIX)
        assert leader is not None
        assert leader.address.host == "far"


def test_clearing_watches_for_the_next_master_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert clear_in(Interrupted(), "run-1", ended=False) > 0
    assert len(slept) == 14, "its time is 15 s, and each look takes one"
    assert max(slept) < 0.5
