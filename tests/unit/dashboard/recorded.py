"""Recorded jobs: a status, events, metrics and logs in a directory, as a master and its agents leave them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from msgspec import to_builtins

from unirun.observe.events import EventLog
from unirun.observe.jobdir import JobDir
from unirun.observe.status import (
    CallStatus,
    FailureStatus,
    JobStatus,
    RoleStatus,
    WorkerStatus,
    write_status,
)
from unirun.rendezvous.creation import create_job
from unirun.values import WorkerId
from unirun.wire.handshake import new_token

START = 1_700_000_000.0

MARKUP = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
"""It would run, were it read as HTML."""

LATENCIES = (0, 0, 0, 0, 10, 0, 28, 0, 0, 0, 0, 0, 0, 2)
"""Of calls: in 3 to 10 ms, in 30 to 100 ms, and in more than 100 s."""

FAILED = FailureStatus(
    "actor",
    1,
    0,
    "h0",
    START + 20.0,
    "exit code 1",
    message=f"ValueError: {MARKUP}",
    decision="actor:1 ended with exit code 1; restart 1 of 3 of role actor",
    kind="exception",
    cause=f"ValueError: {MARKUP}",
    rule="exit",
    noticed=START + 20.1,
    slots=("1",),
    traceback=f"Traceback …\nValueError: {MARKUP}",
    log="/logs/actor/1/0",
)


def recorded_status(run_id: str, ranks: int, phase: str = "succeeded", role: str = "actor") -> JobStatus:
    """The status of a job of a role with `ranks` ranks, eight on each node, and a trainer."""
    ended = phase in ("succeeded", "failed", "stopped")
    workers = tuple(
        WorkerStatus(
            rank,
            "exited" if ended else "running",
            f"h{rank // 8}",
            int(rank == 1),
            None if ended else 1000 + rank,
            "exit code 0" if ended else "",
            memory=None if ended else 100_000_000,
            cpu=None if ended else 1.5,
            metrics={"loss": 0.5, "policy/version": float(7 - rank % 2)},
            slots=(str(rank % 8),),
        )
        for rank in range(ranks)
    )
    trainer = WorkerStatus(0, "exited" if ended else "running", "h0", 0, None, "exit code 0" if ended else "")
    figures = 1000.0, 40, 40_000, 400, 2.0, LATENCIES
    call = CallStatus("trainer", role, "update", "broadcast", "both", False, *figures)
    return JobStatus(
        run_id,
        "ppo",
        phase,
        "the role trainer has ended" if ended else "",
        START,
        START + 100.0 if ended else None,
        0 if phase == "succeeded" else 1 if ended else None,
        (
            RoleStatus(role, phase, 1, 1, 3, workers),
            RoleStatus("trainer", phase, 0, 0, 3, (trainer,)),
        ),
        epoch=1,
        failures=(FAILED,) if role == "actor" else (),
        failed=1,
        calls=(call,),
    )


def record(run_id: str, ranks: int = 4, phase: str = "succeeded", role: str = "actor") -> JobDir:
    """Write a job that is over, or of which no process is left."""
    job, lock = create_job(run_id, new_token())
    os.close(lock)
    write_status(job, recorded_status(run_id, ranks, phase, role))
    record_events(job, ranks, role)
    with open(job.metrics, "a") as file:
        for step in range(50):
            for rank in range(min(ranks, 4)):
                values = {"loss": 1.0 / (step + 1) + 0.01 * rank, "step": step, MARKUP: 1.0}
                file.write(json.dumps(line(role, rank, START + 10 + step, values)) + "\n")
    log = job.worker_logs(WorkerId(role, 0, 0))
    log.mkdir(parents=True)
    for folder in (log, *log.parents[:2]):
        folder.chmod(0o700)
    (log / "stdout.log").write_text(f"first line\n{MARKUP}\nlast line\n")
    return job


def record_events(job: JobDir, ranks: int, role: str = "actor") -> None:
    """Write the events of a job of which rank 1 has failed and come back."""
    times = iter((0.1, 0.2, 10.0, 10.1, 20.1, 20.1, 20.2, 20.3, 22.0, 100.0))
    log = EventLog(job.events, 1, clock=lambda: START + next(times))
    log.write("start", "the job starts", id="1-1", about=(role, "trainer"))
    log.write("order", f"h0 starts {role}:0-{ranks - 1}", cause="1-1", about=(f"{role}:0-{ranks - 1}", "h0"))
    log.write("running", f"role {role}: every rank runs", id="1-2", cause="1-1", about=(role,))
    log.write("running", "role trainer: every rank runs", id="1-3", cause="1-1", about=("trainer",))
    log.write("exit", f"{role}:1 ended: exit code 1", id="1-4", about=(f"{role}:1",))
    failure = {**to_builtins(FAILED), "role": role}
    log.write(
        "failure", f"{role}:1 failed", id="1-5", cause="1-4", about=(f"{role}:1", "h0"), failure=failure
    )
    log.write("decision", f"{role}:1: restart 1 of 3", id="1-6", cause="1-4", about=(f"{role}:1",))
    log.write("started", f"{role}:1 has process 7", id="1-7", cause="1-6", about=(f"{role}:1",))
    log.write("running", f"role {role}: every rank runs", id="1-8", cause="1-6", about=(role,))
    log.write("end", "succeeded (exit code 0)", id="1-9")
    log.close()


def line(role: str, rank: int, time: float, values: Mapping[str, float | None]) -> dict[str, object]:
    """A line of ``metrics.jsonl``."""
    return {"time": time, "role": role, "rank": rank, "values": dict(values)}
