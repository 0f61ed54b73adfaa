"""A store's index: one line about each job, for who looks at all of them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from unirun.errors import FrameError, StoreRefused
from unirun.rendezvous.keys import INDEX
from unirun.rendezvous.store.protocol import Item, Store
from unirun.wire.codec import typed


@dataclass(frozen=True, slots=True)
class Summary:
    """One job, in few words: `roles` has the number of ranks of each. Times are seconds since the epoch; `code` is the
    exit code once it has ended. `uid` tells the job from others of its id."""

    run_id: str
    uid: str
    name: str
    phase: str
    started: float
    ended: float | None
    code: int | None
    roles: dict[str, int]

    def line(self) -> str:
        """The job's value in the index."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class Index:
    """The `jobs` of a store, the oldest first. `refused`: lines that no unirun of this version has written; others who
    use the store must not keep its users from seeing their jobs."""

    jobs: tuple[Summary, ...]
    refused: tuple[StoreRefused, ...]


def read_index(store: Store) -> Index:
    """All lines of a store's index. Raises `StoreError`."""
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
        data = json.loads(item.value)
        summary = typed(Summary, {field.name: data[field.name] for field in dataclasses.fields(Summary)})
        if not all(math.isfinite(time) for time in (summary.started, summary.ended or 0.0)):
            raise ValueError("a time that is none")
    except (ValueError, TypeError, KeyError, RecursionError, FrameError) as error:
        raise StoreRefused(
            f"{item.key} holds {item.value!r:.80}, which no unirun of this version has written",
            "does the store's prefix belong to something else?",
        ) from error
    return summary
