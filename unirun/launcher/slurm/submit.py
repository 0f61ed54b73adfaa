"""Submits a job to Slurm."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from unirun.errors import JobError, UnirunError
from unirun.launcher.slurm.batch import Batch, batch_script
from unirun.launcher.slurm.options import BatchOptions
from unirun.observe.batchjob import BatchJob, ask_slurm, write_batch
from unirun.observe.jobdir import JobDir, job_at
from unirun.observe.ownership import make_private
from unirun.observe.status import PENDING, JobStatus, RoleStatus, WorkerStatus, is_alive, write_status
from unirun.rendezvous.creation import cannot_be_made, one_at_a_time
from unirun.spec.job import JobSpec

SCRIPT, OUTPUT = "batch.sh", "output.log"
"""Files in the directory of the batch job."""


def batch_of(spec: JobSpec, options: BatchOptions, words: tuple[str, ...], program: tuple[str, ...]) -> Batch:
    """The batch that runs `spec`, described by the arguments `words` of unirun, in this directory."""
    job = job_at(spec.run_id)
    return Batch(
        name=spec.name,
        words=words,
        run_id=spec.run_id,
        cwd=Path.cwd(),
        home=job.path.parent.parent,
        output=options.output or str(job.batch / OUTPUT),
        program=program,
    )


CLIENT = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables that say how Slurm's commands reach the cluster."""

_DIRECTIVES = ("job_name", "no_kill", "no_requeue", "open_mode", "output", "requeue", "signal")
_MEMORY = frozenset(("mem", "mem_per_cpu", "mem_per_gpu"))
_VARIABLES = {"mem": "MEM_PER_NODE", "switches": "REQ_SWITCH", "time": "TIMELIMIT"}
"""Variables of sbatch whose names differ from those of its options."""


def environment_of(options: BatchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that sbatch gets, and with it the job.

    In an allocation, the variables of Slurm and of process managers describe that allocation: the new job would get its
    processors and memory. Elsewhere a variable of sbatch is the user's default. As sbatch prefers variables to lines of
    the script, those are left out that the script has lines for.
    """
    inside = "SLURM_JOB_ID" in environ
    asked = {*_DIRECTIVES, *options.options, *(key for each in options.components for key in each.options)}
    asked |= _MEMORY if asked & _MEMORY else set()
    said = {f"SBATCH_{_VARIABLES.get(key, key.upper())}" for key in asked}

    def stays(name: str) -> bool:
        if name in CLIENT:
            return True
        of_slurm = name.startswith(("SLURM", "SBATCH_"))
        return not (name.startswith("PMI") or name in said or (inside and of_slurm))

    return {name: value for name, value in environ.items() if stays(name)}


def submit(
    spec: JobSpec, options: BatchOptions, batch: Batch, tell: Callable[[str], None]
) -> tuple[JobDir, BatchJob]:
    """Make the directory of the job and give its batch script to sbatch, with this process's environment. `tell` is
    called with what sbatch says besides the job's id.

    Raises `JobError` when a job of this id runs or sbatch refuses the script, `RendezvousError` when Slurm does not
    answer, `UsageError` without Slurm. Then the directory is removed.
    """
    job = job_at(spec.run_id)
    try:
        _make_directory(job, spec, batch_script(options, batch))
    except OSError as error:
        raise cannot_be_made(job, error) from error
    try:
        environ = environment_of(options, os.environ)
        told = ask_slurm("sbatch", "--parsable", str(job.batch / SCRIPT), environ=environ, tell=tell)
        # With a cluster's name: 12;cluster.
        submitted = BatchJob(told.strip().partition(";")[0], time.time())
        write_batch(job, submitted)
    except (UnirunError, OSError):
        shutil.rmtree(job.path, ignore_errors=True)
        raise
    return job, submitted


def _make_directory(job: JobDir, spec: JobSpec, script: str) -> None:
    make_private(job.path.parent)
    with one_at_a_time(job.path.parent):
        if is_alive(job):
            raise JobError(f"job {job.run_id} is running", f"stop it with: unirun stop {job.run_id}")
        if os.path.lexists(job.path):
            shutil.rmtree(job.path)
        make_private(job.batch)
    (job.batch / SCRIPT).write_text(script)
    write_status(job, _pending(spec))


def _pending(spec: JobSpec) -> JobStatus:
    """The status until the job runs and writes its own."""
    roles = tuple(
        RoleStatus(
            name=role.name,
            phase=PENDING,
            generation=0,
            restarts=0,
            max_restarts=role.max_restarts,
            workers=tuple(WorkerStatus(rank, PENDING, "", 0, None, "") for rank in range(role.count)),
        )
        for role in spec.roles
    )
    return JobStatus(spec.run_id, spec.name, PENDING, "it waits for Slurm", time.time(), None, None, roles)
