"""The answers to what workers ask of the store."""

from __future__ import annotations

from unirun.master.keeper import Keeper
from unirun.wire.asking import WorkerAnswer, WorkerAsk


def answer(keeper: Keeper, ask: WorkerAsk) -> WorkerAnswer:
    """Do what a worker wants. Doing it once more gives the same. Raises `StoreError`."""
    who = ask.role, ask.rank, ask.incarnation, ask.number
    match ask.wish:
        case "save_state":
            keeper.save_state(ask.role, ask.rank, ask.data)
            return WorkerAnswer(*who)
        case "load_state":
            return WorkerAnswer(*who, keeper.load_state(ask.role, ask.rank))
        case "commit_version":
            if not ask.data.isdecimal():
                return WorkerAnswer(*who, problem=f"{ask.data!r} is no version")
            return WorkerAnswer(*who, str(keeper.commit_version(ask.name, int(ask.data))))
        case "version":
            kept = keeper.version(ask.name)
            return WorkerAnswer(*who, None if kept is None else str(kept))
