"""Discovery: the job directory, the store, leader election, and the endpoints of process groups."""

from unirun.observe.jobdir import JobDir, all_jobs, jobs_root
from unirun.observe.liveness import ProcessWatch
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.endpoints import Endpoint, hold_endpoint

__all__ = [
    "Endpoint",
    "JobDir",
    "ProcessWatch",
    "all_jobs",
    "create_job",
    "hold_endpoint",
    "jobs_root",
]
