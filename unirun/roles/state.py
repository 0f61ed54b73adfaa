"""What workers keep beyond their own end: bytes by worker, in the job's directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from unirun.errors import JobError


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


class FileState:
    """One file, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def save(self, state: bytes) -> None:
        """Write and rename. Raises `JobError` when there is no room."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock:
                with open(fresh, "wb") as file:
                    file.write(state)
                    file.flush()
                    os.fsync(file.fileno())
                fresh.replace(self._path)
        except OSError as error:
            raise JobError(
                f"state cannot be saved to {self._path}: {error.strerror}", "free some space"
            ) from error

    def load(self) -> bytes | None:
        """Read it. Raises `JobError`."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(f"state cannot be read from {self._path}: {error.strerror}") from error


def job_folder(environ: Mapping[str, str]) -> Path | None:
    """The directory of this worker's job; None without a launcher."""
    return Path(environ["UNIRUN_SOCKET"]).parent if "UNIRUN_SOCKET" in environ else None


def state_of(environ: Mapping[str, str], role: str, rank: int) -> StateStore:
    """Where the worker that holds a rank keeps its state."""
    folder = job_folder(environ)
    return MemoryState() if folder is None else FileState(folder / "state" / f"{role}.{rank}")
