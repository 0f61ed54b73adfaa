"""The index of a store: one summary for each job."""

from __future__ import annotations

from unirun.errors import FrameError, StoreRefused
from unirun.observe.status import Summary
from unirun.rendezvous.keys import INDEX, index_key
from unirun.rendezvous.store.protocol import Item, Store
from unirun.spec.names import is_run_id
from unirun.values import Value
from unirun.wire.frames import from_json


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


def _read(item: Item) -> Summary:
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
