"""Answers the requests of workers to the store."""

from __future__ import annotations

from unirun.master.persistence.context_store import ContextStore
from unirun.values import WorkerId
from unirun.wire.asking import Answer, Ask

MAX_CHANNEL = 200
"""Characters in the name of a channel, which is a part of a key."""

MAX_DIGITS = 18
"""Of a version: it fits 64 bits."""


def answer(contexts: ContextStore, worker: WorkerId, ask: Ask) -> Answer:
    """Carry out what a worker asks of the store. It is idempotent. Raises `StoreError`.

    A request that no store could carry out is answered with the problem: a master that raised would leave the same
    request to the next one.
    """
    try:
        return _answer(contexts, worker, ask)
    except ValueError as error:
        # Nothing was sent to the store: the text is not UTF-8, or the key is not allowed.
        return Answer(ask.number, problem=f"{ask.wish} cannot be done: {error}")


def _answer(contexts: ContextStore, worker: WorkerId, ask: Ask) -> Answer:
    if ask.wish in ("commit_version", "version") and not 0 < len(ask.name) <= MAX_CHANNEL:
        return Answer(ask.number, problem=f"{ask.name!r:.80} is no channel: 1 to {MAX_CHANNEL} characters")
    match ask.wish:
        case "save_state":
            contexts.save_state(worker.role, worker.rank, ask.data)
            return Answer(ask.number)
        case "load_state":
            return Answer(ask.number, contexts.load_state(worker.role, worker.rank))
        case "commit_version":
            if not (ask.data.isdecimal() and len(ask.data) <= MAX_DIGITS):
                return Answer(ask.number, problem=f"{ask.data!r:.80} is no version")
            return Answer(ask.number, str(contexts.commit_version(ask.name, int(ask.data))))
        case "version":
            kept = contexts.version(ask.name)
            return Answer(ask.number, None if kept is None else str(kept))
