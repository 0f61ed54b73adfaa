"""``unirun status [JOB]``: how a job stands."""

from __future__ import annotations

import json
import time
from typing import Any

from unirun.cli.commandline import Parser
from unirun.cli.output import age, megabytes, print_table
from unirun.cli.stored import JOB_HELP, STORE_HELP, StoredJob, find_status
from unirun.errors import UnirunError
from unirun.launcher.foreground.terminal import say
from unirun.observe.batchjob import BatchJob, batch_state, read_batch
from unirun.observe.status import FailureStatus, JobStatus, RoleStatus, WorkerStatus
from unirun.wire.reports import FROM


def main(argv: list[str]) -> int:
    """Print the status of a job. Returns 0, whatever the job's own end was."""
    parser = Parser(prog="unirun status", description="How a job stands.")
    parser.add_argument("job", nargs="?", help=JOB_HELP)
    parser.add_argument("--store", help=STORE_HELP, metavar="URL")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options = parser.parse_args(argv)
    status, found = find_status(options.store, options.job)
    batch = ""
    if isinstance(found, StoredJob):
        logs, leader = f"{found.host}:{found.logs}", found.leader.to_json() if found.leader else None
        more: dict[str, Any] = {"dir": None, "logs": found.logs, "store": found.store, "leader": leader}
        master = _master(found)
    else:
        logs = str(found.logs.resolve())
        more = {"dir": str(found.path), "logs": logs}
        master = f"term {status.epoch}" if status.epoch else ""
        if (submitted := read_batch(found)) is not None:
            batch = _batch(submitted)
            more["slurm"] = batch
    if options.json:
        print(json.dumps({**status.to_json(), **more}))
        return 0
    _print(status, master, batch, logs)
    return 0


def _batch(batch: BatchJob) -> str:
    """The state of a batch job, in words."""
    try:
        return f"job {batch.id} {batch_state(batch).words}"
    except UnirunError as error:
        return f"job {batch.id}: {error}"


def _master(stored: StoredJob) -> str:
    """The leader, as the store says."""
    written, leader = f"the last write is of term {stored.status.epoch}", stored.leader
    if leader is not None:
        same = leader.epoch == stored.status.epoch
        return f"{leader.address.host}, pid {leader.pid}, term {leader.epoch}{'' if same else f'; {written}'}"
    if stored.status.ended is not None:
        return written
    return f"nobody leads now; {written}; another comes within seconds, or the job is lost"


def _print(status: JobStatus, master: str, batch: str, logs: str) -> None:
    now = time.time()
    end = status.ended if status.ended is not None else now
    code = "" if status.code is None else f", exit code {status.code}"
    say(f"job {status.run_id}: {status.phase}{code}, {age(end - status.started)}")
    if status.reason:
        say(f"reason: {status.reason}")
    if status.trouble:
        say(f"store: {' '.join(status.trouble.split())}")
    if batch:
        say(f"Slurm: {batch}")
    if master:
        say(f"master: {master}")
    budgets = [f"{r.name} {r.restarts} of {r.max_restarts}" for r in status.roles if r.max_restarts]
    if budgets:
        say(f"restarts: {', '.join(budgets)}")
    nodes = ((status.spares, "held back"), (status.lost, "lost"))
    if told := [f"{', '.join(names)} {what}" for names, what in nodes if names]:
        say(f"nodes: {'; '.join(told)}")
    for text in status.waiting:
        say(f"waiting: {text}")
    say(f"logs: {logs}")
    say()
    workers = [(role, worker) for role in status.roles for worker in role.workers]
    headers = ["WORKER", "STATE", "NODE", "PID", "INCARNATION", "MEMORY", "CPU", "ROLE"]
    rows = [_row(role, worker, now) for role, worker in workers]
    if any(worker.address for _, worker in workers):
        headers.append("ADDRESS")
        for row, (_, worker) in zip(rows, workers, strict=True):
            row.append(worker.address)
    if any(worker.metrics for _, worker in workers):
        headers.append("METRICS")
        for row, (_, worker) in zip(rows, workers, strict=True):
            # What came from whom is shown by `unirun weights --plan`.
            metrics = {name: value for name, value in worker.metrics.items() if FROM not in name}
            row.append(
                " ".join(
                    f"{name}={'nan' if value is None else format(value, '.6g')}"
                    for name, value in metrics.items()
                )
            )
    print_table(headers, rows)
    if status.failures:
        shown, every = len(status.failures), status.failed
        say()
        say(f"failures: {every if shown == every else f'the last {shown} of {every}'}")
        headers = ["WORKER", "INCARNATION", "WHEN", "EXIT", "DECIDED", "MESSAGE"]
        print_table(headers, [_failure(failure, now) for failure in status.failures])


def _row(role: RoleStatus, worker: WorkerStatus, now: float) -> list[str]:
    restarts = f"generation {role.generation}, {role.restarts}/{role.max_restarts} restarts"
    return [
        f"{role.name}:{worker.rank}",
        worker.exit or _state(worker, now),
        worker.node,
        str(worker.pid or ""),
        str(worker.incarnation),
        megabytes(worker.memory),
        "" if worker.cpu is None else f"{worker.cpu:.1f} s",
        f"{role.phase} ({restarts})",
    ]


def _state(worker: WorkerStatus, now: float) -> str:
    """The phase, or ``ready since 31 s``, or why it is not."""
    if worker.ready is None:
        return worker.phase
    if not worker.ready:
        return f"not ready: {worker.why}"
    return f"ready for {age(now - worker.since)}{f', {worker.why}' if worker.why else ''}"


def _failure(failure: FailureStatus, now: float) -> list[str]:
    return [
        failure.who,
        str(failure.incarnation),
        f"{age(now - failure.time)} ago",
        failure.exit,
        # A decision begins with the failure that it is about.
        failure.decision.rpartition(f"{failure.exit}; ")[2],
        failure.message,
    ]
