"""A job that was built, and how it is submitted.

`submit` plans the job here and launches it in a process of its own (`unirun.launcher.submitted`): this process, which
may have threads and devices, is never forked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from unirun.collocation import count_slots, local_inventory, local_topology
from unirun.errors import JobFailed, UsageError
from unirun.launcher.planned import PlannedJob, plan
from unirun.observe.jobdir import JobDir, job_at
from unirun.spec.job import JobSpec
from unirun.spec.names import id_stem
from unirun.spec.parse import parse_job
from unirun.spec.yaml import refuse_extremes
from unirun.train.handle import JobHandle
from unirun.train.loading import python_path


class Job:
    """A job that `DLJobBuilder.build` has checked. `mapping` is the equivalent job file, as a dict."""

    def __init__(self, mapping: Mapping[str, Any], node_num: int) -> None:
        self.mapping, self.node_num = dict(mapping), node_num

    @property
    def spec(self) -> JobSpec:
        """The spec of the job. Its id is a placeholder for the one that `submit` makes."""
        return parse_job(self.mapping, count_slots=lambda _: 1, run_id="job")

    def submit(
        self, job_name: str | None = None, *, blocking: bool = True, max_restarts: int | None = None
    ) -> JobHandle:
        """Start the job in processes of its own. By default, show what it writes and wait for its end.

        `job_name` is the first part of the job's id (default: the trainer's module). `max_restarts` is how many times
        each role may be started again (default 3). With ``blocking=False`` it returns when the job has started; the job
        goes on without this process.

        Raises `PlacementError` if this host has no room for it, `JobError` if there is no safe directory for it,
        `JobFailed` if it cannot be started or, when blocking, does not succeed, and `UsageError` inside a worker of
        another job and for more than one node.
        """
        if "UNIRUN_JOB" in os.environ:
            raise UsageError(
                "a job is submitted inside a worker of another one",
                'put what submits it under: if __name__ == "__main__":',
            )
        if self.node_num != 1:
            raise UsageError(
                f"node_num({self.node_num}): this version of unirun runs on one node", "use node_num(1)"
            )
        mapping = dict(self.mapping)
        if job_name is not None:
            mapping["name"] = job_name
        if max_restarts is not None:
            mapping["max_restarts"] = max_restarts
        planned = _planned(mapping, job_name)
        # Raises here, not in the other process, when there is no safe directory for the job.
        job = job_at(planned.spec.run_id)
        return _follow(planned, job) if blocking else _detach(planned, job)


def _planned(mapping: Mapping[str, Any], job_name: str | None) -> PlannedJob:
    """The job with an id and its placement on this host. Raises `SpecError`, `PlacementError`."""
    refuse_extremes("config", mapping)
    inventory = local_inventory()
    stem = job_name or _first_module(mapping)
    spec = parse_job(
        mapping,
        count_slots=lambda kind: count_slots(kind, inventory),
        run_id=f"{id_stem(stem)}-{secrets.token_hex(3)}",
    )
    return plan(spec, inventory, local_topology)


def _first_module(mapping: Mapping[str, Any]) -> str:
    """The module of the trainer, or of the first role's function."""
    function = next((role["function"] for role in mapping["roles"].values() if "function" in role), "job")
    return str(mapping.get("trainer", function)).partition(":")[0]


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "unirun.launcher.submitted", str(os.getpid()), *options]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path()}


def _follow(planned: PlannedJob, job: JobDir) -> JobHandle:
    """Show the job to its end; an interrupt is passed on to it, and raised here when it has ended."""
    interrupted = False
    # In a session of its own it gets Ctrl-C from here alone: twice would mean SIGKILL to the workers.
    process = subprocess.Popen(
        _command(), env=_environment(), stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(planned.to_json())
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:
            process.terminate()
    if interrupted:
        raise KeyboardInterrupt
    if code and not job.path.exists():
        raise JobFailed("the job could not be started", "see the messages above", code=code)
    handle = JobHandle(job)
    handle.raise_if_failed()
    return handle


def _detach(planned: PlannedJob, job: JobDir) -> JobHandle:
    done = subprocess.run(
        _command("--detach"),
        env=_environment(),
        input=planned.to_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise JobFailed(f"the job could not be started: {done.stderr.strip()}", code=done.returncode)
    handle = JobHandle(job)
    handle.await_start()
    return handle
