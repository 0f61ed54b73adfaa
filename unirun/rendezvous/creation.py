"""A job on disk and in a store: made, inherited from a job of the same id, measured and removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from unirun import atomic
from unirun.errors import JobError, StoreError, UsageError
from unirun.observe.jobdir import (
    ATTEMPT,
    HEAD,
    HERE,
    NO_LOCKS,
    UID_BEFORE,
    JobDir,
    directories_of_nodes,
    expanded,
    job_at,
    make_log_dir,
)
from unirun.observe.ownership import is_ours, make_private
from unirun.rendezvous.election import campaign, index_key, job_prefix, leader_of
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import anchored, open_store
from unirun.wire.address import TcpAddress, UnixAddress
from unirun.wire.credentials import AUTHORITY, CERTIFICATE, TLS_FOLDER
from unirun.wire.messages import EtcdMember, Offer

LOCK_TIMEOUT = 60.0
"""Seconds for which another command may create or remove jobs."""

_LOCK_RETRY_INTERVAL = 0.01


def new_uid() -> str:
    """Return a new uid for a job."""
    return os.urandom(8).hex()


def create_job(
    run_id: str,
    token: bytes,
    log_dir: str | None = None,
    store: str | None = None,
    *,
    batch: bool = False,
    restarts: int = 0,
    uid: str | None = None,
    node: str = "",
    head: TcpAddress | None = None,
) -> tuple[JobDir, int]:
    """Create the directory of a new job, with its token and its log directory; `store` is a URL. What a finished job
    of the same id has left is removed, but for the files of the `batch` job that runs this one. When Slurm has requeued
    that, `restarts` times, the store is kept too, and what the run before has written is moved to ``attempt_N``.

    With `node` it is the directory of that node of a job which was launched elsewhere, with the `uid` from there. Its
    masters are found at `head`, or by the store.

    Returns it with the descriptor of its lock, which agent and master inherit: as long as one process has it open,
    the job counts as running. Replaces a finished job of the same id, as it is usual to reuse one ``--rdzv-id``.
    Raises `JobError` when a running job has the id, or a directory cannot be created.
    """
    job = job_at(run_id, node)
    try:
        make_private(job.path.parent)
        # Checked again: another user may have created it in the meantime.
        job = job_at(run_id, node)
        with one_at_a_time(job.path.parent):
            if os.path.lexists(job.path):
                _make_room(job, batch=batch, restarts=restarts, node=bool(node))
            lock = _make(job, token, uid or new_uid(), store or job.own_store, head)
    except OSError as error:
        raise cannot_be_made(job, error) from error
    try:
        _make_logs(job, log_dir, restarts)
    except JobError:
        discard_job(job, lock)
        raise
    return job, lock


def cannot_be_made(job: JobDir, error: OSError) -> JobError:
    """The error of a directory that cannot be made, or not be locked."""
    if error.errno in NO_LOCKS:
        return no_locks(job.path.parent, error)
    return JobError(
        f"the job's directory {job.path} cannot be made: {(error.strerror or str(error)).lower()}",
        "set UNIRUN_HOME to a directory that you may write",
    )


def no_locks(root: Path, error: OSError) -> JobError:
    """The error of a file system in which nothing can be locked."""
    return JobError(
        f"jobs cannot be kept in {root}, whose file system has no locks: {(error.strerror or str(error)).lower()}",
        "set UNIRUN_HOME to a directory on a local disk",
    )


def discard_job(job: JobDir, lock: int) -> None:
    """Undo `create_job`, of a job that does not start. `lock` is closed. Earlier runs of a requeued job are kept."""
    if logs := job.own_logs():
        shutil.rmtree(logs, ignore_errors=True)
    with suppress(OSError):
        _clear(job.path, (*_OF_REQUEUED, *_attempts(job)) if job.attempts else ())
    os.close(lock)


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Exclusive lock on `root`: commands must not create or remove a job of the same id concurrently.

    `root` becomes 0700 if it is this user's, as every user that can open a directory can lock it. Raises OSError, and
    `JobError` when the file system has no locks, or another process has held this one for `LOCK_TIMEOUT` seconds.
    """
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if is_ours(info) and info.st_mode & 0o077:
            os.fchmod(handle, 0o700)
        _lock(handle, root)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, root: Path) -> None:
    end = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                problem = f"another process has held the lock of {root} for {LOCK_TIMEOUT:g} s"
                raise JobError(problem, f"see which: fuser -v {root}") from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise no_locks(root, error) from error
            raise
        time.sleep(_LOCK_RETRY_INTERVAL)


def _make_room(job: JobDir, *, batch: bool, restarts: int, node: bool) -> None:
    """Remove the files of a finished job of the same id, except those that a batch job keeps."""
    if job.is_locked():
        raise JobError(f"job {job.run_id} is running", f"stop it with: unirun stop {job.run_id}")
    if not restarts or job.path.is_symlink():
        _clear(job.path, _OF_BATCH if batch else ())
        return
    _keep_attempt(job, restarts - 1)
    if not node and (job.path / "uid").exists():
        (job.path / "uid").replace(job.path / UID_BEFORE)
    _clear(job.path, (*_attempts(job), *(() if node else _OF_REQUEUED)))


def _keep_attempt(job: JobDir, number: int) -> None:
    """Move the files of the last run to ``attempt_N``, unless that is there: then it was made earlier in this start of
    the batch job."""
    kept = job.attempt(number)
    if not (job.path / "uid").exists() or kept.path.exists():
        return
    kept.path.mkdir(0o700)
    atomic.replace(kept.path / "uid", job.uid)
    written = (job.logs, job.events, job.metrics, job.state, job.master_log, *job.path.glob("agent.*.log"))
    for path in written:
        # With --log-dir, the logs are a link, whose target stays.
        if os.path.lexists(path):
            path.rename(kept.path / path.name)


def _attempts(job: JobDir) -> tuple[str, ...]:
    return tuple(job.attempt(number).path.name for number in job.attempts)


def _make(job: JobDir, token: bytes, uid: str, store: str, head: TcpAddress | None) -> int:
    job.path.mkdir(0o700, exist_ok=True)
    # The umask may have removed permissions of the owner.
    job.path.chmod(0o700)
    atomic.replace(job.token, token.hex())
    # A follower may open it before the master does.
    job.events.touch(mode=0o600)
    atomic.replace(job.path / "uid", uid)
    if head is None:
        atomic.replace(job.path / "store", store)
    else:
        job.write_json(HEAD, {"type": "tcp", "addr": head.addr, "port": head.port, "node": head.node})
    lock = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        discard_job(job, lock)
        raise
    return lock


_OF_BATCH = ("slurm", "state.json")
"""The mark of the submitting process that the job is pending, which is its state until its master writes one."""

_OF_REQUEUED = ("slurm", UID_BEFORE, "store.db", "store.db-wal", "store.db-shm")


def _clear(path: Path, keep: Collection[str]) -> None:
    """Remove the directory `path`, or with names in `keep` all that is in it but those. Raises OSError for a link."""
    if not keep or path.is_symlink():
        shutil.rmtree(path)
        return
    for entry in [entry for entry in os.scandir(path) if entry.name not in keep]:
        remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
        remove(entry.path)


def _make_logs(job: JobDir, log_dir: str | None, restarts: int) -> None:
    """Create the log directory, or with ``--log-dir`` a link to one there. That of a requeued job is in the
    log directory of its first run."""
    try:
        if log_dir is None:
            make_private(job.logs)
        else:
            target = expanded(log_dir).absolute() / job.run_id
            target = target / f"{ATTEMPT}{restarts}" if restarts else target
            make_log_dir(target, job.uid)
            job.logs.symlink_to(target)
    except OSError as error:
        raise JobError(
            f"logs cannot be written to {log_dir or job.logs}: {(error.strerror or str(error)).lower()}",
            "choose another --log-dir",
        ) from error


# Measure and remove the files and store keys of a finished job.

TTL = 10.0
"""Lease of the term that is taken to clear a job, in seconds: no master writes in that time."""

ABANDONED_TIMEOUT = 15.0
"""Seconds without a master after which a job that has not ended counts as abandoned; agents start a new master in
less."""


def size_here(job: JobDir) -> int:
    """Disk usage of `job` in bytes, including its own log directory elsewhere."""
    return sum(_size(path) for path in _directories(job))


def clear_here(job: JobDir) -> int:
    """Remove the directory of `job`, and its own log directory elsewhere. Returns the number of bytes freed.

    Raises `JobError` when the job runs or a file cannot be removed.
    """
    with one_at_a_time(job.path.parent):
        if job.alive():
            raise JobError(f"job {job.run_id} is running", f"stop it with: unirun stop {job.run_id}")
        freed = 0
        if not os.path.lexists(job.path):
            # Another gc was quicker.
            return freed
        try:
            # The job directory is removed last: it is needed to find the rest after a failure.
            for path in _directories(job):
                size = _size(path)
                shutil.rmtree(path)
                freed += size
        except OSError as error:
            raise JobError(f"job {job.run_id} cannot be removed: {error}", "who owns its files?") from error
    return freed


def _directories(job: JobDir) -> tuple[Path, ...]:
    # The logs of the first run have those of later ones in them.
    runs = (job, *(job.attempt(number) for number in reversed(job.attempts)))
    logs = [found for run in runs if (found := run.own_logs())]
    nodes = [each.path for each in directories_of_nodes(job) if each != job]
    return (*nodes, *logs, job.path)


def _size(path: Path) -> int:
    """Disk usage of a directory in bytes, as ``du`` counts it."""
    # os.walk lists a link to a directory among the folders, and does not enter it.
    below = (os.path.join(at, name) for at, folders, files in os.walk(path) for name in (*folders, *files))
    found = 0
    for entry in chain([str(path)], below):
        with suppress(FileNotFoundError):
            found += os.lstat(entry).st_blocks * 512
    return found


def size_in(store: Store, run_id: str) -> int:
    """Size in bytes of all keys and values of a job in `store`."""
    items = [*store.get_prefix(job_prefix(run_id)).items]
    line = store.get(index_key(run_id))
    return sum(len(item.key) + len(item.value.encode()) for item in (*items, *([line] if line else ())))


def clear_in(store: Store, run_id: str, *, ended: bool) -> int:
    """Remove all keys of a job from `store`. Returns their size in bytes.

    Raises `JobError` when a master leads the job, and `StoreError`. A job that has not `ended` is first watched for
    `ABANDONED_TIMEOUT` seconds, as its next master may be starting.
    """
    size = size_in(store, run_id)
    if not size:
        return 0
    deadline = time.monotonic() + (0.0 if ended else ABANDONED_TIMEOUT)
    while (leader := leader_of(store, job_prefix(run_id))) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    term = None
    if leader is None:
        # The new term fences every earlier master.
        term = campaign(store, job_prefix(run_id), UnixAddress.here(""), os.getpid(), ttl=TTL)
        leader = leader_of(store, job_prefix(run_id))
    if term is None:
        where = f" on host {leader.address.host}" if leader else ""
        raise JobError(f"job {run_id} is led{where}", f"stop it there with: unirun stop {run_id}")
    if not store.txn([term.fence], deletes=[job_prefix(run_id), index_key(run_id)]).succeeded:
        raise StoreError(f"another took job {run_id} while it was being removed", "try again")
    term.resign()
    return size


# ``--store etcd``: an etcd of the job's own, with members on up to three of its nodes.
#
# The job goes on when a node is lost, the head included, though nobody runs an etcd for it: of three members two are
# enough. Members are processes of the nodes' agents, and end with them. Both ends of each connection have certificates
# of the job (`unirun.wire.certificates`).

OWN_ETCD = "etcd"
"""The value of ``--store`` that stands for this."""

MEMBERS = 3
"""With an even number as many would be lost as with one less."""

ETCD_HISTORY_TIME = "10m"
"""The age at which etcd forgets values that are replaced: whoever watches reads them within seconds."""

ETCD_ELECTION = ("--heartbeat-interval=50", "--election-timeout=500")
"""Half of etcd's own values: members are in one network. Leases live for the time of an election longer after it."""

ETCD_START_TIMEOUT = 30.0
"""Seconds in which the members must have found each other."""

ETCD_POLL_INTERVAL = 0.1


def possible_member(node: str, addr: str) -> EtcdMember | None:
    """A member on this host, with ports at `addr` that are free now; None where etcd is not installed."""
    if shutil.which("etcd") is None:
        return None
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    with socket.socket(family) as client, socket.socket(family) as peer:
        for sock in (client, peer):
            sock.bind((addr, 0))
        return EtcdMember(node, addr, client.getsockname()[1], peer.getsockname()[1])


def choose_members(able: Sequence[EtcdMember]) -> tuple[EtcdMember, ...]:
    """The members among nodes that can run one: three, or one. Raises `UsageError`."""
    if not able:
        raise UsageError("--store etcd: no node has the program etcd", "install etcd-server on three of them")
    return tuple(able[: MEMBERS if len(able) >= MEMBERS else 1])


def store_for(
    store: str | None, offers: Sequence[Offer], *, insecure: bool
) -> tuple[str | None, tuple[EtcdMember, ...]]:
    """The URL of the store that ``--store`` means for a job on hosts with these `offers`, and the members to start.
    Raises `UsageError`."""
    if store != OWN_ETCD:
        return (anchored(store) if store is not None else None), ()
    members = choose_members([each.etcd for each in offers if each.etcd is not None])
    return url_of(members, insecure=insecure), members


def url_of(members: Sequence[EtcdMember], *, insecure: bool) -> str:
    """The URL of the store, the same on all hosts: `JobDir.store_url` puts the job's directory into it."""
    endpoints = ",".join(_place(each.addr, each.client) for each in members)
    tls, node = f"{HERE}/{TLS_FOLDER}/{AUTHORITY}", f"{HERE}/{TLS_FOLDER}/{CERTIFICATE}"
    return f"etcd://{endpoints}" + ("" if insecure else f"?cacert={tls}&cert={node}&key={node}")


def command_of(members: Sequence[EtcdMember], me: EtcdMember, job: JobDir, *, insecure: bool) -> list[str]:
    """The command that runs the member `me`. Its data is in the directory `job`."""
    scheme = "http" if insecure else "https"

    def url(addr: str, port: int) -> str:
        return f"{scheme}://{_place(addr, port)}"

    client, peer = url(me.addr, me.client), url(me.addr, me.peer)
    tls = job.path / TLS_FOLDER
    files = (
        ("trusted-ca-file", tls / AUTHORITY),
        ("cert-file", tls / CERTIFICATE),
        ("key-file", tls / CERTIFICATE),
    )
    secure = [f"--{prefix}{name}={file}" for prefix in ("", "peer-") for name, file in files]
    return [
        "etcd",
        f"--name={me.node}",
        f"--data-dir={job.path / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        "--initial-cluster=" + ",".join(f"{each.node}={url(each.addr, each.peer)}" for each in members),
        f"--initial-cluster-token={job.uid}",
        f"--auto-compaction-retention={ETCD_HISTORY_TIME}",
        *ETCD_ELECTION,
        *([] if insecure else [*secure, "--client-cert-auth", "--peer-client-cert-auth"]),
    ]


def wait_until_up(url: str) -> None:
    """Wait until the members answer. Raises `StoreError` after `ETCD_START_TIMEOUT` seconds."""
    end = time.monotonic() + ETCD_START_TIMEOUT
    while True:
        try:
            store = open_store(url)
            try:
                store.get("up")
            finally:
                store.close()
            return
        except StoreError:
            if time.monotonic() > end:
                raise
        time.sleep(ETCD_POLL_INTERVAL)


def _place(addr: str, port: int) -> str:
    return f"[{addr}]:{port}" if ":" in addr else f"{addr}:{port}"
