"""``unirun ls``: every job of this user, or of a store."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from msgspec import to_builtins

from unirun.cli.commandline import Parser
from unirun.cli.output import age, print_table
from unirun.cli.stored import opened
from unirun.errors import JobError, StoreError, StoreRefused
from unirun.observe.jobdir import JobDir, all_jobs
from unirun.observe.status import ENDED, Summary, is_alive, read_status, read_summary
from unirun.rendezvous.election import Leader, job_prefix, leader_of, read_index
from unirun.rendezvous.store.url import store_url

HEADERS = ("JOB", "STATE", "EXIT", "ROLES", "STARTED", "TOOK")


def main(argv: list[str]) -> int:
    """List jobs, the newest last. Returns 0."""
    parser = Parser(prog="unirun ls", description="The jobs of this user, the newest last.")
    parser.add_argument(
        "--store",
        help="the jobs of this store (default: those that are here, then $UNIRUN_STORE's)",
        metavar="URL",
    )
    parser.add_argument("--json", action="store_true", help="one object a line, for programs")
    options = parser.parse_args(argv)
    here = [] if options.store else [*all_jobs()]
    url = store_url(options.store)
    stored: list[tuple[Summary, Leader | None]] = []
    trouble: StoreError | None = None
    try:
        stored, refused = _stored(url, here) if url else ([], ())
        trouble = next(iter(refused), None)
    except StoreError as error:
        # The jobs of this host are listed in any case.
        trouble = error
    _show(here, stored, url, as_json=options.json)
    if trouble is not None:
        raise trouble
    return 0


def _show(
    here: list[JobDir],
    stored: list[tuple[Summary, Leader | None]],
    url: str | None,
    *,
    as_json: bool,
) -> None:
    if as_json:
        for job in here:
            # A directory without a readable state is listed for people only.
            with contextlib.suppress(JobError):
                print(json.dumps({**read_status(job).to_json(), "dir": str(job.path)}))
        for summary, leader in stored:
            print(json.dumps(_object(summary, leader, url)))
        return
    rows = [_row(job) for job in here]
    if url is None:
        print_table(HEADERS, rows)
        return
    rows = [*([*row, "here"] for row in rows), *(_stored_row(*each) for each in stored)]
    print_table([*HEADERS, "MASTER"], rows)


def _stored(
    url: str, here: list[JobDir]
) -> tuple[list[tuple[Summary, Leader | None]], tuple[StoreRefused, ...]]:
    """The jobs of a store without those that are `here`, each with its leader; and errors of unreadable jobs."""
    known = {_identity(job) for job in here}
    with opened(url) as store:
        index = read_index(store)
        jobs = [
            (each, None if each.phase in ENDED else leader_of(store, job_prefix(each.run_id)))
            for each in index.jobs
            if (each.run_id, each.uid) not in known
        ]
    return jobs, index.refused


def _identity(job: JobDir) -> tuple[str, str]:
    try:
        return job.run_id, job.uid
    except JobError:
        return job.run_id, ""


def _row(job: JobDir) -> list[str]:
    """A directory that holds no readable state is listed all the same."""
    try:
        return [job.run_id, *_cells(read_summary(job))]
    except JobError:
        return [job.run_id, "starting" if is_alive(job) else "lost", "", "", "", ""]


def _stored_row(summary: Summary, leader: Leader | None) -> list[str]:
    where = "" if summary.phase in ENDED else "nobody"
    where = f"{leader.address.host}:{leader.pid}" if leader else where
    return [summary.run_id, *_cells(summary), where]


def _cells(job: Summary) -> list[str]:
    now = time.time()
    return [
        job.phase,
        "" if job.code is None else str(job.code),
        ",".join(f"{name}={count}" for name, count in job.roles.items()),
        f"{age(now - job.started)} ago",
        age((job.ended or now) - job.started),
    ]


def _object(summary: Summary, leader: Leader | None, url: str | None) -> dict[str, Any]:
    return {
        **to_builtins(summary),
        "roles": [{"name": name, "count": count} for name, count in summary.roles.items()],
        "dir": None,
        "store": url,
        "leader": leader.to_json() if leader else None,
    }
