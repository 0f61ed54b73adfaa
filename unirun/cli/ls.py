"""``unirun ls``: every job of this user."""

from __future__ import annotations

import json
import time

from unirun.cli.options import Parser
from unirun.cli.tables import age, print_table
from unirun.errors import JobError
from unirun.observe.status import JobStatus, read_status
from unirun.rendezvous.jobdir import JobDir, all_jobs


def main(argv: list[str]) -> int:
    """List jobs, the newest last. Returns 0."""
    parser = Parser(prog="unirun ls", description="The jobs of this user, the newest last.")
    parser.add_argument("--json", action="store_true", help="one object a line, for programs")
    options = parser.parse_args(argv)
    found = [(job, _status(job)) for job in all_jobs()]
    if options.json:
        for job, status in found:
            if status is not None:
                print(json.dumps({**status.to_json(), "dir": str(job.path)}))
        return 0
    rows = [_row(job, status) for job, status in found]
    print_table(["JOB", "STATE", "EXIT", "ROLES", "STARTED", "TOOK"], rows)
    return 0


def _status(job: JobDir) -> JobStatus | None:
    """None for a directory that holds no readable state: it is listed all the same."""
    try:
        return read_status(job)
    except JobError:
        return None


def _row(job: JobDir, status: JobStatus | None) -> list[str]:
    if status is None:
        return [job.run_id, "starting" if job.alive() else "lost", "", "", "", ""]
    now = time.time()
    return [
        job.run_id,
        status.phase,
        "" if status.code is None else str(status.code),
        ",".join(f"{role.name}={len(role.workers)}" for role in status.roles),
        f"{age(now - status.started)} ago",
        age((status.ended or now) - status.started),
    ]
