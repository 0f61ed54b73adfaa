"""``unirun status [JOB]``: how a job stands."""

from __future__ import annotations

import argparse
import json
import time

from unirun.cli.options import Parser
from unirun.cli.tables import age, megabytes, print_table
from unirun.observe.status import JobStatus, RoleStatus, WorkerStatus, read_status
from unirun.rendezvous.jobdir import find_job


def main(argv: list[str]) -> int:
    """Print the status of a job. Returns 0, whatever the job's own end was."""
    parser = Parser(prog="unirun status", description="How a job stands (by default the newest).")
    parser.add_argument("job", nargs="?", help="the job's id, or the beginning of it")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options: argparse.Namespace = parser.parse_args(argv)
    job = find_job(options.job)
    status = read_status(job)
    if options.json:
        print(json.dumps({**status.to_json(), "dir": str(job.path), "logs": str(job.logs.resolve())}))
        return 0
    _print(status, str(job.logs.resolve()))
    return 0


def _print(status: JobStatus, logs: str) -> None:
    end = status.ended if status.ended is not None else time.time()
    code = "" if status.code is None else f", exit code {status.code}"
    print(f"job {status.run_id}: {status.phase}{code}, {age(end - status.started)}")
    if status.reason:
        print(f"reason: {status.reason}")
    print(f"logs: {logs}\n")
    workers = [(role, worker) for role in status.roles for worker in role.workers]
    headers = ["WORKER", "STATE", "NODE", "PID", "INCARNATION", "MEMORY", "CPU", "ROLE"]
    rows = [_row(role, worker) for role, worker in workers]
    if any(worker.metrics for _, worker in workers):
        headers.append("METRICS")
        for row, (_, worker) in zip(rows, workers, strict=True):
            row.append(" ".join(f"{name}={value:.6g}" for name, value in worker.metrics.items()))
    print_table(headers, rows)


def _row(role: RoleStatus, worker: WorkerStatus) -> list[str]:
    restarts = f"generation {role.generation}, {role.restarts}/{role.max_restarts} restarts"
    return [
        f"{role.name}:{worker.rank}",
        worker.exit or worker.phase,
        worker.node,
        str(worker.pid or ""),
        str(worker.incarnation),
        megabytes(worker.memory),
        "" if worker.cpu is None else f"{worker.cpu:.1f} s",
        f"{role.phase} ({restarts})",
    ]
