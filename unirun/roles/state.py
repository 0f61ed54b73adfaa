"""What workers keep beyond their own end: bytes by worker, in the job's store."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from unirun.errors import UsageError
from unirun.roles.peers import Peers

MAX_STATE = 8 << 20
"""Bytes that one rank may keep."""

PATIENCE = 120.0
"""Seconds in which a master must have answered; a store that is away for a moment delays it."""


class StateStore(Protocol):
    """Keeps the last bytes that were saved."""

    def save(self, state: bytes) -> None:
        """Keep `state`. When it returns, a later incarnation finds it; when it is interrupted, the one before."""

    def load(self) -> bytes | None:
        """What was saved last; None when nothing was."""


class MemoryState:
    """Keeps it as long as the process lives: without a launcher there is nothing that outlives it."""

    def __init__(self) -> None:
        self._state: bytes | None = None

    def save(self, state: bytes) -> None:
        """Keep a copy."""
        self._state = bytes(state)

    def load(self) -> bytes | None:
        """The copy."""
        return self._state


class StoredState:
    """In the job's store, by way of the master. It lives as long as the job's context."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def save(self, state: bytes) -> None:
        """Returns when it is in the store. Raises `UsageError` for one that is too large, `StoreAway`, `JobError`."""
        if len(state) > MAX_STATE:
            raise UsageError(
                f"save_state got {len(state)} bytes, and {MAX_STATE} is the most",
                "keep large data in files, and their names in the state",
            )
        self._peers.ask("save_state", data=base64.b64encode(state).decode(), timeout=PATIENCE)

    def load(self) -> bytes | None:
        """From the store. Raises `StoreAway`, `JobError`."""
        data = self._peers.ask("load_state", timeout=PATIENCE)
        return None if data is None else base64.b64decode(data)


def job_folder(environ: Mapping[str, str]) -> Path | None:
    """The directory of this worker's job; None without a launcher."""
    return Path(environ["UNIRUN_SOCKET"]).parent if "UNIRUN_SOCKET" in environ else None


def state_of(peers: Peers) -> StateStore:
    """Where the worker that holds a rank keeps its state."""
    return StoredState(peers) if peers.linked else MemoryState()
