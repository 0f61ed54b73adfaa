"""What is left of a job that is over: it is measured, and taken away."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

from unirun.errors import JobError, StoreError
from unirun.rendezvous.election import campaign, leader_of
from unirun.rendezvous.jobdir import JobDir, one_at_a_time
from unirun.rendezvous.keys import index_key, job_prefix
from unirun.rendezvous.store.protocol import Store
from unirun.wire.address import UnixAddress

TTL = 10.0
"""Seconds for which whoever clears a job leads it, at most: no master does anything with it in that time."""

MISSING = 15.0
"""Seconds without a master after which a job that has left no end has none: agents start another within less."""


def size_here(job: JobDir) -> int:
    """The bytes that the files of `job` take on the disk, with those of its own log directory elsewhere."""
    return sum(_size(path) for path in _directories(job))


def clear_here(job: JobDir) -> int:
    """Remove the directory of `job`, and its own log directory elsewhere. Returns the bytes that are free now.

    Raises `JobError` when it runs, or when something cannot be removed.
    """
    with one_at_a_time(job.path.parent):
        if job.alive():
            raise JobError(f"job {job.run_id} is running", f"stop it with: unirun stop {job.run_id}")
        freed = 0
        try:
            # The directory at last: as long as it is there, what is left can be found.
            for path in _directories(job):
                size = _size(path)
                shutil.rmtree(path)
                freed += size
        except OSError as error:
            raise JobError(f"job {job.run_id} cannot be removed: {error}", "who owns its files?") from error
    return freed


def _directories(job: JobDir) -> tuple[Path, ...]:
    logs = job.own_logs()
    return (logs, job.path) if logs else (job.path,)


def _size(path: Path) -> int:
    """What ``du`` says."""
    # A link to a directory is among the folders, and is not entered.
    below = (os.path.join(at, name) for at, folders, files in os.walk(path) for name in (*folders, *files))
    found = 0
    for entry in chain([str(path)], below):
        with suppress(FileNotFoundError):
            found += os.lstat(entry).st_blocks * 512
    return found


def size_in(store: Store, run_id: str) -> int:
    """The bytes of everything that `store` has of a job: keys and values."""
    items = [*store.get_prefix(job_prefix(run_id)).items]
    line = store.get(index_key(run_id))
    return sum(len(item.key) + len(item.value.encode()) for item in (*items, *([line] if line else ())))


def clear_in(store: Store, run_id: str, *, ended: bool) -> int:
    """Remove everything that `store` has of a job. Returns how many bytes that were.

    Raises `JobError` when somebody leads it; one that has not `ended` is watched for a while, as its next master may
    be on its way. `StoreError`.
    """
    size = size_in(store, run_id)
    if not size:
        return 0
    deadline = time.monotonic() + (0.0 if ended else MISSING)
    while (leader := leader_of(store, job_prefix(run_id))) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    term = None
    if leader is None:
        # From now on no master writes, whatever it was about to do.
        term = campaign(store, job_prefix(run_id), UnixAddress.here(""), os.getpid(), ttl=TTL)
        leader = leader_of(store, job_prefix(run_id))
    if term is None:
        where = f" on host {leader.address.host}" if leader else ""
        raise JobError(f"job {run_id} is led{where}", f"stop it there with: unirun stop {run_id}")
    if not store.txn([term.fence], deletes=[job_prefix(run_id), index_key(run_id)]).succeeded:
        raise StoreError(f"another took job {run_id} while it was being removed", "try again")
    term.resign()
    return size
