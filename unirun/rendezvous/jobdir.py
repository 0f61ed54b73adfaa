"""The directory of a job: its files, and how it is created and found.

::

    <root>/<run id>/            0700
        token                   0600, 256 random bits in hex
        tls/                    0700, in a job of several hosts: the node's certificate and name
        uid                     distinguishes this job from earlier ones with the same id
        uid.before              that of the run before, when Slurm has requeued the job
        store                   the URL of the store with the job's context
        store.db                that store, unless it is elsewhere
        context.json            the job's context until its first master writes it to the store
        state.json              the job's state, replaced as a whole after every change
        summary.json            its summary in one line, for commands that list many jobs
        events.jsonl            the event log: events and decisions, with their causes
        metrics.jsonl           the workers' metrics
        alive.lock              held by the agents and the master as long as one of them lives
        master.<pid>.sock       0600; where each master listens
        agent.<node>.sock       0600; where the agent of each node listens for its workers
        timer.<node>            0600; a named pipe for torch's timers, when they are enabled
        master.log agent.<node>.log  stderr of these processes
        logs/<role>/<rank>/<incarnation>/{stdout,stderr}.log, error.json
        slurm/                  of a job that was submitted to Slurm: batch script, record, output, token

The root is ``$UNIRUN_HOME/jobs``, by default ``$XDG_STATE_HOME/unirun/jobs`` or
``~/.local/state/unirun/jobs``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unirun.errors import JobError
from unirun.names import RUN_ID_RULE, is_run_id
from unirun.rendezvous.logdir import MARK, make_log_dir
from unirun.rendezvous.ownership import exposure, is_ours, make_private, owner
from unirun.values import Value, WorkerId

MATCHES_SHOWN = 5
_FIRST = "context.json"
_UID_BEFORE = "uid.before"


class JobDir(Value):
    """Paths of one job."""

    path: Path

    @property
    def run_id(self) -> str:
        """The job's id, which is the directory's name."""
        return self.path.name

    @property
    def token(self) -> Path:
        """The file with the job's token."""
        return self.path / "token"

    def master_socket(self, pid: int) -> Path:
        """Socket of the master whose process, or whose parent, is `pid`."""
        return self.path / f"master.{pid}.sock"

    def master_sockets(self) -> list[Path]:
        """Sockets of all masters, also of dead ones."""
        return sorted(self.path.glob("master.*.sock"))

    @property
    def store_url(self) -> str:
        """URL of the store with the job's context. Raises `JobError`."""
        return self._read("store")

    @property
    def own_store(self) -> str:
        """URL of the store in this directory, the default for the context."""
        return f"sqlite:{self.path / 'store.db'}"

    @property
    def uid(self) -> str:
        """Distinguishes this job from earlier ones with the same id. Raises `JobError`."""
        return self._read("uid")

    @property
    def uid_before(self) -> str:
        """The `uid` before Slurm has requeued the job, of whose store saved states are kept; else empty."""
        return self._read(_UID_BEFORE) if (self.path / _UID_BEFORE).exists() else ""

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except OSError as error:
            raise JobError(f"{self.path / name} cannot be read: {error.strerror}") from error

    def agent_socket(self, node: str) -> Path:
        """Socket of the agent of `node`, for its workers."""
        return self.path / f"agent.{node}.sock"

    def timer_pipe(self, node: str) -> Path:
        """Named pipe in which the agent of `node` takes requests for torch's timers."""
        return self.path / f"timer.{node}"

    def agent_log(self, node: str) -> Path:
        """Log of the agent of `node` and of its spawners."""
        return self.path / f"agent.{node}.log"

    @property
    def master_log(self) -> Path:
        """Log of the masters."""
        return self.path / "master.log"

    @property
    def state(self) -> Path:
        """The job's state in JSON."""
        return self.path / "state.json"

    @property
    def summary(self) -> Path:
        """The summary of the job's state."""
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        """The event log, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """The workers' metrics, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Output of the workers. With ``--log-dir`` a link to a directory there."""
        return self.path / "logs"

    @property
    def batch(self) -> Path:
        """What belongs to the job's batch job, which is there before the job and outlives it when it is requeued."""
        return self.path / "slurm"

    @property
    def lock(self) -> Path:
        """Locked as long as an agent or the master of the job lives."""
        return self.path / "alive.lock"

    def worker_logs(self, worker: WorkerId) -> Path:
        """The directory with the output of one worker."""
        return self.logs / worker.role / str(worker.rank) / str(worker.incarnation)

    def first_context(self) -> dict[str, Any] | None:
        """Read the context of a job that no master has led yet; None after that. Raises `JobError`."""
        try:
            return self.read_json(_FIRST)
        except JobError:
            # Another master may be deleting it now.
            if (self.path / _FIRST).exists():
                raise
            return None

    def forget_first_context(self) -> None:
        """Delete the first context, which is in the store now."""
        (self.path / _FIRST).unlink(missing_ok=True)

    def write_first_context(self, documents: Mapping[str, Any]) -> None:
        """Write the context for the job's first master."""
        self.write_json(_FIRST, documents)

    def own_logs(self) -> Path | None:
        """Directory of this job below ``--log-dir``; None without one, or when another job has replaced it."""
        target = self.logs.resolve()
        try:
            own = self.logs.is_symlink() and (target / MARK).read_text() == self.uid
        except (OSError, JobError):
            return None
        return target if own else None

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace the file `name` atomically by `value`. Raises OSError."""
        target = self.path / name
        fresh = target.with_suffix(f".{os.getpid()}.new")
        try:
            fresh.write_text(json.dumps(value, separators=(",", ":")))
            fresh.replace(target)
        except OSError:
            # On a full disk a partial file would take space that others need.
            with suppress(OSError):
                fresh.unlink()
            raise

    def read_json(self, name: str) -> dict[str, Any]:
        """Read the JSON object in the file `name`. Raises `JobError`."""
        try:
            value = json.loads((self.path / name).read_text())
        except OSError as error:
            raise JobError(f"{self.path / name} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise JobError(f"{self.path / name} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise JobError(f"{self.path / name} holds no object")
        return value

    def alive(self) -> bool:
        """Whether an agent or a master of this job lives, judged by its lock and so independent of reused pids. Raises
        `JobError` when the lock cannot be opened."""
        try:
            handle = os.open(self.lock, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise JobError(f"{self.lock} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False


def jobs_root() -> Path:
    """Return the directory of this user's jobs, which need not exist.

    Raises `JobError` when another user could replace a job directory, and with it tokens, sockets and logs.
    """
    home = os.environ.get("UNIRUN_HOME")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    root = Path(home).expanduser().absolute() / "jobs" if home else Path(state, "unirun", "jobs")
    try:
        exposed = exposure(root)
        if exposed is None and root.exists() and not is_ours(info := root.stat()):
            raise JobError(f"{root} belongs to {owner(info)}", "set UNIRUN_HOME to a directory of your own")
    except OSError as error:
        raise JobError(
            f"jobs cannot be kept in {root}: {(error.strerror or str(error)).lower()}",
            "set UNIRUN_HOME to a directory that you may write",
        ) from error
    if exposed is not None:
        raise JobError(
            f"jobs are not safe in {root}: {exposed.problem}",
            f"{exposed.remedy}; UNIRUN_HOME says where jobs are",
        )
    return root


def job_at(run_id: str) -> JobDir:
    """Return the directory of job `run_id`, which need not exist. Raises `JobError` for an invalid id."""
    if not is_run_id(run_id):
        raise JobError(f"{run_id!r:.80} is no job id", RUN_ID_RULE)
    return JobDir(jobs_root() / run_id)


def create_job(
    run_id: str,
    token: bytes,
    log_dir: str | None = None,
    store: str | None = None,
    *,
    batch: bool = False,
    requeued: bool = False,
) -> tuple[JobDir, int]:
    """Create the directory of a new job, with its token and its log directory; `store` is a URL. What a finished job
    of the same id has left is removed, but for the files of the `batch` job that runs this one. When that is
    `requeued`, the store is kept too.

    Returns it with the descriptor of its lock, which agent and master inherit: as long as one process has it open,
    the job counts as running. Replaces a finished job of the same id, as it is usual to reuse one ``--rdzv-id``.
    Raises `JobError` when a running job has the id, or a directory cannot be created.
    """
    job = job_at(run_id)
    try:
        make_private(job.path.parent)
        # Checked again: another user may have created it in the meantime.
        job = job_at(run_id)
        with one_at_a_time(job.path.parent):
            lock = _make(job, token, store, batch=batch, requeued=requeued)
    except OSError as error:
        raise JobError(
            f"the job's directory {job.path} cannot be made: {(error.strerror or str(error)).lower()}",
            "set UNIRUN_HOME to a directory that you may write",
        ) from error
    try:
        _make_logs(job, log_dir)
    except JobError:
        os.close(lock)
        shutil.rmtree(job.path, ignore_errors=True)
        raise
    return job, lock


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Exclusive lock on `root`: commands must not create or remove a job of the same id concurrently."""
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(job: JobDir, token: bytes, store: str | None, *, batch: bool, requeued: bool) -> int:
    if os.path.lexists(job.path):
        if job.alive():
            raise JobError(f"job {job.run_id} is running", f"stop it with: unirun stop {job.run_id}")
        if requeued and (job.path / "uid").exists():
            (job.path / "uid").replace(job.path / _UID_BEFORE)
        _clear(job.path, (*_OF_BATCH, *_OF_STORE) if requeued else _OF_BATCH if batch else ())
    job.path.mkdir(0o700, exist_ok=batch)
    # The umask may have removed permissions of the owner.
    job.path.chmod(0o700)
    handle = os.open(job.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token.hex())
    # A follower may open it before the master does.
    job.events.touch(mode=0o600)
    (job.path / "uid").write_text(os.urandom(8).hex())
    (job.path / "store").write_text(store or job.own_store)
    lock = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


_OF_BATCH = ("slurm",)
_OF_STORE = (_UID_BEFORE, "store.db", "store.db-wal", "store.db-shm")


def _clear(path: Path, keep: Collection[str]) -> None:
    """Remove the directory `path`; with names in `keep`, all that is in it but those."""
    if not keep or path.is_symlink():
        # Which refuses a link.
        shutil.rmtree(path)
    for entry in [entry for entry in os.scandir(path) if entry.name not in keep] if keep else ():
        remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
        remove(entry.path)


def _make_logs(job: JobDir, log_dir: str | None) -> None:
    """Create the log directory, or with ``--log-dir`` a link to one there."""
    try:
        if log_dir is None:
            make_private(job.logs)
        else:
            target = Path(log_dir).expanduser().absolute() / job.run_id
            make_log_dir(target, job.uid)
            job.logs.symlink_to(target)
    except OSError as error:
        raise JobError(
            f"logs cannot be written to {log_dir or job.logs}: {(error.strerror or str(error)).lower()}",
            "choose another --log-dir",
        ) from error


def all_jobs() -> Iterator[JobDir]:
    """Yield every job of this user, the oldest first. Raises `JobError`."""
    root = jobs_root()
    if not root.is_dir():
        return
    with os.scandir(root) as entries:
        found = [
            (_made_at(entry.path), entry.path)
            for entry in entries
            if is_run_id(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    for _, path in sorted(found):
        yield JobDir(Path(path))


def _made_at(path: str) -> int:
    """Creation time of a job in ns: the token is written once, while the directory changes with each state."""
    for name in (os.path.join(path, "token"), path):
        try:
            return os.stat(name).st_mtime_ns
        except OSError:
            continue
    return 0


def choose_job(name: str | None, run_ids: Sequence[str], runs: Callable[[str], bool]) -> str:
    """Return the id in `run_ids` (the oldest first) that is `name` or begins with it. Without a name, return the newest
    job that `runs`, or else the newest. Raises `JobError`."""
    if not run_ids:
        raise JobError("there are no jobs", "start one with: unirun script.py")
    if name is None:
        return next((each for each in reversed(run_ids) if runs(each)), run_ids[-1])
    matches = [each for each in run_ids if each == name] or [x for x in run_ids if x.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        newest = ", ".join(reversed(matches[-MATCHES_SHOWN:]))
        and_more = ", …" if len(matches) > MATCHES_SHOWN else ""
        raise JobError(f"{name!r} fits {len(matches)} jobs", f"write more of the id: {newest}{and_more}")
    if ":" in name:
        raise JobError(f"{name!r} is a worker and no job", "name its job; unirun ls shows the jobs there are")
    raise JobError(f"no job is called {name!r}", "unirun ls shows the jobs there are")
