"""Key layout of a store."""

from __future__ import annotations

from urllib.parse import quote

from unirun.errors import FrameError, StoreRefused
from unirun.observe.status import Summary
from unirun.rendezvous.store.protocol import KeyValue, Store
from unirun.spec.names import is_run_id
from unirun.values import Value
from unirun.wire.frames import from_json

JOBS = "jobs/"
INDEX = "index/"

CONTEXT, STATES, VERSIONS = "context/", "states/", "versions/"
"""The parts of a job: its context (`unirun.failover.persistence`), workers' saved states, committed versions."""


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


# The index of a store: one summary for each job.


class Index(Value):
    """The `jobs` of a store, the oldest first. `refused` are entries that no unirun of this version has written; they
    do not keep users from seeing their jobs."""

    jobs: tuple[Summary, ...]
    refused: tuple[StoreRefused, ...]


def read_index(store: Store) -> Index:
    """The index of a store. Raises `StoreError`."""
    jobs: list[Summary] = []
    refused: list[StoreRefused] = []
    for item in store.get_prefix(INDEX).items:
        try:
            jobs.append(_read(item))
        except StoreRefused as error:
            refused.append(error)
    return Index(tuple(sorted(jobs, key=lambda job: (job.started, job.run_id))), tuple(refused))


def _read(item: KeyValue) -> Summary:
    try:
        summary = from_json(Summary, item.value)
        if is_run_id(summary.run_id) and item.key == index_key(summary.run_id):
            return summary
        problem: FrameError | None = None
    except FrameError as error:
        problem = error
    raise StoreRefused(
        f"{ascii(item.key)[1:-1]} holds {item.value!a:.80}, which no unirun of this version has written",
        "does the store's prefix belong to something else?",
    ) from problem


# Signs that a node has not been given up (`unirun.failover.silence`), for an agent that hears no master. Blocking.


def is_marked(store: Store, run_id: str, node: str) -> bool:
    """Return True if a master has marked `node` as silent. Raises `StoreError`."""
    return store.get(silent_key(run_id, node)) is not None
