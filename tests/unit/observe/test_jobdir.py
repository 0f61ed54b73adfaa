"""The directory of a job: private, locked while the job lives, found by a prefix of its id."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from tests.unit.observe.jobdirs import Create, create, home, locks
from unirun.errors import JobError
from unirun.observe.jobdir import (
    NO_LOCKS,
    JobDir,
    _tell_unknown,
    all_jobs,
    directories_of_nodes,
    job_at,
    jobs_root,
)
from unirun.rendezvous import creation
from unirun.rendezvous.creation import clear_here, create_job, discard_job
from unirun.values import WorkerId
from unirun.wire.handshake import load_token, new_token

__all__ = ["create", "home", "locks"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestCreateJob:
    def test_a_new_job_directory_is_private(self, create: Create) -> None:
        previous = os.umask(0)
        try:
            job = create()
        finally:
            os.umask(previous)
        assert mode(job.path) == 0o700
        assert mode(job.token) == 0o600
        assert mode(job.lock) == 0o600
        assert mode(job.events) == 0o600

    def test_a_new_job_directory_is_private_at_every_moment(
        self, create: Create, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        at_first: list[int] = []
        monkeypatch.setattr(Path, "chmod", lambda self, _: at_first.append(mode(self)))
        previous = os.umask(0)
        try:
            create()
        finally:
            os.umask(previous)
        assert set(at_first) == {0o700}

    def test_a_new_job_has_a_token_that_can_be_loaded(self) -> None:
        token = new_token()
        job, lock = create_job("run-1", token)
        os.close(lock)
        assert load_token(job.token) == token

    def test_a_batch_job_keeps_its_files_when_its_job_begins(self, home: Path) -> None:
        batch = JobDir(home / "jobs" / "run-1").batch
        batch.mkdir(parents=True, mode=0o700)
        batch.parent.chmod(0o700)
        (batch / "batch.sh").touch()
        (batch.parent / "state.json").touch()
        (batch.parent / "uid").touch()
        job, lock = create_job("run-1", new_token(), batch=True)
        os.close(lock)
        assert (job.batch / "batch.sh").exists()
        assert job.state.exists(), "it is pending until its master writes what follows"
        assert job.uid_before == ""

    def test_a_requeued_job_keeps_its_store_and_knows_its_uid_before(self) -> None:
        job, lock = create_job("run-1", new_token(), batch=True)
        os.close(lock)
        (job.path / "store.db").touch()
        before = job.uid
        for restarts in (1, 2):
            job.state.touch()
            job, lock = create_job("run-1", new_token(), batch=True, restarts=restarts)
            os.close(lock)
            assert not job.state.exists(), "that was the state before"
            assert (job.path / "store.db").exists()
            assert job.uid_before == before != job.uid
            before = job.uid

    @pytest.mark.parametrize("log_dir", [None, "logs"])
    def test_a_requeued_job_keeps_what_the_runs_before_have_written(
        self, tmp_path: Path, log_dir: str | None
    ) -> None:
        where = log_dir and str(tmp_path / log_dir)
        for restarts in range(3):
            job, lock = create_job("run-1", new_token(), where, batch=True, restarts=restarts)
            node, other = create_job("run-1", new_token(), uid=job.uid, node="n2", restarts=restarts)
            (node.logs / "there").write_text(str(restarts))
            (job.logs / "here").write_text(str(restarts))
            for path in (job.state, job.metrics, job.master_log, job.agent_log("n1")):
                path.write_text(str(restarts))
            os.close(lock)
            os.close(other)
        assert job.attempts == (0, 1)
        for number in job.attempts:
            kept = job.attempt(number)
            for path in (kept.logs / "here", kept.state, kept.metrics, kept.master_log, kept.agent_log("n1")):
                assert path.read_text() == str(number)
            assert kept.events.exists()
            (there,) = directories_of_nodes(job, number)
            assert (there.logs / "there").read_text() == str(number)
        assert (job.logs / "here").read_text() == "2"
        (there,) = directories_of_nodes(job)
        assert (there.logs / "there").read_text() == "2"
        clear_here(job)
        assert [*tmp_path.rglob("*here")] == []

    def test_a_requeued_job_that_does_not_start_loses_nothing_of_the_run_before(self) -> None:
        job, lock = create_job("run-1", new_token(), batch=True)
        os.close(lock)
        (job.path / "store.db").touch()
        (job.logs / "here").touch()
        discard_job(*create_job("run-1", new_token(), batch=True, restarts=1))
        assert (job.path / "store.db").exists()
        assert (job.attempt(0).logs / "here").exists()
        assert not job.logs.exists()

    def test_a_new_job_keeps_no_attempts_of_a_finished_one(self) -> None:
        for restarts in (0, 1, 0):
            job, lock = create_job("run-1", new_token(), batch=True, restarts=restarts)
            os.close(lock)
        assert job.attempts == ()

    def test_the_directories_of_a_jobs_nodes_are_found_beside_its_own(self, create: Create) -> None:
        job = create()
        mine, other = (job_at(job.run_id, node) for node in ("n1", "n2"))
        for node, uid in ((mine, job.uid), (other, "another")):
            node.path.mkdir(parents=True)
            (node.path / "uid").write_text(uid)
        assert directories_of_nodes(job) == [mine]

    def test_a_new_job_has_a_log_directory(self, create: Create) -> None:
        job = create()
        assert job.logs.is_dir()
        assert job.worker_logs(WorkerId("actor", 2, 1)) == job.logs / "actor" / "2" / "1"

    def test_a_new_job_is_alive_until_its_lock_is_released(self, create: Create, locks: list[int]) -> None:
        job = create()
        assert job.alive()
        inherited = os.dup(locks[0])
        os.close(locks.pop())
        assert job.alive(), "who has inherited the lock holds it too"
        os.close(inherited)
        assert not job.alive()

    def test_a_new_job_cannot_have_the_id_of_a_running_one(self, create: Create) -> None:
        job = create()
        (job.path / "keep").touch()
        with pytest.raises(JobError, match="job run-1 is running; stop it with: unirun stop run-1"):
            create()
        assert (job.path / "keep").exists()

    def test_a_new_job_replaces_a_finished_one_of_the_same_id(self, create: Create) -> None:
        job = create(running=False)
        (job.path / "old").touch()
        again = create()
        assert not (again.path / "old").exists()

    def test_a_new_job_does_not_follow_a_link_in_its_place(self, create: Create, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.mkdir()
        (create("other").path.parent / "run-1").symlink_to(victim)
        with pytest.raises(JobError, match="cannot be made: cannot call rmtree on a symbolic link"):
            create()
        assert victim.exists()

    def test_of_jobs_created_at_once_with_one_id_one_is_created(self) -> None:
        results: list[object] = []
        barrier = threading.Barrier(8)

        def start() -> None:
            barrier.wait()
            try:
                results.append(create_job("same", new_token())[1])
            except JobError as error:
                results.append(error)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [result for result in results if isinstance(result, int)]
        assert len(won) == 1
        assert len(results) == 8
        os.close(won[0])

    def test_a_new_job_names_the_directory_that_it_cannot_write(self, home: Path, create: Create) -> None:
        home.mkdir()
        (home / "jobs").touch()
        says = "jobs cannot be kept in .*: not a directory; set UNIRUN_HOME to a directory that you may write"
        with pytest.raises(JobError, match=says):
            create()


class TestJobsRoot:
    @pytest.mark.parametrize("mask", [0o000, 0o077])
    def test_the_jobs_root_is_private_whatever_the_umask(self, create: Create, home: Path, mask: int) -> None:
        previous = os.umask(mask)
        try:
            job = create()
        finally:
            os.umask(previous)
        assert [mode(path) for path in (home, jobs_root(), job.path, job.logs)] == [0o700] * 4

    def test_a_jobs_root_that_others_may_open_is_closed_to_them(self, create: Create, home: Path) -> None:
        """A process that can open a directory can lock it."""
        (home / "jobs").mkdir(parents=True)
        (home / "jobs").chmod(0o755)
        create()
        assert mode(jobs_root()) == 0o700

    def test_a_lock_that_another_process_holds_is_told(
        self, create: Create, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(creation, "LOCK_TIMEOUT", 0.05)
        (home / "jobs").mkdir(parents=True, mode=0o700)
        handle = os.open(home / "jobs", os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(
            JobError, match=r"another process has held the lock of .*jobs for 0.05 s; see which"
        ):
            create()
        os.close(handle)
        create()

    def test_a_jobs_root_that_another_user_could_replace_is_refused(self, create: Create, home: Path) -> None:
        home.mkdir()
        home.chmod(0o777)
        for use in (create, lambda: [*all_jobs()]):
            with pytest.raises(JobError, match="home may be written by all users; chmod go-w"):
                use()
        assert [*home.iterdir()] == []

    def test_a_jobs_root_that_others_may_write_is_refused(self, create: Create) -> None:
        create(running=False)
        jobs_root().chmod(0o1777)
        with pytest.raises(JobError, match="jobs may be written by all users"):
            create()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
    def test_a_jobs_root_of_another_user_is_refused(self, create: Create) -> None:
        create(running=False)
        os.chown(jobs_root(), 65534, 65534)
        with pytest.raises(JobError, match="jobs belongs to user"):
            create()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root has what it can pretend is another's")
    def test_a_jobs_root_of_root_is_refused_to_others(
        self, create: Create, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root is trusted, but other users cannot keep jobs where only root may write."""
        create(running=False)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(JobError, match="jobs belongs to user root; set UNIRUN_HOME"):
            jobs_root()

    def test_directories_with_invalid_ids_are_no_jobs(self, create: Create) -> None:
        root = create().path.parent
        for name in ("$(touch x)", ".hidden", "a b", "x" * 64):
            (root / name).mkdir()
        (root / "link").symlink_to("run-1")
        assert [job.run_id for job in all_jobs()] == ["run-1"]


class TestLogDirectory:
    def test_a_log_directory_is_linked_to_from_the_job(self, create: Create, tmp_path: Path) -> None:
        job = create(log_dir=str(tmp_path / "logs"))
        assert job.logs.resolve() == tmp_path / "logs" / "run-1"

    def test_a_log_directory_of_an_earlier_run_is_replaced(self, create: Create, tmp_path: Path) -> None:
        job = create(running=False, log_dir=str(tmp_path / "logs"))
        (job.logs / "old").touch()
        again = create(log_dir=str(tmp_path / "logs"))
        assert not (again.logs / "old").exists()

    def test_a_log_directory_with_other_contents_is_refused_unchanged(
        self, create: Create, tmp_path: Path
    ) -> None:
        (tmp_path / "run-1").mkdir()
        (tmp_path / "run-1" / "thesis.tex").touch()
        with pytest.raises(JobError, match="is not empty and holds no logs of unirun"):
            create(log_dir=str(tmp_path))
        assert (tmp_path / "run-1" / "thesis.tex").exists()
        assert not (jobs_root() / "run-1").exists(), "the job is not there either"
        create("run-2", log_dir=str(tmp_path))

    def test_an_empty_log_directory_is_used(self, create: Create, tmp_path: Path) -> None:
        (tmp_path / "run-1").mkdir()
        assert create(log_dir=str(tmp_path)).logs.resolve() == tmp_path / "run-1"

    def test_a_log_directory_that_cannot_be_created_is_an_error(self, create: Create, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(JobError, match="logs cannot be written to .*; choose another --log-dir"):
            create(log_dir=str(tmp_path / "file"))
        assert [*all_jobs()] == []


class TestAllJobs:
    def test_all_jobs_are_in_order_of_their_start(self, create: Create) -> None:
        for number, name in enumerate(("b", "a", "c")):
            job = create(name)
            os.utime(job.token, ns=(number, number))
        JobDir(jobs_root() / "b").write_json("state.json", {"changed": "later"})
        assert [job.run_id for job in all_jobs()] == ["b", "a", "c"]

    def test_all_jobs_include_one_without_a_token(self, create: Create) -> None:
        create("a").token.unlink()
        assert [job.run_id for job in all_jobs()] == ["a"]
        os.utime(jobs_root() / "a", ns=(5, 5))
        for name, made in (("b", 9), ("c", 1)):
            os.utime(create(name).token, ns=(made, made))
        assert [job.run_id for job in all_jobs()] == ["c", "a", "b"]


def test_the_jobs_root_follows_the_usual_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert jobs_root() == tmp_path / "home" / "jobs"
    monkeypatch.delenv("UNIRUN_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert jobs_root() == Path("/state/unirun/jobs")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert jobs_root() == Path("/home/me/.local/state/unirun/jobs")


@pytest.mark.parametrize("name", ["../x", "..", "", "a/b", "$(id)", "\x1b[2J", "x" * 64])
def test_job_at_refuses_an_invalid_id(name: str) -> None:
    with pytest.raises(JobError, match="is no job id; use letters, digits"):
        job_at(name)


def test_checking_whether_a_job_is_alive_does_not_disturb_it(create: Create, locks: list[int]) -> None:
    job = create(running=False)
    assert not job.alive()
    handle = os.open(job.lock, os.O_RDWR)
    locks.append(handle)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert all(job.alive() for _ in range(3))


def test_each_master_has_its_own_socket(create: Create) -> None:
    job = create(running=False)
    assert job.master_sockets() == []
    for pid in (7, 12):
        job.master_socket(pid).touch()
    assert {path.name for path in job.master_sockets()} == {"master.7.sock", "master.12.sock"}
    assert job.master_socket(7).parent == job.path


def test_the_files_of_a_job_have_their_documented_names(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    paths = [job.agent_socket("n1"), job.agent_log("n1"), job.timer_pipe("n1"), job.master_log]
    assert [path.relative_to(tmp_path) for path in paths] == [
        Path(name) for name in ("agent.n1.sock", "agent.n1.log", "timer.n1", "master.log")
    ]


def test_a_job_without_a_lock_is_not_alive(create: Create) -> None:
    job = create()
    job.lock.unlink()
    assert not job.alive()


def test_a_job_whose_lock_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    job, lock = create_job("mine", new_token())
    os.close(lock)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(JobError, match=r"alive.lock cannot be opened: Too many open files"):
            job.alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not job.alive()


def fail_locks(monkeypatch: pytest.MonkeyPatch, number: int, *, of_directories: bool = False) -> None:
    """Let ``flock`` fail. NFS locks a directory in the host itself, also when its lock service does not run."""

    def flock(handle: int, how: int) -> None:
        if of_directories or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))

    _tell_unknown.cache_clear()
    monkeypatch.setattr("fcntl.flock", flock)


class TestAFileSystemWithoutLocks:
    @pytest.mark.parametrize("of_directories", [False, True])
    @pytest.mark.parametrize("number", NO_LOCKS)
    def test_no_job_is_made_in_it(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, number: int, of_directories: bool
    ) -> None:
        fail_locks(monkeypatch, number, of_directories=of_directories)
        expected = f"jobs cannot be kept in {home}/jobs, .* has no locks: .*; set UNIRUN_HOME"
        with pytest.raises(JobError, match=expected):
            create_job("mine", new_token())
        assert not list(jobs_root().iterdir())

    def test_no_job_in_it_is_replaced_or_removed(
        self, create: Create, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = create("mine", running=False)
        fail_locks(monkeypatch, errno.ENOLCK)
        with pytest.raises(JobError, match="has no locks"):
            create_job("mine", new_token())
        fail_locks(monkeypatch, errno.ENOLCK, of_directories=True)
        with pytest.raises(JobError, match="has no locks"):
            clear_here(job)
        assert job.token.exists()

    def test_jobs_in_it_count_as_alive_which_is_told_once(
        self, create: Create, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        jobs = [create(name, running=False) for name in ("one", "two")]
        fail_locks(monkeypatch, errno.ENOLCK)
        assert all(job.alive() for job in jobs)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("has no locks: it is not known which jobs there have died")
