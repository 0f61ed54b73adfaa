"""Measure and remove the files and store keys of a finished job."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

from unirun.errors import JobError, StoreError
from unirun.observe.jobdir import JobDir, directories_of_nodes
from unirun.rendezvous.creation import one_at_a_time
from unirun.rendezvous.election import campaign, leader_of
from unirun.rendezvous.keys import index_key, job_prefix
from unirun.rendezvous.store.protocol import Store
from unirun.wire.address import UnixAddress

TTL = 10.0
"""Lease of the term that is taken to clear a job, in seconds: no master writes in that time."""

MISSING = 15.0
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
    `MISSING` seconds, as its next master may be starting.
    """
    size = size_in(store, run_id)
    if not size:
        return 0
    deadline = time.monotonic() + (0.0 if ended else MISSING)
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
