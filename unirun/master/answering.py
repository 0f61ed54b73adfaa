"""The answers to what workers ask of the store."""

from __future__ import annotations

from unirun.master.persistence.context_store import ContextStore
from unirun.wire.asking import WorkerAnswer, WorkerAsk

MAX_CHANNEL = 200
"""Characters in the name of a channel, which is a part of a key."""

MAX_DIGITS = 18
"""Of a version: it fits 64 bits."""


def answer(contexts: ContextStore, ask: WorkerAsk) -> WorkerAnswer:
    """Do what a worker wants. Doing it once more gives the same. Raises `StoreError`.

    What no store could do is the worker's to hear: a master that failed of it would leave it to the next one.
    """
    try:
        return _answer(contexts, ask)
    except ValueError as error:
        # Nothing of it was sent: a text that is none, or a key that no store takes.
        who = ask.role, ask.rank, ask.incarnation, ask.number
        return WorkerAnswer(*who, problem=f"{ask.wish} cannot be done: {error}")


def _answer(contexts: ContextStore, ask: WorkerAsk) -> WorkerAnswer:
    who = ask.role, ask.rank, ask.incarnation, ask.number
    if ask.wish in ("commit_version", "version") and not 0 < len(ask.name) <= MAX_CHANNEL:
        return WorkerAnswer(*who, problem=f"{ask.name!r:.80} is no channel: 1 to {MAX_CHANNEL} characters")
    match ask.wish:
        case "save_state":
            contexts.save_state(ask.role, ask.rank, ask.data)
            return WorkerAnswer(*who)
        case "load_state":
            return WorkerAnswer(*who, contexts.load_state(ask.role, ask.rank))
        case "commit_version":
            if not (ask.data.isdecimal() and len(ask.data) <= MAX_DIGITS):
                return WorkerAnswer(*who, problem=f"{ask.data!r:.80} is no version")
            return WorkerAnswer(*who, str(contexts.commit_version(ask.name, int(ask.data))))
        case "version":
            kept = contexts.version(ask.name)
            return WorkerAnswer(*who, None if kept is None else str(kept))
