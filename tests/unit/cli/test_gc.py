"""Finished jobs are cleared, here and in the store; jobs that run, or are another user's, are left alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.unit.cli.in_process import run_cli
from unirun.observe.jobdir import JobDir
from unirun.observe.status import JobStatus, Summary, write_status
from unirun.rendezvous import creation
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import campaign, context_prefix, index_key, job_prefix
from unirun.rendezvous.store.protocol import Put, Store
from unirun.wire.address import UnixAddress
from unirun.wire.handshake import new_token

DAY = 86400.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "ABANDONED_TIMEOUT", 0.3)


def gc(*argv: str) -> int:
    return run_cli("gc", *argv)


def job(
    run_id: str,
    phase: str = "succeeded",
    days: float = 30,
    *,
    store: str | None = None,
    log_dir: Path | None = None,
) -> JobDir:
    """A job that ended, or wrote last, so many days ago; its lock is free."""
    made, lock = create_job(run_id, new_token(), str(log_dir) if log_dir else None, store)
    os.close(lock)
    when = time.time() - days * DAY
    ended = None if phase == "running" else when
    write_status(made, JobStatus(run_id, "t", phase, "", when, ended, None, ()))
    os.utime(made.state, (when, when))
    (made.logs / "out.log").write_bytes(b"x" * 100_000)
    return made


def stored(store: Store, run_id: str, phase: str = "succeeded", days: float = 30, uid: str = "other") -> None:
    """Write the entries that a store has of such a job."""
    when = time.time() - days * DAY
    line = Summary(run_id, uid, "t", phase, when, None if phase == "running" else when, None, {"a": 1}).line()
    prefix = job_prefix(run_id)
    puts = {
        f"{context_prefix(run_id)}job": "{}",
        f"{prefix}head": '{"epoch": 2, "write": 1}',
        f"{prefix}lead/epoch": "2",
        f"{prefix}states/a/0": "x" * 5000,
        index_key(run_id): line,
    }
    store.txn([], [Put(key, value) for key, value in puts.items()])


def keys(store: Store) -> set[str]:
    return {item.key for item in store.get_prefix("").items}


class TestHere:
    def test_what_ended_long_ago_is_removed_and_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        old = [job("a", days=8), job("b", "failed", 9), job("c", "stopped", 10)]
        new = job("d", days=6)
        assert gc() == 0
        assert [each.path.exists() for each in (*old, new)] == [False, False, False, True]
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["JOB", "STATE", "ENDED", "SIZE"]
        assert {line.split()[0] for line in lines[1:4]} == {"a", "b", "c"}
        assert lines[4].startswith("3 jobs removed, ")
        assert lines[4].endswith(" kB freed")

    def test_what_is_lost_is_removed_when_it_was_seen_last_long_ago(self) -> None:
        old, new = job("old", "running", 8), job("new", "running", 6)
        assert gc() == 0
        assert (old.path.exists(), new.path.exists()) == (False, True)

    def test_gc_removes_a_directory_without_a_state(self) -> None:
        made, lock = create_job("odd", new_token())
        os.close(lock)
        assert gc("--older-than", "0s") == 0
        assert not made.path.exists()

    def test_a_job_that_another_gc_has_removed_meanwhile_is_no_error(
        self,
    ) -> None:
        made = job("a")
        assert creation.clear_here(made) > 0
        assert creation.clear_here(made) == 0

    def test_gc_removes_directories_of_which_a_part_is_left(self) -> None:
        # A gc that was interrupted, or a full disk, leaves directories without a uid.
        whole = job("whole")
        of_node, lock = create_job("part", new_token(), node="h1")
        os.close(lock)
        (of_node.path / "uid").unlink()
        of_job, lock = create_job("part", new_token())
        os.close(lock)
        (of_job.path / "uid").unlink()
        another, lock = create_job("part", new_token(), node="h2")
        os.close(lock)
        assert gc("--older-than", "0s") == 0
        assert [each.path.exists() for each in (whole, of_node, of_job, another)] == [False] * 4

    @pytest.mark.parametrize(("age", "left"), [("0s", []), ("36h", ["new"]), ("3d", ["mid", "new"])])
    def test_gc_removes_jobs_older_than_the_given_age(self, home: Path, age: str, left: list[str]) -> None:
        for name, days in (("old", 4), ("mid", 2), ("new", 1)):
            job(name, days=days)
        assert gc("--older-than", age) == 0
        assert sorted(path.name for path in (home / "jobs").iterdir()) == left

    def test_gc_refuses_an_invalid_age(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert gc("--older-than", "soon") == 2
        assert "is no duration; for example 90s" in capsys.readouterr().err

    def test_gc_never_removes_a_running_job(self, capsys: pytest.CaptureFixture[str]) -> None:
        made, lock = create_job("mine", new_token())
        assert gc("--older-than", "0s") == 0
        assert gc("mine") == 2
        assert "job mine is running; stop it with: unirun stop mine" in capsys.readouterr().err
        # Also when its state says that it has ended: agent and master are about to leave.
        write_status(made, JobStatus("mine", "t", "failed", "", 1.0, 2.0, 1, ()))
        assert gc("mine") == 2
        assert gc("--older-than", "0s") == 2
        assert made.token.exists()
        os.close(lock)
        assert gc("mine") == 0
        assert not made.path.exists()

    def test_gc_removes_a_named_job_whatever_its_age(self) -> None:
        one, ten = job("run1", days=0), job("run10", days=30)
        assert gc("run1") == 0
        assert (one.path.exists(), ten.path.exists()) == (False, True)

    def test_gc_takes_whole_names_only(self, capsys: pytest.CaptureFixture[str]) -> None:
        ten = job("run10")
        assert gc("run1") == 2
        assert "no job is called 'run1'; write the whole id: run10" in capsys.readouterr().err
        assert ten.path.exists()

    def test_gc_of_an_unknown_job_is_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_cli("gc", "nobody") != 0
        output = capsys.readouterr()
        assert output.out == ""
        assert "nobody" in output.err

    def test_gc_removes_the_existing_jobs_of_several_names(self, capsys: pytest.CaptureFixture[str]) -> None:
        one = job("one")
        assert gc("none", "one") == 2
        output = capsys.readouterr()
        assert not one.path.exists()
        assert "no job is called 'none'" in output.err
        assert "1 job removed" in output.out

    def test_a_dry_run_removes_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        made = job("a")
        assert gc("--dry-run") == 0
        assert made.path.exists()
        assert "1 job would be removed, " in capsys.readouterr().out

    def test_gc_json_has_an_object_per_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        made = job("a")
        assert gc("--json", "--dry-run") == 0
        dry = json.loads(capsys.readouterr().out)
        assert gc("--json") == 0
        row = json.loads(capsys.readouterr().out)
        assert {**dry, "removed": True} == row
        assert (row["run_id"], row["phase"], row["dir"], row["store"]) == (
            "a",
            "succeeded",
            str(made.path),
            None,
        )
        assert row["bytes"] >= 100_000

    def test_gc_with_nothing_to_remove_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert gc() == 0
        assert capsys.readouterr().out == "0 jobs removed, 0 B freed\n"


class TestLogsElsewhere:
    def test_logs_in_another_directory_are_removed_with_their_job(self, tmp_path: Path) -> None:
        logs = tmp_path / "logs"
        other = logs / "thesis"
        other.mkdir(parents=True)
        made = job("a", log_dir=logs)
        assert gc("a") == 0
        assert not made.path.exists()
        assert sorted(logs.iterdir()) == [other]

    def test_logs_that_belong_to_another_job_now_are_left(
        self, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job("a", log_dir=tmp_path / "logs")
        monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "second"))
        job("a", log_dir=tmp_path / "logs")
        monkeypatch.setenv("UNIRUN_HOME", str(home))
        assert gc("a") == 0
        assert (tmp_path / "logs" / "a" / "out.log").exists()

    @pytest.mark.parametrize("mark", [None, ""])
    def test_logs_without_the_mark_of_unirun_are_left(self, tmp_path: Path, mark: str | None) -> None:
        made = job("a", log_dir=tmp_path / "logs")
        target = made.logs.resolve()
        (target / ".unirun").unlink()
        if mark is not None:
            (target / ".unirun").write_text(mark)
        assert gc("a") == 0
        assert (target / "out.log").exists()
        assert not made.path.exists()


class TestAStore:
    def test_the_context_of_a_job_is_removed_with_its_directory(self, store: Store, url: str) -> None:
        made = job("run1", store=url)
        stored(store, "run1", uid=made.uid)
        stored(store, "run10")
        ten = {key for key in keys(store) if "run10" in key}
        assert gc("run1") == 0
        assert keys(store) == ten
        assert not made.path.exists()

    def test_the_context_of_another_job_with_the_same_id_is_kept(self, store: Store, url: str) -> None:
        made = job("a", store=url)
        stored(store, "a", uid="another")
        before = keys(store)
        assert gc("a") == 0
        assert keys(store) == before
        assert not made.path.exists()

    def test_a_store_that_is_gone_is_no_error_for_gc(self, tmp_path: Path) -> None:
        made = job("a", store=f"sqlite:{tmp_path / 'gone.db'}")
        assert gc("a") == 0
        assert not made.path.exists()
        assert not (tmp_path / "gone.db").exists()

    def test_a_store_that_cannot_be_reached_leaves_the_job_as_it_is(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        made, other = job("a", store="etcd://127.0.0.1:1?timeout=0.1"), job("b")
        assert gc() == 4
        assert "job a is left as it is: etcd at 127.0.0.1:1 has not answered" in capsys.readouterr().err
        assert (made.path.exists(), other.path.exists()) == (True, False)

    def test_ended_jobs_of_other_hosts_are_removed_from_the_store(
        self, store: Store, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        here = job("here", days=30)
        stored(store, "old", days=8)
        stored(store, "new", days=6)
        new = {key for key in keys(store) if "new" in key}
        assert gc("--store", url, "--json") == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["run_id"], row["dir"], row["store"]) == ("old", None, url)
        assert row["bytes"] > 5000
        assert keys(store) == new
        assert here.path.exists(), "it is no job of that store"
        monkeypatch.setenv("UNIRUN_STORE", url)
        assert gc("--older-than", "0s") == 0
        assert keys(store) == set()
        assert not here.path.exists()

    def test_gc_keeps_a_job_that_has_a_leader(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for phase in ("running", "succeeded"):
            stored(store, phase, phase)
            assert campaign(store, job_prefix(phase), UnixAddress("/x", "far"), 7, ttl=60)
        before = keys(store)
        assert gc("--store", url) == 2
        assert gc("--store", url, "running") == 2
        assert "job running is running; stop it with: unirun stop running" in capsys.readouterr().err
        assert gc("--store", url, "succeeded") == 2
        assert "job succeeded is led on host far" in capsys.readouterr().err
        assert keys(store) == before

    def test_gc_keeps_a_job_that_may_be_cut_off_unless_it_is_named(self, store: Store, url: str) -> None:
        stored(store, "a", "running")
        before = keys(store)
        assert gc("--store", url) == 0
        assert keys(store) == before
        assert gc("--store", url, "a") == 0
        assert keys(store) == set()

    def test_gc_keeps_a_job_whose_next_master_comes(
        self, store: Store, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stored(store, "a", "running")
        monkeypatch.setattr(time, "sleep", lambda _: lead())

        def lead() -> None:
            campaign(store, job_prefix("a"), UnixAddress("/x", "far"), 7, ttl=60)

        assert gc("--store", url, "a") == 2
        assert "job a is led on host far" in capsys.readouterr().err
        assert context_prefix("a") + "job" in keys(store)

    @pytest.mark.parametrize(
        "run_id", ["../../victim", "../../../victim", "..", ".", "a/../../../../victim", "/victim", ""]
    )
    def test_gc_never_touches_a_directory_outside_of_the_home(
        self, store: Store, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_id: str
    ) -> None:
        job("a")
        victim = tmp_path / "victim"
        for folder in (victim, tmp_path, tmp_path / "home", tmp_path / "home" / "jobs"):
            folder.mkdir(exist_ok=True)
            (folder / "uid").write_text("other")
        when = time.time() - 30 * DAY
        line = Summary(run_id, "other", "t", "succeeded", when, when, 0, {"a": 1}).line()
        for key in ("index/x", "index/a"):
            store.txn([], [Put(key, line)])
            assert gc("--store", url) == 4
            assert gc("--store", url, run_id or "x") in (2, 4)
            assert f"{key} holds" in capsys.readouterr().err
            store.txn([], deletes=[key])
        assert (victim / "uid").exists()

    @pytest.mark.parametrize(
        "change",
        [
            {"started": 10**400},
            {"started": "now"},
            {"roles": {"a": "many"}},
            {"phase": None},
            {"name": "\ud800"},
            {"extra": 1},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_gc_refuses_an_index_with_a_foreign_line(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str], change: dict[str, object]
    ) -> None:
        line = {**json.loads(Summary("x", "u", "t", "failed", 1.0, 2.0, 1, {"a": 1}).line()), **change}
        store.txn([], [Put("index/x", json.dumps(line))])
        assert gc("--store", url) == 4
        assert "index/x holds" in capsys.readouterr().err

    def test_gc_of_a_missing_store_is_an_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert gc("--store", f"sqlite:{tmp_path / 'typo.db'}") == 4
        assert "there is no store sqlite:" in capsys.readouterr().err
        assert not (tmp_path / "typo.db").exists()
