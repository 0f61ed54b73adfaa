"""``unirun ls``, ``gc`` and ``stop``: the jobs of this user or of a store, listed, removed and ended."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec import to_builtins

from unirun.cli.output import age, duration, print_table
from unirun.cli.stored import (
    directory_of,
    find_here,
    may_be_there,
    only_one,
    opened,
    refuse_elsewhere,
)
from unirun.errors import JobError, StoreError, StoreRefused, UnirunError, UsageError
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.batchjob import batch_state, read_batch
from unirun.observe.jobdir import JobDir, all_jobs, jobs_of_nodes
from unirun.observe.status import ENDED, Summary, is_alive, read_status, read_summary
from unirun.rendezvous.creation import clear_here, clear_in, size_here, size_in
from unirun.rendezvous.election import Leader, job_prefix, leader_of, read_index
from unirun.rendezvous.masters import call_master, follow_to_end
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import store_url
from unirun.spec.read import show_size
from unirun.values import Value, natural
from unirun.wire.messages import Stop

HEADERS = ("JOB", "STATE", "EXIT", "ROLES", "STARTED", "TOOK", "MASTER")


class KnownJob(Value):
    """A job: its directory `here` and its context in the store at `url`, each None if there is none.

    A store in the directory counts as the directory. `phase` is lost when nobody leads the job; `ended` is when it
    ended, or was last seen. `summary` is None for a directory without a readable state.
    """

    run_id: str
    phase: str
    ended: float
    here: JobDir | None
    url: str | None
    summary: Summary | None
    leader: Leader | None = None

    @property
    def over(self) -> bool:
        """True if the job is surely over: its end was written, or the lock of its processes is free."""
        return self.phase in ENDED and (self.phase != "lost" or self.here is not None)


def list_jobs(options: Namespace) -> int:
    """List jobs, the newest last. Returns 0."""
    found = [] if options.store else [*map(_here, all_jobs())]
    url = store_url(options.store)
    trouble: StoreError | None = None
    with ExitStack() as stack:
        stores = _Stores(stack)
        try:
            if url:
                store, index = stores.at(url)
                found += [
                    _there(store, each, url)
                    for each in index.values()
                    if options.store or directory_of(each.run_id, each.uid) is None
                ]
            trouble = next(iter(stores.refused), None)
        except StoreError as error:
            # The jobs of this host are listed in any case.
            trouble = error
    found = listed(found, running=options.running, newest=options.newest)
    if options.json:
        for each in found:
            # A directory without a readable state is listed for people only.
            with contextlib.suppress(JobError):
                print(json.dumps(_object(each)))
    else:
        columns = len(HEADERS) - (url is None)
        print_table(HEADERS[:columns], [_row(each)[:columns] for each in found])
    if trouble is not None:
        raise trouble
    return 0


def listed(jobs: Sequence[KnownJob], *, running: bool = False, newest: int | None = None) -> list[KnownJob]:
    """The jobs that are listed, of `jobs` from the oldest to the newest: all, those `running`, the `newest` ones."""
    found = [each for each in jobs if not running or each.phase not in ENDED]
    return found if newest is None else found[len(found) - min(newest, len(found)) :]


def _row(job: KnownJob) -> list[str]:
    summary, leader = job.summary, job.leader
    if summary is None:
        return [job.run_id, "starting" if job.phase == "running" else job.phase, "", "", "", "", "here"]
    where = "here" if job.here else "" if summary.phase in ENDED else "nobody"
    now = time.time()
    return [
        job.run_id,
        summary.phase,
        "" if summary.code is None else str(summary.code),
        ",".join(f"{name}={count}" for name, count in summary.roles.items()),
        f"{age(now - summary.started)} ago",
        age((summary.ended or now) - summary.started),
        f"{leader.address.host}:{leader.pid}" if leader else where,
    ]


def _object(job: KnownJob) -> dict[str, Any]:
    """A job for programs. Raises `JobError` for a directory without a readable state."""
    if job.here is not None:
        return {**read_status(job.here).to_json(), "dir": str(job.here.path)}
    assert job.summary is not None
    return {
        **to_builtins(job.summary),
        "roles": [{"name": name, "count": count} for name, count in job.summary.roles.items()],
        "dir": None,
        "store": job.url,
        "leader": job.leader.to_json() if job.leader else None,
    }


# ``unirun gc [JOB…]``: remove the directories and contexts of jobs that have finished or are lost.


def collect(options: Namespace) -> int:
    """Remove jobs. Returns 0, or the exit code of the first that could not be removed."""
    before = time.time() - duration("--older-than", options.older_than)
    with ExitStack() as stack:
        stores = _Stores(stack)
        found = list(_found(options.store, stores))
        chosen, errors = _named(options.jobs, found) if options.jobs else (_old(found, before), [])
        removed: list[tuple[KnownJob, int]] = []
        for remains in chosen:
            try:
                removed.append((remains, _clear(remains, stores, dry=options.dry_run)))
            except UnirunError as error:
                errors.append(error)
        errors += stores.refused
    if removed or not errors:
        _show_remains(removed, dry=options.dry_run, as_json=options.json)
    for each in errors:
        warn(str(each))
    return errors[0].exit_code if errors else 0


class _Stores:
    """Stores by their URLs, each opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[str, tuple[Store, dict[str, Summary]]] = {}
        self.refused: list[StoreRefused] = []
        """Errors of jobs whose lines in the index cannot be read."""

    def at(self, url: str) -> tuple[Store, dict[str, Summary]]:
        """The store at `url` and its index, by job."""
        if url not in self._open:
            store = self._stack.enter_context(opened(url))
            jobs, refused = read_index(store)
            self.refused += refused
            self._open[url] = store, {summary.run_id: summary for summary in jobs}
        return self._open[url]


def _found(option: str | None, stores: _Stores) -> Iterator[KnownJob]:
    """The remains of all jobs, also of running ones. A job of the store with a directory here is found once."""
    known: set[JobDir] = set()
    for job in () if option else all_jobs():
        known.add(job)
        yield _here(job, _elsewhere(job))
    for job in () if option else jobs_of_nodes():
        # Where hosts share a home directory, they are a part of the job's own, and go with it.
        if directory_of(job.run_id, _uid(job)) is None:
            yield _here(job, _elsewhere(job))
    url = store_url(option)
    if url is None or not (option or may_be_there(url)):
        return
    store, index = stores.at(url)
    for summary in index.values():
        job_here = directory_of(summary.run_id, summary.uid)
        if job_here is None:
            yield _there(store, summary, url)
        elif job_here not in known:
            yield _here(job_here, _elsewhere(job_here))


def _here(job: JobDir, url: str | None = None) -> KnownJob:
    try:
        summary = read_summary(job)
    except JobError:
        phase = "running" if is_alive(job) else "lost"
        return KnownJob(job.run_id, phase, _last_seen(job), job, url, None)
    return KnownJob(job.run_id, summary.phase, summary.ended or _last_seen(job), job, url, summary)


def _elsewhere(job: JobDir) -> str | None:
    """The store with the context of a job, None if it is in the directory."""
    try:
        return job.store_url if job.store_url != job.own_store and may_be_there(job.store_url) else None
    except JobError:
        return None


def _uid(job: JobDir) -> str:
    """The uid of a job; empty where its directory was made or removed in part."""
    try:
        return job.uid
    except JobError:
        return ""


def _last_seen(job: JobDir) -> float:
    for path in (job.state, job.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return time.time()


def _there(store: Store, summary: Summary, url: str) -> KnownJob:
    ended = summary.phase in ENDED
    leader = None if ended else leader_of(store, job_prefix(summary.run_id))
    phase = summary.phase if ended or leader else "lost"
    return KnownJob(summary.run_id, phase, summary.ended or summary.started, None, url, summary, leader)


def _named(names: Sequence[str], found: Sequence[KnownJob]) -> tuple[list[KnownJob], list[UnirunError]]:
    """The jobs with exactly these ids; of two with one id, the one with a directory here."""
    by_id = {remains.run_id: remains for remains in reversed(found)}
    chosen: list[KnownJob] = []
    errors: list[UnirunError] = []
    for name in dict.fromkeys(names):
        remains = by_id.get(name)
        if remains is None:
            longer = ", ".join(sorted(run_id for run_id in by_id if run_id.startswith(name))[:5])
            remedy = f"write the whole id: {longer}" if longer else "unirun ls shows the jobs there are"
            errors.append(JobError(f"no job is called {name!r}", remedy))
        elif remains.phase not in ENDED:
            errors.append(JobError(f"job {name} is running", f"stop it with: unirun stop {name}"))
        else:
            chosen.append(remains)
    return chosen, errors


def _old(found: Sequence[KnownJob], before: float) -> list[KnownJob]:
    """Jobs that are surely over. One on another host may be cut off from the store and still run."""
    return [remains for remains in found if remains.over and remains.ended <= before]


def _clear(remains: KnownJob, stores: _Stores, *, dry: bool) -> int:
    """Remove one job, or with `dry` only measure it. Returns the number of bytes."""
    freed = 0
    if remains.here is not None and is_alive(remains.here):
        raise JobError(f"job {remains.run_id} is running", f"stop it with: unirun stop {remains.run_id}")
    if remains.url is not None:
        freed += _clear_store(remains, remains.url, stores, dry=dry)
    # The directory last, because it names the store that has the rest.
    if remains.here is not None:
        freed += size_here(remains.here) if dry else clear_here(remains.here)
    return freed


def _clear_store(remains: KnownJob, url: str, stores: _Stores, *, dry: bool) -> int:
    try:
        store, index = stores.at(url)
        line = index.get(remains.run_id)
        if remains.here is not None and (line is None or line.uid != _uid(remains.here)):
            # Another job has taken its id, or a gc elsewhere was quicker.
            return 0
        return size_in(store, remains.run_id) if dry else clear_in(store, remains.run_id, ended=remains.over)
    except StoreError as error:
        raise StoreError(f"job {remains.run_id} is left as it is: {error}") from error


def _show_remains(removed: Sequence[tuple[KnownJob, int]], *, dry: bool, as_json: bool) -> None:
    if as_json:
        for remains, freed in removed:
            print(
                json.dumps(
                    {
                        "run_id": remains.run_id,
                        "phase": remains.phase,
                        "ended": remains.ended,
                        "dir": str(remains.here.path) if remains.here else None,
                        "store": remains.url,
                        "bytes": freed,
                        "removed": not dry,
                    }
                )
            )
        return
    now = time.time()
    if removed:
        rows = [[r.run_id, r.phase, f"{age(now - r.ended)} ago", show_size(freed)] for r, freed in removed]
        print_table(["JOB", "STATE", "ENDED", "SIZE"], rows)
    count = f"{len(removed)} job{'s' * (len(removed) != 1)}"
    total = show_size(sum(freed for _, freed in removed))
    say(f"{count} would be removed, {total}" if dry else f"{count} removed, {total} freed")


# ``unirun stop [JOB]``: end a running job, workers first, and wait until it is over.

STOP_TIMEOUT = 600.0
"""Seconds to wait for the end of a job; longer than any grace period."""


def stop_job(options: Namespace) -> int:
    """Stop a job. Returns 0 when it has ended."""
    signum = signal.SIGKILL if options.now else _signal(options.signal)
    if options.job is not None and options.job.startswith("-"):
        raise UsageError(f"{options.job} is no option of unirun stop", "--now kills at once")
    job = find_here(options.store, options.job or only_one(options.store, "stop"), "stop")
    batch = read_batch(job)
    if batch is not None and batch_state(batch).active:
        return _cancel(job.run_id, batch, now=options.now, wait=not options.no_wait)
    phase = read_summary(job).phase
    if phase in ENDED:
        nothing = "" if options.job else "no job runs; the newest, "
        say(f"{nothing}job {job.run_id} has ended already: {phase}")
        return 0
    with contextlib.suppress(StoreError):
        # Without the store the leader is not known; following the job waits for it.
        refuse_elsewhere(job, "stop")
    stop = Stop(int(signum), "unirun stop", 0.0 if options.now else options.grace)
    if options.no_wait:
        with call_master(job) as master:
            master.send(stop)
        say(f"job {job.run_id} is stopping")
        return 0
    try:
        end = follow_to_end(job, stop, STOP_TIMEOUT, lambda notice: say(f"{notice.source}: {notice.text}"))
    except TimeoutError as error:
        raise JobError("the job did not end within 10 minutes", "unirun stop --now kills it") from error
    code = "" if end.code is None else f", exit code {end.code}"
    say(f"job {job.run_id} {end.phase}{code}")
    return 0


def _cancel(run_id: str, batch: str, *, now: bool, wait: bool) -> int:
    """End the job of a batch job, from any host of the cluster. Returns 0."""
    from unirun.launcher.slurm.submit import cancel, wait_for_end

    cancel(batch, now=now)
    if not wait:
        say(f"job {run_id} is stopping, as Slurm job {batch}")
        return 0
    try:
        state = wait_for_end(batch, STOP_TIMEOUT)
    except TimeoutError as error:
        raise JobError("the job did not end within 10 minutes", "unirun stop --now kills it") from error
    code = "" if state.code is None else f", exit code {state.code}"
    say(f"job {run_id}: Slurm job {batch} {state.state}{code}")
    return 0


def _signal(text: str) -> signal.Signals:
    """``SIGTERM``, ``TERM``, ``term`` or ``15``. Raises `UsageError`."""
    try:
        if (number := natural(text)) is not None:
            return signal.Signals(number)
        return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise UsageError(f"{text!r:.80} is no signal", "for example SIGTERM or SIGINT") from None
