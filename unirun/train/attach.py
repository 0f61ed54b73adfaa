"""`attach`: a process outside a job calls its workers."""

from __future__ import annotations

from unirun.observe.jobdir import all_jobs, choose_job
from unirun.observe.status import runs
from unirun.train.handle import JobHandle


def attach(job: str | None = None) -> JobHandle:
    """The handle on a job of this user that runs: its role groups, its status, its output.

    ::

        with unirun.attach("ppo-1a2b") as job:
            print(job["rollout"].generate("hello"))

    `job` is its id or the beginning of it; by default the newest that runs. Calls are those of a trainer, with the same
    promises, over sockets that prove the job's token. They go through restarts of workers and deaths of masters.
    Leaving changes nothing in the job. Raises `JobError` when there is no such job.
    """
    jobs = {each.run_id: each for each in all_jobs()}
    return JobHandle(jobs[choose_job(job, tuple(jobs), lambda run_id: runs(jobs[run_id]))])
