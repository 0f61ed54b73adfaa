"""A bounded buffer of messages for the next master while there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

BYTES = 4 << 20
"""Maximum size of a backlog. The oldest frames are dropped first."""


class Backlog:
    """A FIFO of encoded messages that drops the oldest when it exceeds `limit` bytes."""

    def __init__(self, limit: int = BYTES) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._size = 0

    def add(self, frame: bytes) -> None:
        """Append a frame; one that exceeds the limit by itself is dropped."""
        self._frames.append(frame)
        self._size += len(frame)
        while self._size > self._limit:
            self._size -= len(self._frames.popleft())

    def take(self) -> Iterator[bytes]:
        """Remove and yield all frames in order."""
        while self._frames:
            frame = self._frames.popleft()
            self._size -= len(frame)
            yield frame
