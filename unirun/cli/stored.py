"""Finding jobs: in the directories of this user, or in a store, from hosts without access to the job's directory."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from unirun.errors import JobElsewhere, JobError, StoreRefused, UsageError
from unirun.observe.jobdir import HOSTS, JobDir, all_jobs, choose_job, expanded, job_at
from unirun.observe.status import ENDED, JobStatus, Summary, read_status, runs
from unirun.rendezvous.election import Leader, job_prefix, leader_of, read_index
from unirun.rendezvous.store.protocol import SqliteAddress, Store, parse_address
from unirun.rendezvous.store.url import open_store, store_url
from unirun.values import Value
from unirun.wire.address import UnixAddress


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store at `url`, which must exist. Raises `UsageError`, `StoreError`."""
    if not may_be_there(url):
        raise StoreRefused(f"there is no store {url}", "a job makes it; is this the right file?")
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


def may_be_there(url: str) -> bool:
    """Return True if a store exists at `url`; True where only a connection can tell."""
    address = parse_address(url)
    return not isinstance(address, SqliteAddress) or expanded(address.path).exists()


def store_to_ask(option: str | None, name: str | None) -> str | None:
    """The store in which a command looks for the job `name`: that of ``--store``, else, when no directory of this user
    fits, that of the environment. None: look in the directories."""
    if option is not None:
        return option
    here = [job.run_id for job in all_jobs()]
    fits = bool(here) if name is None else any(run_id.startswith(name) for run_id in here)
    return None if fits else store_url(None)


def find_job(name: str | None) -> JobDir:
    """The job of this user whose id is `name` or starts with it; without a name the newest that runs, or the newest.

    Raises `JobError`.
    """
    jobs = {job.run_id: job for job in all_jobs()}
    return jobs[choose_job(name, tuple(jobs), lambda run_id: runs(jobs[run_id]))]


def find_summary(store: Store, name: str | None) -> Summary:
    """The job of `store` that `name` means, as in `find_job`. Raises `JobError`, `StoreError`."""
    jobs, refused = read_index(store)
    summaries = {summary.run_id: summary for summary in jobs}
    try:
        return summaries[choose_job(name, tuple(summaries), lambda run_id: _is_led(store, summaries[run_id]))]
    except JobError:
        # The job may be on a line of the index that cannot be read.
        if refused:
            raise refused[0] from None
        raise


def running_jobs(option: str | None) -> list[str]:
    """The ids of the jobs that run, the oldest first, where a command without a name looks for one."""
    url = store_to_ask(option, None)
    if url is None:
        return [job.run_id for job in all_jobs() if runs(job)]
    with opened(url) as store:
        jobs, _ = read_index(store)
        return [summary.run_id for summary in jobs if _is_led(store, summary)]


def _is_led(store: Store, summary: Summary) -> bool:
    return summary.phase not in ENDED and leader_of(store, job_prefix(summary.run_id)) is not None


def directory_of(run_id: str, uid: str) -> JobDir | None:
    """The directory of a job, when this user has it here."""
    job = job_at(run_id)
    try:
        return job if job.uid == uid else None
    except JobError:
        return None


def find_status(option: str | None, name: str | None) -> tuple[JobStatus, JobDir | StoredJob]:
    """The status of the job that a command is about, and where it was found. Raises `JobError`, `StoreError`."""
    url = store_to_ask(option, name)
    if url is None:
        job = _current(find_job(name))
        return read_status(job), job
    with opened(url) as store:
        stored = read_stored(store, find_summary(store, name).run_id)
    return stored.status, stored


def find_here(option: str | None, name: str | None, command: str) -> JobDir:
    """The directory of the job that `command` is about. Raises `JobElsewhere` when it is on another host."""
    url = store_to_ask(option, name)
    if url is None:
        return _current(find_job(name))
    with opened(url) as store:
        summary = find_summary(store, name)
        job = directory_of(summary.run_id, summary.uid)
        if job is not None:
            return job
        stored = read_stored(store, summary.run_id)
    raise JobElsewhere(
        f"job {summary.run_id} {'runs' if stored.leader else 'ran'} on host {stored.host}; its directory is not here",
        f"call unirun {command} {summary.run_id} there",
        host=stored.host,
    )


def _current(job: JobDir) -> JobDir:
    """The directory of a job; if it is a copy of what other hosts have, it is brought up to date."""
    if (job.path / HOSTS).exists():
        # Imported here: asyncio's subprocesses are needed for nothing else.
        from unirun.launcher.hosts.copying import make_current

        make_current(job)
    return job


class StoredJob(Value):
    """A job as its context in a store describes it.

    `status` has the term of the last write, `store` is the URL of the store, `leader` is the master that leads the job
    now, and `logs` is a directory on `hosts`.
    """

    status: JobStatus
    store: str
    leader: Leader | None
    logs: str
    hosts: tuple[str, ...]

    @property
    def host(self) -> str:
        """The host of its master, or of its first agent."""
        return self.leader.address.host if self.leader else self.hosts[0]


def read_stored(store: Store, run_id: str) -> StoredJob:
    """The job `run_id` as the store has it. Raises `JobError` when there is no context of it, `StoreError`."""
    # Imported here: listing jobs needs no spec.
    from unirun.failover.context import load
    from unirun.failover.status_views import status_of

    prefix = job_prefix(run_id)
    state = load(store, run_id)
    if state is None:
        raise JobError(
            f"the store has no context of job {run_id}", "it was removed, or is being written anew"
        )
    head = store.get(f"{prefix}head")
    try:
        epoch = json.loads(head.value)["epoch"] if head else 0
        hosts = tuple(dict.fromkeys(agent.host for agent in state.agents.values())) or state.placement.nodes
        status = status_of(state, {}, {}, epoch=epoch)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        problem = f"the context of job {run_id} is not whole or not unirun's: {error!r}"
        raise StoreRefused(problem, "does the store's prefix belong to something else?") from error
    return StoredJob(status, store.url, leader_of(store, prefix), state.logs, hosts)


def only_one(option: str | None, command: str) -> str | None:
    """The only running job, or None. Raises `UsageError` when several run."""
    running = running_jobs(option)
    if len(running) > 1:
        raise UsageError(f"{len(running)} jobs run: {', '.join(running)}", f"name one: unirun {command} JOB")
    return running[0] if running else None


def refuse_elsewhere(job: JobDir, command: str) -> None:
    """Raise `JobElsewhere` when `job`, whose directory is shared, is led on another host and not reached by TCP."""
    if job.head is not None:
        return
    with opened(job.store_url) as store:
        leader = leader_of(store, job_prefix(job.run_id))
    address = leader.address if leader is not None else None
    if isinstance(address, UnixAddress) and address.host != socket.gethostname():
        raise JobElsewhere(
            f"job {job.run_id} runs on host {address.host}",
            f"call unirun {command} {job.run_id} there",
            host=address.host,
        )
