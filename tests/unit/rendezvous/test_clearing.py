"""What is left of a job is measured to the byte, and removed only by who is sure that nobody leads it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import JobError, StoreError
from unirun.rendezvous import JobDir, clearing, create_job
from unirun.rendezvous.clearing import clear_here, clear_in, size_here, size_in
from unirun.rendezvous.election import Term, campaign, leader_of
from unirun.rendezvous.keys import index_key, job_prefix
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, Lease, Outcome, Put
from unirun.values import WorkerId
from unirun.wire import new_token
from unirun.wire.address import UnixAddress

PREFIX = job_prefix("run-1")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """One that is over and has left logs, some of them elsewhere."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    job, lock = create_job("run-1", new_token(), str(tmp_path / "logs"))
    os.close(lock)
    for number in range(3):
        folder = job.worker_logs(WorkerId("actor", number, 0))
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_bytes(b"x" * 10_000 * number)
    return job


def du(*folders: Path) -> int:
    """What the tool says that they take."""
    command = ["du", "-scB1", *map(str, folders)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2])


class TestHere:
    @pytest.mark.starts_processes
    def test_the_size_is_what_du_says(self, job: JobDir, tmp_path: Path) -> None:
        assert size_here(job) == du(job.path, tmp_path / "logs" / "run-1") > 30_000

    def test_all_of_it_is_told_to_be_free(self, job: JobDir, tmp_path: Path) -> None:
        size = size_here(job)
        assert clear_here(job) == size
        assert not job.path.exists()
        assert [*(tmp_path / "logs").iterdir()] == []

    def test_what_goes_away_meanwhile_is_not_counted(
        self, job: JobDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone, lstat, size = job.token, os.lstat, size_here(job)

        def look(path: str) -> os.stat_result:
            if Path(path) == gone:
                raise FileNotFoundError(path)
            return lstat(path)

        blocks = lstat(gone).st_blocks * 512
        monkeypatch.setattr(clearing.os, "lstat", look)
        assert size_here(job) == size - blocks

    def test_what_another_has_removed_takes_nothing(self, job: JobDir) -> None:
        clear_here(job)
        assert size_here(job) == 0


@given(st.dictionaries(st.text("abé/0", max_size=5), st.text(max_size=20)), st.booleans())
def test_the_size_in_a_store_is_that_of_all_keys_and_values(values: dict[str, str], indexed: bool) -> None:
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
    """Something happens just before the first lease is granted, or before the first transaction after that."""

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
        self, compares: tuple[Compare, ...], puts: tuple[Put, ...] = (), deletes: tuple[str, ...] = ()
    ) -> Outcome:
        while deletes and self.before_removal:
            self.before_removal.pop()()
        return super().txn(compares, puts, deletes)


class TestInAStore:
    @pytest.fixture
    def store(self) -> Interrupted:
        return Interrupted()

    @pytest.fixture(autouse=True)
    def nobody_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def sleep(seconds: float) -> None:
            raise AssertionError(f"waited {seconds} s for a master that cannot come, or is there")

        monkeypatch.setattr(clearing.time, "sleep", sleep)

    def test_nothing_takes_no_bytes_and_no_time(self) -> None:
        assert clear_in(MemoryStore(), "run-1", ended=False) == 0

    def test_no_master_is_waited_for_of_a_job_that_has_ended(self, store: Interrupted) -> None:
        assert clear_in(store, "run-1", ended=True) > 0
        assert store.get_prefix("").items == ()

    def test_a_job_that_is_led_is_refused_at_once(self, store: Interrupted) -> None:
        lead(store)
        with pytest.raises(JobError, match=r"job run-1 is led on host far; stop it there"):
            clear_in(store, "run-1", ended=False)

    def test_who_is_quicker_leads_and_is_named(self, store: Interrupted) -> None:
        store.before_grant.append(lambda: lead(store))
        with pytest.raises(JobError, match=r"job run-1 is led on host far; stop it there"):
            clear_in(store, "run-1", ended=True)
        assert store.get(f"{PREFIX}head") is not None

    def test_who_was_quicker_and_has_gone_has_no_host(self, store: Interrupted) -> None:
        store.before_grant.append(lambda: lead(store).resign())
        with pytest.raises(JobError, match=r"job run-1 is led; stop it there"):
            clear_in(store, "run-1", ended=True)
        assert store.get(f"{PREFIX}head") is not None

    def test_who_deposes_it_meanwhile_keeps_everything(self, store: Interrupted) -> None:
        store.before_removal.append(
            lambda: campaign(store, PREFIX, UnixAddress("/x", "far"), 7, ttl=60, deposing=1)
        )
        with pytest.raises(StoreError, match="another took job run-1 while it was being removed"):
            clear_in(store, "run-1", ended=True)
        assert store.get(f"{PREFIX}head") is not None
        leader = leader_of(store, PREFIX)
        assert leader is not None
        assert leader.address.host == "far"


def test_the_next_master_is_looked_for_until_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter(range(100))
    monkeypatch.setattr(clearing.time, "monotonic", lambda: float(next(clock)))
    slept: list[float] = []
    monkeypatch.setattr(clearing.time, "sleep", slept.append)
    assert clear_in(Interrupted(), "run-1", ended=False) > 0
    assert len(slept) == 14, "its time is 15 s, and each look takes one"
    assert max(slept) < 0.5
