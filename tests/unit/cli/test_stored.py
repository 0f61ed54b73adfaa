"""Jobs are seen by their store, from shells and hosts that have no access to their directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.unit.cli.in_process import run_cli
from tests.unit.failover.job import Job
from unirun.cli.stored import find_summary, refuse_elsewhere, running_jobs
from unirun.errors import JobElsewhere
from unirun.failover.context import ContextStore
from unirun.failover.state import Exit, Failure, JobPhase, JobState
from unirun.failover.status_views import status_of
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import Term, campaign, index_key, job_prefix
from unirun.rendezvous.store.protocol import Put, Store
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.handshake import new_token


def lead(store: Store, run_id: str, host: str = "far", deposing: int = 0) -> Term:
    term = campaign(store, job_prefix(run_id), UnixAddress("/x", host), 7, ttl=60, deposing=deposing)
    assert term is not None
    return term


def running(run_id: str, started: float = 100.0, uid: str = "other") -> JobState:
    """A job that has restarted once."""
    job = Job({"actor": 2, "rollout": 1}, restarts={"actor": 3}).running()
    job.exits("actor", 1, 3).obey().all_run("actor")
    state = job.state
    spec = structs.replace(state.spec, run_id=run_id)
    return structs.replace(state, spec=spec, started=started, uid=uid)


def put(store: Store, state: JobState, host: str = "far") -> Term:
    """Write the entries that the job's first master writes."""
    term = lead(store, state.spec.run_id, host)
    ContextStore(store, state.spec.run_id, term).create(state)
    return term


def local(run_id: str, store: str | None = None) -> str:
    """A job with a directory here, that has ended; returns its uid."""
    job, lock = create_job(run_id, new_token(), None, store)
    write_status(job, JobStatus(run_id, "t", "succeeded", "", 1.0, 2.0, 0, ()))
    os.close(lock)
    return job.uid


def row(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_job_that_has_ended_does_not_run_though_its_master_still_leads(store: Store, url: str) -> None:
    """It tells its agents and commands of the end."""
    put(store, running("mine"))
    put(store, structs.replace(running("done", 200.0), phase=JobPhase.SUCCEEDED, ended=300.0))
    assert running_jobs(url) == ["mine"]
    assert find_summary(store, None).run_id == "mine"


class TestStatus:
    def test_status_comes_from_the_store(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("mine"))
        assert run_cli("status", "mi", "--store", url) == 0
        text = capsys.readouterr().out
        lines = text.splitlines()
        assert lines[0].startswith("job mine: running, ")
        assert lines[1] == "master: far, pid 7, term 1"
        assert lines[2] == "logs: far:/logs"
        assert lines[4:6] == [
            "ROLE     STATE    RANKS  GENERATION  RESTARTS",
            "actor    running  2      1           1 of 3",
        ]
        assert [line.split()[:5] for line in lines if line.startswith(("actor:", "rollout:"))][:3] == [
            ["actor:0", "running", "n0", "101", "1"],
            ["actor:1", "running", "n0", "102", "1"],
            ["rollout:0", "running", "n0", "1", "0"],
        ]
        assert "failures: 1\n" in text
        assert lines[-1].split()[:2] == ["actor:1", "0"]
        assert lines[-1].endswith(
            "exit code 3  restart 1 of 3 of role actor  its own exit, without an exception"
        )

    def test_status_shows_the_leader_and_the_term_of_the_last_write(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        term = put(store, running("mine"))
        second = lead(store, "mine", "near", deposing=term.epoch)
        assert run_cli("status", "--store", url) == 0
        assert "master: near, pid 7, term 2; the last write is of term 1\n" in capsys.readouterr().out
        second.resign()
        assert run_cli("status", "--store", url) == 0
        says = "master: nobody leads now; the last write is of term 1; another comes within seconds, or"
        assert says in capsys.readouterr().out

    def test_tells_all_of_it_to_programs(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        term = put(store, running("mine"))
        assert run_cli("status", "--store", url, "--json") == 0
        found = row(capsys)
        assert found["leader"] == {"epoch": 1, "address": "unix:/x", "host": "far", "pid": 7}
        assert (found["epoch"], found["dir"], found["logs"], found["store"]) == (1, None, "/logs", url)
        assert [role["restarts"] for role in found["roles"]] == [1, 0]
        (failure,) = found["failures"]
        assert (failure["role"], failure["rank"], failure["incarnation"], failure["exit"]) == (
            "actor",
            1,
            0,
            "exit code 3",
        )
        term.resign()
        assert run_cli("status", "--store", url, "--json") == 0
        assert row(capsys)["leader"] is None

    def test_status_comes_from_the_store_of_the_environment_when_no_directory_fits(
        self, store: Store, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("mine"))
        monkeypatch.setenv("UNIRUN_STORE", url)
        assert run_cli("status", "--json") == 0
        assert row(capsys)["run_id"] == "mine"
        local("here")
        assert run_cli("status", "--json") == 0
        assert row(capsys)["run_id"] == "here"
        assert run_cli("status", "mine", "--json") == 0
        assert row(capsys)["dir"] is None
        assert run_cli("status", "he", "--json") == 0
        assert row(capsys)["run_id"] == "here"

    def test_status_of_a_job_with_a_directory_needs_no_store(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        away = "etcd://127.0.0.1:1?timeout=0.1"
        local("here", away)
        monkeypatch.setenv("UNIRUN_STORE", away)
        assert run_cli("status", "here") == 0
        assert run_cli("status", "--store", away) == 4
        assert "has not answered" in capsys.readouterr().err

    def test_status_of_an_unknown_job_is_refused(
        self, store: Store, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for argv, code, says in (
            (["--store", url], 2, "there are no jobs"),
            (["--store", f"sqlite:{tmp_path / 'typo.db'}"], 4, "there is no store sqlite:"),
            (["--store", "redis:x"], 2, "a store's URL begins with sqlite: or etcd://"),
        ):
            assert run_cli("status", *argv) == code
            assert says in capsys.readouterr().err
        for run_id in ("run-1", "run-2"):
            put(store, running(run_id))
        assert run_cli("status", "run", "--store", url) == 2
        assert "'run' fits 2 jobs; write more of the id" in capsys.readouterr().err

    def test_status_of_a_job_without_a_context_is_an_error(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("mine"))
        store.txn([], deletes=[job_prefix("mine")])
        assert run_cli("status", "--store", url) == 2
        assert "the store has no context of job mine" in capsys.readouterr().err


class TestTheFailuresInAStatus:
    def test_status_has_the_last_twenty_failures_with_their_first_lines(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        state = running("mine").with_failures(
            *(
                Failure(
                    WorkerId("actor", 0, n),
                    0,
                    "n0",
                    1.0,
                    Exit(signal=9),
                    f"\nwords {n}\nmore",
                    decision=f"d{n}",
                )
                for n in range(30)
            )
        )
        status = status_of(state, {}, {})
        assert (len(status.failures), status.failed) == (20, 31)
        assert [each.incarnation for each in status.failures] == [*range(10, 30)]
        last = status.failures[-1]
        assert (last.who, last.exit, last.message, last.decision) == (
            "actor:0",
            "killed by SIGKILL",
            "words 29",
            "d29",
        )
        job, lock = create_job("mine", new_token())
        write_status(job, status)
        os.close(lock)
        assert run_cli("status") == 0
        assert "failures: the last 20 of 31\n" in capsys.readouterr().out

    def test_a_failure_without_a_message_has_its_note(self) -> None:
        failure = Failure(WorkerId("actor", 0, 0), 0, "n0", 1.0, Exit(signal=9), note="out of memory")
        assert status_of(running("mine").with_failures(failure), {}, {}).failures[-1].message == (
            "out of memory"
        )

    def test_status_shows_that_the_store_cannot_be_written(self, capsys: pytest.CaptureFixture[str]) -> None:
        job, lock = create_job("mine", new_token())
        status = status_of(running("mine"), {}, {}, epoch=2, trouble="it is away\n  host: why")
        write_status(job, status)
        assert run_cli("status") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1:3] == ["store: it is away host: why", "master: term 2"]
        os.close(lock)


class TestLs:
    def test_ls_lists_the_jobs_of_a_store(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("second", 200.0))
        put(store, running("first", 100.0)).resign()
        local("here")
        assert run_cli("ls", "--store", url) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert rows[0] == ["JOB", "STATE", "EXIT", "ROLES", "STARTED", "TOOK", "MASTER"]
        assert [(line[0], line[1], line[2], line[-1]) for line in rows[1:]] == [
            ("first", "running", "actor=2,rollout=1", "nobody"),
            ("second", "running", "actor=2,rollout=1", "far:7"),
        ]

    def test_ls_lists_jobs_of_this_host_and_then_those_of_the_store(
        self, store: Store, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("both", uid=local("both", url)))
        local("same")
        put(store, running("same", 1.0, uid="another job of that id"))
        monkeypatch.setenv("UNIRUN_STORE", url)
        assert run_cli("ls") == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        assert [(line[0], line[1], line[-1]) for line in rows] == [
            ("both", "succeeded", "here"),
            ("same", "succeeded", "here"),
            ("same", "running", "far:7"),
        ]

    def test_tells_all_of_it_to_programs(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("mine"))
        assert run_cli("ls", "--store", url, "--json") == 0
        assert row(capsys) == {
            "run_id": "mine",
            "uid": "other",
            "name": "job",
            "phase": "running",
            "started": 100.0,
            "ended": None,
            "code": None,
            "roles": [{"name": "actor", "count": 2}, {"name": "rollout", "count": 1}],
            "dir": None,
            "store": url,
            "leader": {"epoch": 1, "address": "unix:/x", "host": "far", "pid": 7},
        }

    def test_ls_lists_jobs_of_this_host_when_the_store_cannot_be_reached(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        local("here")
        monkeypatch.setenv("UNIRUN_STORE", "etcd://127.0.0.1:1?timeout=0.1")
        assert run_cli("ls") == 4
        output = capsys.readouterr()
        assert output.out.splitlines()[1].startswith("here  succeeded")
        assert "has not answered" in output.err

    def test_ls_of_a_foreign_index_is_refused(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store.txn([], [Put(index_key("x"), "[1]")])
        assert run_cli("ls", "--store", url) == 4
        assert "index/x holds '[1]', which no unirun of this version has written" in capsys.readouterr().err


class TestAJobOfAnotherHost:
    @pytest.mark.parametrize("command", ["logs", "stop"])
    def test_a_job_of_another_host_is_refused_with_the_name_of_its_host(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str], command: str
    ) -> None:
        term = put(store, running("mine"))
        assert run_cli(command, "mi", "--store", url) == 2
        says = (
            f"unirun: job mine runs on host far; its directory is not here; call unirun {command} mine there"
        )
        assert capsys.readouterr().err == f"{says}\n"
        term.resign()
        assert run_cli(command, "mi", "--store", url) == 2
        assert "job mine ran on host n0" in capsys.readouterr().err

    def test_a_job_of_another_host_is_found_in_the_store_of_the_environment(
        self, store: Store, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("mine"))
        monkeypatch.setenv("UNIRUN_STORE", url)
        local("here")
        assert run_cli("stop", "mine") == 2
        assert "runs on host far" in capsys.readouterr().err

    def test_a_job_of_this_host_is_found_by_its_store(
        self, store: Store, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(store, running("mine", uid=local("mine", url)))
        assert run_cli("stop", "mine", "--store", url) == 0
        assert capsys.readouterr().out == "job mine has ended already: succeeded\n"

    def test_a_job_with_a_shared_directory_cannot_be_stopped_from_another_host(
        self, store: Store, url: str
    ) -> None:
        job, lock = create_job("mine", new_token(), None, url)
        put(store, running("mine", uid=job.uid))
        with pytest.raises(JobElsewhere, match="job mine runs on host far") as error:
            refuse_elsewhere(job, "stop")
        assert error.value.host == "far"
        os.close(lock)
