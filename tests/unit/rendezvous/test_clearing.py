"""The rest of a finished job is measured to the byte, and removed only while no master leads the job."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.effort import examples
from unirun.errors import JobError, StoreAway, StoreError
from unirun.observe.jobdir import JobDir
from unirun.rendezvous import creation, election
from unirun.rendezvous.creation import (
    ABANDONED_TIMEOUT,
    TTL,
    clear_here,
    clear_in,
    create_job,
    size_here,
    size_in,
)
from unirun.rendezvous.election import Term, campaign, index_key, job_prefix, leader_of
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, KeyValue, Lease, Outcome, Put
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


class Clock:
    """The time of all hosts."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


Accident = Literal["away", "led", "deposed", "late"]


class Disturbed(MemoryStore):
    """The store of all jobs. What comes before each of the next calls is told by `accidents`: the store is away for
    one, another master takes the seat, also of one that leads, or ten seconds and more pass."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.clock, self.accidents = clock, list[Accident | None]()
        self.happens: Callable[[Accident], None] = lambda accident: None

    def _meanwhile(self) -> None:
        if self.accidents and (accident := self.accidents.pop(0)) is not None:
            self.happens(accident)

    def get(self, key: str) -> KeyValue | None:
        self._meanwhile()
        return super().get(key)

    def grant(self, ttl: float) -> Lease:
        self._meanwhile()
        return super().grant(ttl)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        self._meanwhile()
        return super().txn(compares, puts, deletes)


JOBS = "run-1", "run-10", "run"
"""The keys of one begin as those of another."""

WHICH = st.sampled_from(JOBS)


class Clearings(RuleBasedStateMachine):
    """Jobs in one store, their masters, and who clears them. The reference: what each job has written."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = Disturbed(self.clock)
        self.written: dict[str, dict[str, str]] = {each: {} for each in JOBS}
        self.terms: dict[str, list[Term]] = {each: [] for each in JOBS}
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(election, "clock", self.clock)
        self._patch.setattr(creation, "time", SimpleNamespace(monotonic=self.clock, sleep=self.passes))

    def teardown(self) -> None:
        self._patch.undo()
        self.store.close()

    def passes(self, seconds: float) -> None:
        self.clock.now += seconds

    def leads(self, which: str, *, deposing: bool = False) -> Term | None:
        """The term of another master, on another host, if it wins."""
        leader = leader_of(self.store, job_prefix(which))
        dead = leader.epoch if leader is not None and deposing else 0
        term = campaign(self.store, job_prefix(which), UnixAddress("/x", "far"), 7, ttl=60.0, deposing=dead)
        if term is not None:
            self.terms[which].append(term)
        return term

    @rule(which=WHICH, deposing=st.booleans())
    def begin(self, which: str, deposing: bool) -> None:
        """A master begins, also after the death of one before."""
        self.leads(which, deposing=deposing)

    @rule(which=WHICH, key=st.sampled_from("ab"), value=st.text(max_size=3))
    def write(self, which: str, key: str, value: str) -> None:
        """The latest master writes the state of its job, and the summary of it."""
        if self.terms[which]:
            puts = [Put(f"{job_prefix(which)}{key}", value), Put(index_key(which), value)]
            if self.store.txn([self.terms[which][-1].fence], puts).succeeded:
                self.written[which] |= {put.key: put.value for put in puts}

    @rule(which=WHICH)
    def resign(self, which: str) -> None:
        if self.terms[which]:
            self.terms[which].pop().resign()

    @rule(seconds=st.sampled_from([1.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.passes(seconds)

    @rule(
        which=WHICH,
        ended=st.booleans(),
        calm=st.integers(0, 6),
        accident=st.sampled_from([None, "away", "led", "deposed", "late"]),
    )
    def clear(self, which: str, ended: bool, calm: int, accident: Accident | None) -> None:
        """All of a job goes or none of it, and what goes had no master. One that waits for a master waits long enough,
        and no longer."""
        size, began = size_in(self.store, which), self.clock.now
        led = leader_of(self.store, job_prefix(which)) is not None
        happened = list[Accident]()

        def happens(what: Accident) -> None:
            happened.append(what)
            if what == "away":
                raise StoreAway("the store does not answer")
            if what == "late":
                self.passes(TTL + 1.0)
            else:
                self.leads(which, deposing=what == "deposed")

        self.store.happens = happens
        self.store.accidents = [None] * calm + [accident]
        found = self.cleared(which, ended)
        waited = self.clock.now - began
        if isinstance(found, StoreError):
            assert happened
        elif isinstance(found, JobError):
            assert led or happened
            assert found.remedy == f"stop it there with: unirun stop {which}"
        else:
            assert found == size
            assert not (size and led and not happened)
            self.written[which] = {}
        if happened:
            return
        # Nothing at all is left of one that is cleared, so that a job of the same id begins anew.
        assert bool(size_in(self.store, which)) == led
        # One that is led is seen at once.
        assert (ABANDONED_TIMEOUT <= waited < ABANDONED_TIMEOUT + 1.0) == bool(size and not led and not ended)
        assert waited == 0.0 or waited >= ABANDONED_TIMEOUT

    def cleared(self, which: str, ended: bool) -> int | JobError | StoreError:
        try:
            return clear_in(self.store, which, ended=ended)
        except (JobError, StoreError) as error:
            return error
        finally:
            self.store.accidents = []

    @invariant()
    def all_of_a_job_that_was_not_cleared_is_there(self) -> None:
        for which in JOBS:
            found = {
                item.key: item.value
                for item in self.store.get_prefix(job_prefix(which)).items
                if not item.key.startswith(election.seat_prefix(job_prefix(which)))
            }
            index = self.store.get(index_key(which))
            found |= {} if index is None else {index.key: index.value}
            assert found == self.written[which]

    @invariant()
    def a_master_that_leads_may_write(self) -> None:
        """And only one does: the latest, if no clearing has ended its term."""
        for which in JOBS:
            leader = leader_of(self.store, job_prefix(which))
            if leader is not None and leader.address.host == "far":
                assert self.terms[which]
                assert self.store.txn([self.terms[which][-1].fence]).succeeded


TestClearings = Clearings.TestCase
TestClearings.settings = settings(examples(100), stateful_step_count=20)
