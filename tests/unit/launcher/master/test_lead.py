"""The steps by which a process becomes the master of a job, the state that it takes over, and the cases in which it leaves the job alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.context.states import kept
from tests.unit.failover.job import TERM, Job
from unirun.errors import EXIT_FAILURE, JobError
from unirun.failover.context import ContextStore, encode, load
from unirun.failover.crashes import MAX_MASTERS_PER_ERROR, Crash, abort_step, record_crash
from unirun.failover.state import Commits, JobPhase, JobState, PendingCommit
from unirun.failover.step import step
from unirun.launcher.master import __main__ as process
from unirun.launcher.master import lead as leading
from unirun.launcher.master.lead import TERM_TTL, lead
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import Leader, Term, campaign, leader_of
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import open_store
from unirun.wire.address import TcpAddress, UnixAddress
from unirun.wire.certificates import make_tls
from unirun.wire.frames import from_json
from unirun.wire.handshake import load_token, new_token
from unirun.wire.messages import Stop
from unirun.wire.sockets import listen_tcp

SEAT = "jobs/job-1/"
UID = "0a1b"


def a_job(uid: str = UID) -> Job:
    job = Job({"actor": 1})
    job.state = replace(job.state, uid=uid)
    return job


def stopped(uid: str = UID) -> JobState:
    """A job that was stopped before any agent had joined: its master has nothing to wait for."""
    return a_job(uid).on(Stop(TERM, "enough")).state


class JobOnDisk:
    """A job's directory and its store."""

    def __init__(self, folder: Path) -> None:
        self.job = JobDir(folder / "job-1")
        self.job.path.mkdir()
        self.job.token.write_text(new_token().hex())
        self.job.token.chmod(0o600)
        (self.job.path / "uid").write_text(UID)
        (self.job.path / "store").write_text(self.job.own_store)
        self.path = self.job.master_socket(os.getpid())
        self.store: Store = open_store(self.job.store_url)

    def lead(
        self, *, tcp: socket.socket | None = None, deposing: int = 0, agents: dict[str, int] | None = None
    ) -> None:
        lead(self.job, tcp=tcp, deposing=deposing, agents=agents)

    def first(self, state: JobState) -> None:
        self.job.write_first_context(encode(state))

    def has(self, state: JobState) -> Term:
        """Another master has led, has written `state`, and still holds the term."""
        term = campaign(self.store, SEAT, UnixAddress("/x", "elsewhere"), 7, ttl=60)
        assert term is not None
        ContextStore(self.store, "job-1", term).create(state)
        return term

    def leaders(self) -> list[Leader]:
        """Every leader that there was."""
        changes = self.store.watch(SEAT, 0).changes(0.0)
        assert isinstance(changes, tuple)
        return [
            from_json(Leader, each.value)
            for each in changes
            if each.key == f"{SEAT}lead/leader" and each.kind == "put"
        ]

    @property
    def status(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.job.state.read_text())
        return found


@pytest.fixture
def job_on_disk(tmp_path: Path) -> Iterator[JobOnDisk]:
    job_on_disk = JobOnDisk(tmp_path)
    yield job_on_disk
    job_on_disk.store.close()


class TestTheFirstMaster:
    def test_the_first_master_brings_the_context_to_the_store_and_leaves_a_free_seat(
        self, job_on_disk: JobOnDisk
    ) -> None:
        job_on_disk.first(stopped())
        job_on_disk.lead()
        assert load(job_on_disk.store, "job-1") == replace(kept(stopped()), epoch=1)
        assert job_on_disk.job.first_context() is None
        assert leader_of(job_on_disk.store, SEAT) is None
        assert (job_on_disk.status["epoch"], job_on_disk.status["phase"]) == (1, "stopped")

    def test_the_first_master_is_found_at_its_socket(self, job_on_disk: JobOnDisk) -> None:
        job_on_disk.first(stopped())
        job_on_disk.lead()
        assert job_on_disk.leaders() == [Leader(1, UnixAddress.here(job_on_disk.path), os.getpid())]

    def test_the_first_master_replaces_a_job_of_the_same_id_that_has_ended(
        self, job_on_disk: JobOnDisk
    ) -> None:
        job_on_disk.has(stopped("other")).resign()
        job_on_disk.first(stopped())
        job_on_disk.lead()
        state = load(job_on_disk.store, "job-1")
        assert state is not None
        assert state.uid == UID

    @pytest.mark.parametrize("before", ["other", "another"])
    def test_a_requeued_job_finds_what_its_workers_had_saved(
        self, job_on_disk: JobOnDisk, before: str
    ) -> None:
        term = job_on_disk.has(stopped("other"))
        contexts = ContextStore(job_on_disk.store, "job-1", term)
        pending = (PendingCommit(9, {"actor": (0,)}),)
        contexts.create(replace(stopped("other"), commits=Commits(("actor",), 7, pending)))
        contexts.save_state("actor", 0, "weights")
        term.resign()
        (job_on_disk.job.path / "uid.before").write_text(before)
        job_on_disk.first(stopped())
        job_on_disk.lead()
        saved = job_on_disk.store.get_prefix(f"{SEAT}states/").items
        assert bool(saved) == (before == "other")
        state = load(job_on_disk.store, "job-1")
        assert state is not None
        assert state.uid == UID
        assert state.commits == (Commits(("actor",), 7) if before == "other" else Commits())

    def test_the_first_master_leaves_one_alone_that_runs(self, job_on_disk: JobOnDisk) -> None:
        job_on_disk.has(a_job("other").state)
        job_on_disk.first(stopped())
        with pytest.raises(JobError, match="job job-1 is running"):
            job_on_disk.lead()
        state = load(job_on_disk.store, "job-1")
        assert state is not None
        assert state.uid == "other"
        assert job_on_disk.job.first_context() is not None

    def test_the_first_master_replaces_one_that_nobody_leads_after_a_moment(
        self, job_on_disk: JobOnDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leading, "TERM_TTL", 1.0)
        job_on_disk.has(a_job("other").state).resign()
        job_on_disk.first(stopped())
        job_on_disk.lead()
        state = load(job_on_disk.store, "job-1")
        assert state is not None
        assert state.uid == UID

    def test_the_first_master_does_not_take_itself_for_another(self, job_on_disk: JobOnDisk) -> None:
        """It has died after it has written the context, before it could remove the first one."""
        job_on_disk.has(stopped()).resign()
        job_on_disk.first(a_job().state)
        job_on_disk.lead()
        assert load(job_on_disk.store, "job-1") == replace(kept(stopped()), epoch=2)
        assert job_on_disk.job.first_context() is None

    @pytest.mark.starts_processes
    def test_the_first_master_hears_of_an_agent_that_has_died_before_it_could_join(
        self, job_on_disk: JobOnDisk
    ) -> None:
        job_on_disk.first(a_job().state)
        agent = subprocess.Popen([sys.executable, "-S", "-c", ""])
        agent.wait()
        job_on_disk.lead(agents={"n0": agent.pid})
        assert (job_on_disk.status["phase"], job_on_disk.status["code"]) == ("failed", 137)
        log = job_on_disk.job.agent_log("n0")
        assert (
            job_on_disk.status["reason"]
            == f"the agent of node n0 is gone: it died before it joined; see {log}"
        )


class TestALaterMaster:
    def test_a_later_master_goes_on_with_what_is_in_the_store(self, job_on_disk: JobOnDisk) -> None:
        job_on_disk.has(stopped())
        job_on_disk.lead(deposing=1)
        assert (job_on_disk.status["epoch"], job_on_disk.status["phase"]) == (2, "stopped")
        assert leader_of(job_on_disk.store, SEAT) is None

    def test_a_later_master_leaves_a_job_alone_that_is_led(self, job_on_disk: JobOnDisk) -> None:
        job_on_disk.has(stopped())
        job_on_disk.lead()
        job_on_disk.lead(deposing=7)
        assert not job_on_disk.job.state.exists()
        leader = leader_of(job_on_disk.store, SEAT)
        assert leader is not None
        assert leader.epoch == 1

    @pytest.mark.parametrize("there", [None, "other"])
    def test_a_later_master_finds_no_context_but_that_of_another_job(
        self, job_on_disk: JobOnDisk, there: str | None
    ) -> None:
        if there is not None:
            job_on_disk.has(stopped(there)).resign()
        with pytest.raises(JobError, match="the store has no context of this job job-1") as caught:
            job_on_disk.lead()
        assert "another job has taken its id" in str(caught.value)
        assert leader_of(job_on_disk.store, SEAT) is None, "the seat is free"

    def test_a_later_master_ends_a_job_that_has_ended_too_many_masters(self, job_on_disk: JobOnDisk) -> None:
        began = time.time()
        term = job_on_disk.has(replace(a_job().state, phase=JobPhase.RUNNING))
        crash = Crash(1, 0.5, "KeyError in step", "KeyError: 'x'", ("Join",), "Traceback")
        core = leading._core((crash,) * MAX_MASTERS_PER_ERROR, job_on_disk.job, 15.0)
        assert not core.writes_first, "the error may be one of writing"
        assert core.step is abort_step
        for _ in range(MAX_MASTERS_PER_ERROR):
            record_crash(job_on_disk.store, "job-1", term, crash)
        job_on_disk.lead(deposing=1)
        state = load(job_on_disk.store, "job-1")
        assert state is not None
        assert state.verdict is not None
        assert (state.phase, state.verdict.code) == (JobPhase.FAILED, EXIT_FAILURE)
        assert state.ended is not None
        assert began <= state.ended <= time.time()
        assert state.verdict.reason.endswith("a bug in unirun: KeyError in step: KeyError: 'x'")
        assert f"log: {job_on_disk.job.master_log}" in state.verdict.report

    def test_a_later_master_goes_on_when_errors_have_ended_few(self, job_on_disk: JobOnDisk) -> None:
        assert leading._core((), job_on_disk.job, 15.0).step is step
        term = job_on_disk.has(stopped())
        record_crash(
            job_on_disk.store, "job-1", term, Crash(1, 0.5, "KeyError", "KeyError: 'x'", (), "Traceback")
        )
        job_on_disk.lead(deposing=1)
        assert job_on_disk.status["reason"] == "enough"


def test_a_master_that_hangs_is_deposed_within_seconds() -> None:
    assert 2.0 <= TERM_TTL <= 10.0


def test_a_master_with_a_tcp_socket_is_found_there_on_its_node(job_on_disk: JobOnDisk) -> None:
    make_tls(job_on_disk.job.path, load_token(job_on_disk.job.token), "head")
    job_on_disk.first(stopped())
    with listen_tcp("127.0.0.1") as tcp:
        port = tcp.getsockname()[1]
        job_on_disk.lead(tcp=tcp)
    assert job_on_disk.leaders() == [Leader(1, TcpAddress("127.0.0.1", port, "head"), os.getpid())]


class TestTheProcess:
    @pytest.fixture(autouse=True)
    def signals(self, job_on_disk: JobOnDisk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(sys, "argv", ["unirun.launcher.master", str(job_on_disk.job.path), "1"])
        ignored = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
        numbers = (*ignored, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        yield
        for number, handler in before.items():
            signal.signal(number, handler)

    def test_the_process_leads_and_leaves_no_socket(self, job_on_disk: JobOnDisk) -> None:
        """One that a process of the same pid has left is in nobody's way."""
        job_on_disk.has(stopped())
        job_on_disk.path.write_text("left by another")
        assert process.main() == 0
        assert job_on_disk.status["epoch"] == 2
        assert not job_on_disk.path.exists()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            assert signal.getsignal(number) is signal.SIG_IGN, "a terminal's signals are for the command"

    def test_the_process_leads_on_the_tcp_socket_that_it_inherits(self, job_on_disk: JobOnDisk) -> None:
        make_tls(job_on_disk.job.path, load_token(job_on_disk.job.token), "head")
        job_on_disk.has(stopped())
        with listen_tcp("127.0.0.1") as tcp:
            sys.argv.append(str(os.dup(tcp.fileno())))
            assert process.main() == 0
        assert job_on_disk.status["epoch"] == 2

    def test_the_process_says_why_it_cannot_and_leaves_no_socket(
        self, job_on_disk: JobOnDisk, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert process.main() == JobError("x").exit_code != 0
        assert "unirun-master: the store has no context of this job job-1" in capsys.readouterr().err
        assert not job_on_disk.path.exists()
