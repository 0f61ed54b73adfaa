"""Key layout of a store."""

from __future__ import annotations

from urllib.parse import quote

JOBS = "jobs/"
INDEX = "index/"

CONTEXT, STATES, VERSIONS = "context/", "states/", "versions/"
"""The parts of a job: its context (`unirun.launcher.master.persistence`), workers' saved states, committed versions."""


def job_prefix(run_id: str) -> str:
    """Prefix of all keys of a job."""
    return f"{JOBS}{run_id}/"


def context_prefix(run_id: str) -> str:
    """Prefix of the documents of `unirun.failover.persistence.context`."""
    return f"{JOBS}{run_id}/{CONTEXT}"


def silent_key(run_id: str, node: str = "") -> str:
    """Key of the mark of a silent node (`unirun.failover.silence`); without `node` the prefix of all marks."""
    return f"{JOBS}{run_id}/silent/{quote(node, safe='')}"


def crashes_key(run_id: str) -> str:
    """Key of the record of a job's crashed masters (`unirun.failover.crashes`)."""
    return f"{JOBS}{run_id}/crashes"


def index_key(run_id: str) -> str:
    """Key of the summary of a job that ``unirun ls`` reads."""
    return f"{INDEX}{run_id}"
