"""The directory of a job: its files, and how it is created and found.

::

    <root>/<run id>/            0700
        token                   0600, 256 random bits in hex
        tls/                    0700, in a job of several hosts: the node's certificate and name
        uid                     distinguishes this job from earlier ones with the same id
        uid.before              that of the run before, when Slurm has requeued the job
        store                   the URL of the store with the job's context; absent where only the head has it
        head                    where masters listen, for a host that has no store
        hosts.json              hosts of which files may not have been copied to here, when all of the job is elsewhere
        store.db                that store, unless it is elsewhere
        context.json            the job's context until its first master writes it to the store
        state.json              the job's state, replaced as a whole after every change
        summary.json            its summary in one line, for commands that list many jobs
        events.jsonl            the event log: events and decisions, with their causes
        metrics.jsonl           the workers' metrics
        alive.lock              held by the agents and the master as long as one of them lives
        master.<pid>.sock       0600; where each master listens
        addresses.<node>.json   the addresses of services, as the processes of a node are told them
        agent.<node>.sock       0600; where the agent of each node listens for its workers
        timer.<node>            0600; a named pipe for torch's timers, when they are enabled
        master.log agent.<node>.log  stderr of these processes
        logs/<role>/<rank>/<incarnation>/{stdout,stderr}.log, error.json
        slurm/                  of a job that was submitted to Slurm: batch script, record, output, token, beat
        attempt_N/              of a job that Slurm has requeued: logs, events, metrics and state of an earlier run

The root is ``jobs`` in `unirun_home`. A node whose agent was started by a command on another host has its files in
``nodes/<node>/<run id>`` beside ``jobs``, so that hosts which share a home directory do not meet in one.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirun import atomic
from unirun.errors import FrameError, JobError, UsageError
from unirun.observe.ownership import exposure, is_ours, make_private, owner, read_file
from unirun.spec.read import RUN_ID_RULE, is_run_id
from unirun.values import Value, WorkerId, natural
from unirun.wire.address import TcpAddress
from unirun.wire.reporting import report

# The directory of everything that unirun keeps for a user, and paths that begin with ``~``.
#
# It is ``$UNIRUN_HOME``, else ``$XDG_STATE_HOME/unirun``, else ``~/.local/state/unirun``. In a container the home
# directory may be unknown (a uid without an entry in ``/etc/passwd``), ``/``, read-only, or open to all users. torchrun
# needs none, so a missing ``~/.local/state/unirun`` that cannot be made, or would not be private, is replaced by
# ``unirun-UID`` in the temporary directory.


def unirun_home() -> Path:
    """Return the directory of everything that unirun keeps for this user, which need not exist.

    Raises `JobError` when there is no place for it, and `UsageError` when ``UNIRUN_HOME`` begins with a ``~`` that
    stands for nothing.
    """
    if given := os.environ.get("UNIRUN_HOME"):
        return expanded(given).absolute()
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state, "unirun")
    usual = _below_home()
    return temporary("unirun's files, nor is the home directory one") if usual is None else usual


def expanded(path: str) -> Path:
    """Return `path` with its ``~`` replaced. Raises `UsageError` where no home directory is known for it."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: no home directory is known for it", "write the whole path") from error


def temporary(purpose: str) -> Path:
    """Return this user's own directory in the temporary directory, which need not exist. Raises `JobError`, with the
    `purpose`, where no temporary directory can be written."""
    return temporary_directory(purpose) / f"unirun-{os.geteuid()}"


def temporary_directory(purpose: str) -> Path:
    """Return ``$TMPDIR``, ``/tmp`` or ``/var/tmp``, of which one can be written. Raises `JobError`."""
    # Not `tempfile.gettempdir`, which gives another one when the disk is full: other commands would not find it.
    for place in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp")):
        if may_write(place):
            return Path(place).absolute()
    raise JobError(
        f"$TMPDIR, /tmp and /var/tmp are no place for {purpose}: they cannot be written",
        "set TMPDIR to a directory that you may write",
    )


def may_write(folder: str | Path) -> bool:
    """Return True if this user can make entries in the directory `folder`."""
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _below_home() -> Path | None:
    """``~/.local/state/unirun`` if it is there or can be made."""
    try:
        usual = Path.home() / ".local" / "state" / "unirun"
    except RuntimeError:
        return None
    return usual if os.path.lexists(usual) or _may_be_made(usual) else None


def _may_be_made(folder: Path) -> bool:
    """Return True if this user can make `folder` and its missing parents, so that no other user controls them."""
    there = next(each for each in folder.absolute().parents if os.path.lexists(each))
    try:
        return may_write(there) and exposure(there) is None
    except OSError:
        return False


# The log directory of a job: private, unless the directory that the user named is shared with its group.
#
# Directories are created 0700 and files 0600, whatever the umask. Below a ``--log-dir`` with the setgid bit, the usual
# way to share a directory with a group, they inherit its group's permission to read (2750 and 0640). Others have none.

MARK = ".unirun"
"""A file that marks a directory below ``--log-dir`` as unirun's, so that a later run may replace it. It holds the uid
of the job."""

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_log_dir(target: Path, uid: str) -> None:
    """Create `target` for the job `uid`; logs of an earlier job there are removed.

    Raises OSError, and `JobError` when the directory has other contents.
    """
    if target.is_dir() and any(target.iterdir()) and not (target / MARK).exists():
        raise JobError(
            f"{target} is not empty and holds no logs of unirun", "choose another --log-dir or --rdzv-id"
        )
    shutil.rmtree(target, ignore_errors=True)
    make_private(target.parent)
    folder = os.open(target.parent, _FOLDER)
    try:
        os.close(_make(folder, target.name))
    finally:
        os.close(folder)
    with os.fdopen(open_log(target, Path(MARK)), "w") as file:
        file.write(uid)


def open_log(base: Path, name: Path) -> int:
    """Open the file `name` below the directory `base` for appending, creating missing parts. Returns the descriptor.

    Symbolic links below `base` are not followed: a user who may write the directory could point one at any file of
    ours. Raises OSError.
    """
    folder = os.open(base, _FOLDER)
    try:
        for part in name.parent.parts:
            below = _enter(folder, part)
            os.close(folder)
            folder = below
        rights = _rights(folder) & 0o660
        return _with_rights(os.open(name.name, _APPEND, rights, dir_fd=folder), rights)
    finally:
        os.close(folder)


def _enter(folder: int, name: str) -> int:
    """Open the directory `name` in the one behind `folder`, creating it if missing. Returns the descriptor."""
    try:
        return _make(folder, name)
    except FileExistsError:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _make(folder: int, name: str) -> int:
    """Create and open the directory `name` in the one behind `folder`. Raises FileExistsError."""
    rights = _rights(folder)
    os.mkdir(name, rights, dir_fd=folder)
    return _with_rights(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder), rights)


def _rights(folder: int) -> int:
    """Mode of a new directory in the one behind `folder`."""
    mode = os.fstat(folder).st_mode
    return 0o700 | (mode & 0o050 if mode & stat.S_ISGID else 0)


def _with_rights(handle: int, rights: int) -> int:
    """Restore the `rights` of `handle` that the umask has removed. Returns `handle`."""
    try:
        mode = os.fstat(handle).st_mode
        if mode & rights != rights:
            os.fchmod(handle, stat.S_IMODE(mode) | rights)
    except BaseException:
        os.close(handle)
        raise
    return handle


HERE = "{job}"
"""Stands for the directory of the job in the URL of a store that is the same on all hosts."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of ``flock`` in file systems without locks: NFS whose lock service does not run, Lustre without ``flock``."""

_FIRST = "context.json"
UID_BEFORE = "uid.before"
ATTEMPT = "attempt_"
HEAD = "head"
HOSTS = "hosts.json"
"""Files that not every job has."""


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

    def addresses(self, node: str) -> Path:
        """The file with the addresses of the roles that have ports, replaced when one changes."""
        return self.path / f"addresses.{node}.json"

    def master_sockets(self) -> list[Path]:
        """Sockets of all masters, also of dead ones."""
        return sorted(self.path.glob("master.*.sock"))

    @property
    def store_url(self) -> str:
        """URL of the store with the job's context. Raises `JobError`."""
        return self._read("store").replace(HERE, str(self.path))

    @property
    def shared_store(self) -> str:
        """The URL as another node of the job is told it, which puts its own directory into it; empty for a store in
        this directory. Raises `JobError`."""
        url = self._read("store")
        return "" if url == self.own_store else url

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
        return self._read(UID_BEFORE) if (self.path / UID_BEFORE).exists() else ""

    @property
    def head(self) -> TcpAddress | None:
        """The address on which all masters of the job listen; None on a host that finds them by the store.

        Raises `JobError`.
        """
        # Imported here: most commands look at jobs of one host.
        from unirun.wire.frames import from_json

        try:
            return from_json(TcpAddress, read_file(self.path / HEAD))
        except FileNotFoundError:
            return None
        except (OSError, FrameError) as error:
            raise JobError(f"{self.path / HEAD} cannot be read: {error}") from error

    def _read(self, name: str) -> str:
        try:
            return read_file(self.path / name)
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
        """The directory of the job's batch job, which exists before the job and outlives it when it is requeued."""
        return self.path / "slurm"

    @property
    def attempts(self) -> tuple[int, ...]:
        """The numbers of the runs, counted from 0, of which files are kept since Slurm has requeued the job."""
        names = (path.name.removeprefix(ATTEMPT) for path in self.path.glob(f"{ATTEMPT}*"))
        return tuple(sorted(number for name in names if (number := natural(name)) is not None))

    def attempt(self, number: int) -> JobDir:
        """The files that are kept of an earlier run."""
        return JobDir(self.path / f"{ATTEMPT}{number}")

    @property
    def lock(self) -> Path:
        """Locked as long as an agent or the master of the job lives."""
        return self.path / "alive.lock"

    def worker_logs(self, worker: WorkerId) -> Path:
        """The directory with the output of one worker."""
        return self.logs / worker.role / str(worker.rank) / str(worker.incarnation)

    def first_context(self) -> str | None:
        """Read the context of a job that no master has led yet; None after that. Raises `JobError`."""
        try:
            return str(self.read_json(_FIRST).get("context", ""))
        except JobError:
            # Another master may be deleting it now.
            if (self.path / _FIRST).exists():
                raise
            return None

    def forget_first_context(self) -> None:
        """Delete the first context, which is in the store now."""
        (self.path / _FIRST).unlink(missing_ok=True)

    def write_first_context(self, context: str) -> None:
        """Write the context for the job's first master."""
        self.write_json(_FIRST, {"context": context})

    def own_logs(self) -> Path | None:
        """Directory of this job below ``--log-dir``; None without one, or when another job has replaced it."""
        target = self.logs.resolve()
        try:
            own = self.logs.is_symlink() and read_file(target / MARK) == self.uid
        except (OSError, JobError):
            return None
        return target if own else None

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace the file `name` atomically by `value`. Raises OSError."""
        # A master that has lost its term may write beside the next one.
        atomic.replace(self.path / name, json.dumps(value, separators=(",", ":")), contended=True)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read the JSON object in the file `name`. Raises `JobError`."""
        try:
            value = json.loads(read_file(self.path / name))
        except OSError as error:
            raise JobError(f"{self.path / name} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise JobError(f"{self.path / name} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise JobError(f"{self.path / name} holds no object")
        return value

    def alive(self) -> bool:
        """Return True if an agent or a master of this job lives, judged by its lock and so independent of
        reused pids.

        Where the file system has no locks, that is not known: the job counts as alive, so that nothing of it is
        removed.
        Raises `JobError` when the lock cannot be opened.
        """
        try:
            return self.is_locked()
        except OSError as error:
            if error.errno in NO_LOCKS:
                _tell_unknown(self.path.parent)
                return True
            raise JobError(f"{self.lock} cannot be opened: {error.strerror}") from error

    def is_locked(self) -> bool:
        """Return True if a process holds the job's lock. Raises OSError, one of `NO_LOCKS` where there are no locks."""
        try:
            handle = os.open(self.lock, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False


@functools.cache
def _tell_unknown(root: Path) -> None:
    report(f"unirun: the file system of {root} has no locks: it is not known which jobs there have died")


def jobs_root(node: str = "") -> Path:
    """Return the directory of this user's jobs, or with `node` of those that it is a node of. It need not exist.

    Raises `JobError` when another user could replace a job directory, and with it tokens, sockets and logs.
    """
    root = unirun_home() / "nodes" / node if node else unirun_home() / "jobs"
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


def job_at(run_id: str, node: str = "") -> JobDir:
    """Return the directory of job `run_id`, or that of its `node`; it need not exist. Raises `JobError` for an invalid
    id."""
    if not is_run_id(run_id):
        raise JobError(f"{run_id!r:.80} is no job id", RUN_ID_RULE)
    return JobDir(jobs_root(node) / run_id)


def directories_of_nodes(job: JobDir, attempt: int | None = None) -> list[JobDir]:
    """Return the directories that the nodes of `job` have beside its own, where hosts share the home
    directory; with `attempt`, those that have the files of that run. A job without a uid has none."""
    root = unirun_home() / "nodes"
    run = job if attempt is None else job.attempt(attempt)
    if not (run.path / "uid").exists():
        return []
    # A node without a later run still has those files in the place of the last run.
    found = (*root.glob(f"*/{job.run_id}"), *root.glob(f"*/{job.run_id}/{ATTEMPT}*"))
    return [
        each for each in map(JobDir, sorted(found)) if (each.path / "uid").exists() and each.uid == run.uid
    ]


def file_of(folders: Iterable[JobDir], who: WorkerId, name: str) -> Path | None:
    """Return the file `name` of a worker, of the first of `folders` that has it, or None. Where hosts share the home
    directory, that of the job may have a copy of what that of a node has."""
    return next(filter(Path.is_file, (folder.worker_logs(who) / name for folder in folders)), None)


def jobs_of_nodes() -> Iterator[JobDir]:
    """Yield the directories of this host as a node of jobs that were started elsewhere."""
    for path in sorted((unirun_home() / "nodes").glob("*/*")):
        if is_run_id(path.name) and path.is_dir() and not path.is_symlink():
            yield JobDir(path)


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


# Watch for the end of a process by its pidfd: no polling, and safe against reused pids.


class ProcessWatch:
    """Calls `when_gone` once, in the running loop, when process `pid` has ended or does not exist."""

    def __init__(self, pid: int, when_gone: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._when_gone = when_gone
        self._handle: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(when_gone)
            return
        self._loop.add_reader(self._handle, self._gone)

    def _gone(self) -> None:
        self.close()
        self._when_gone()

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        if self._handle is not None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None


# The choice of the job that a command means by an id, a part of one, or nothing.

MATCHES_SHOWN = 5


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
