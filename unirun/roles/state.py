"""State that a worker saves for its next incarnation: bytes for each rank, in the job's store."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from unirun.errors import UsageError
from unirun.roles.peers import Peers

MAX_STATE = 8 << 20
"""Bytes that one rank may save."""

PATIENCE = 120.0
"""Seconds in which the master must answer. It is long as the store may be unavailable for a while."""


class StateStore(Protocol):
    """Holds the bytes that were saved last."""

    def save(self, state: bytes) -> None:
        """Save `state`. When this has returned, later incarnations load it; if it is interrupted, they load the one
        before."""

    def load(self) -> bytes | None:
        """The bytes that were saved last; None if there are none."""


class MemoryState:
    """Holds the state in memory: without a launcher nothing outlives the process."""

    def __init__(self) -> None:
        self._state: bytes | None = None

    def save(self, state: bytes) -> None:
        """Save a copy."""
        self._state = bytes(state)

    def load(self) -> bytes | None:
        """The copy, or None."""
        return self._state


class StoredState:
    """Holds the state in the job's store, through the master, as long as the job's context exists."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def save(self, state: bytes) -> None:
        """Returns when `state` is in the store. Raises `UsageError` if it is too large, `StoreAway`, `JobError`."""
        if len(state) > MAX_STATE:
            raise UsageError(
                f"save_state got {len(state)} bytes, and {MAX_STATE} is the most",
                "keep large data in files, and their names in the state",
            )
        self._peers.ask("save_state", data=base64.b64encode(state).decode(), timeout=PATIENCE)

    def load(self) -> bytes | None:
        """The bytes in the store, or None. Raises `StoreAway`, `JobError`."""
        data = self._peers.ask("load_state", timeout=PATIENCE)
        return None if data is None else base64.b64decode(data)


def job_folder(environ: Mapping[str, str]) -> Path | None:
    """The directory of this worker's job; None without a launcher."""
    return Path(environ["UNIRUN_SOCKET"]).parent if "UNIRUN_SOCKET" in environ else None


def state_of(peers: Peers) -> StateStore:
    """The state store of this worker."""
    return StoredState(peers) if peers.linked else MemoryState()
