"""Tests of this floor start no process, but for those that are marked ``starts_processes``: `make quick` leaves them out."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from tests.waiting import eventually

LEAVE_TIMEOUT = 5.0
"""Seconds in which what a test has told to end is gone."""


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test closes what it opens, though maybe by the collector, and ends the threads that it starts; but for one that is
    marked ``leaves``."""
    before = _held()
    yield
    # Until the end of the test, which is later, pytest keeps the values of the other fixtures.
    request.node.funcargs.clear()
    if not (_held() - before) or request.node.get_closest_marker("leaves") is not None:
        return

    def left() -> set[object]:
        # First what is young: after thousands of tests a full collection takes two seconds.
        for generation in (1, 2):
            gc.collect(generation)
            if not (left := _held() - before):
                return set()
        return left

    eventually(lambda: not left(), f"nothing is left: {left()}", within=LEAVE_TIMEOUT)


@pytest.fixture(autouse=True)
def no_processes(
    nothing_is_left: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that is not marked cannot start a process. What it has patched is put back before `nothing_is_left`
    looks."""
    if request.node.get_closest_marker("starts_processes") is not None:
        return

    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("a test that starts a process is marked starts_processes")

    starts: tuple[tuple[Any, str], ...] = ((os, "fork"), (os, "posix_spawn"), (subprocess.Popen, "__init__"))
    for place, name in starts:
        monkeypatch.setattr(place, name, refuse)


def _held() -> set[object]:
    """The threads of this process, and its descriptors. The first bar of tqdm starts a thread for the whole process."""
    threads = (thread for thread in threading.enumerate() if thread.name != "tqdm_monitor")
    return {*threads, *descriptors().items()}


def descriptors() -> dict[str, str]:
    """The descriptors of this process, and what each of them is."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found
