"""Waits for events, each with a deadline. No test sleeps for a fixed time in the hope that something has happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_TIMEOUT = 120.0
"""Seconds until a wait fails that a test does not measure. A busy machine takes its time, and no test that passes waits for
the end of this."""


def eventually(
    look: Callable[[], T | None], what: str = "the condition holds", within: float = WAIT_TIMEOUT
) -> T:
    """The first truthy value of `look()`. Raises AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.005)
    return value


async def eventually_async(holds: Callable[[], object], what: str = "the condition holds") -> None:
    """Return once `holds()` is true, while other tasks run. Raises AssertionError after `WAIT_TIMEOUT` seconds."""
    deadline = time.monotonic() + WAIT_TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_TIMEOUT:g} s: {what}"
        await asyncio.sleep(0.002)
