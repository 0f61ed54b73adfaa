"""Where things lie in a store."""

from __future__ import annotations

JOBS = "jobs/"
INDEX = "index/"


def job_prefix(run_id: str) -> str:
    """Everything of a job."""
    return f"{JOBS}{run_id}/"


def context_prefix(run_id: str) -> str:
    """The documents of `unirun.master.context`."""
    return f"{JOBS}{run_id}/context/"


def index_key(run_id: str) -> str:
    """The one line about a job that ``unirun ls`` reads."""
    return f"{INDEX}{run_id}"
