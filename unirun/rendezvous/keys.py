"""Where things lie in a store."""

from __future__ import annotations

JOBS = "jobs/"
INDEX = "index/"

CONTEXT, STATES, VERSIONS = "context/", "states/", "versions/"
"""The parts of a job: its context (`unirun.master.persistence`), what workers keep, what they have committed."""


def job_prefix(run_id: str) -> str:
    """Everything of a job."""
    return f"{JOBS}{run_id}/"


def context_prefix(run_id: str) -> str:
    """The documents of `unirun.master.persistence.context`."""
    return f"{JOBS}{run_id}/{CONTEXT}"


def crashes_key(run_id: str) -> str:
    """Masters of a job that were ended by an error of their own (`unirun.failover.crashes`)."""
    return f"{JOBS}{run_id}/crashes"


def index_key(run_id: str) -> str:
    """The one line about a job that ``unirun ls`` reads."""
    return f"{INDEX}{run_id}"
