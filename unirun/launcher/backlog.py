"""What is to be told to the next master, as long as there is none: bounded, whatever workers say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

BYTES = 4 << 20
"""Of frames that are kept. The oldest go first: they tell of what has changed since."""


class Backlog:
    """FIFO of encoded messages that forgets the oldest when it holds more than `limit` bytes."""

    def __init__(self, limit: int = BYTES) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._size = 0

    def add(self, frame: bytes) -> None:
        """Keep a frame; one that is over the limit alone is not kept."""
        self._frames.append(frame)
        self._size += len(frame)
        while self._size > self._limit:
            self._size -= len(self._frames.popleft())

    def take(self) -> Iterator[bytes]:
        """All frames in order; each is forgotten when it is taken."""
        while self._frames:
            frame = self._frames.popleft()
            self._size -= len(frame)
            yield frame
