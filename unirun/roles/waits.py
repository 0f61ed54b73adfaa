"""Whether the main thread waits for something that will not come, and nothing else moves in this process.

A wait in native code cannot be interrupted. gloo forgets an operation that has begun when the connection to a dead peer
ends (`gloo`): who waits for it waits until the timeout of the group.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C import _distributed_c10d

from unirun.roles.gloo import GlooGroup

SAMPLE = 0.1
"""Seconds between two looks at the main thread."""
STUCK = 1.0
"""Seconds after which a wait in which nothing moves is stuck."""
ASK = 5.0
"""Seconds after which it is asked again whether a wait still matters."""
IDLE = 0.05
"""The share of a processor that a process uses at most in which nothing moves."""

_TORCH = f"{Path(torch.__file__).parent}/distributed/"
_OWN = f"{Path(__file__).parent}/process_groups.py"
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_native: Any = _distributed_c10d


def of_torch(file: str) -> bool:
    """Whether a thread waits for a process group or its store when its innermost Python frame is of this file."""
    return file.startswith((_TORCH, _OWN))


def native(file: str) -> bool:
    """Whether a thread may be in native code when its innermost Python frame is of this file: the waits of Python's own
    library can be interrupted."""
    return not file.startswith(_PYTHON) or "site-packages" in file


def forgotten(groups: Collection[GlooGroup]) -> bool:
    """Whether a collective in one of these groups is not over. They have ended, so it should have failed.

    torch's flight recorder knows the collectives of each group, those of DDP and of functional collectives included,
    but no `send` and no `recv`. With ``TORCH_FR_BUFFER_SIZE=0`` it knows none.
    """
    found = json.loads(_native._dump_fr_trace_json()).get("entries", ())
    return any(
        entry["process_group"][0] == group.name and group.since <= entry["time_created_ns"] <= group.until
        for entry in found
        if not entry["retired"]
        for group in groups
    )


class Stillness:
    """Tells when a thread has been in one wait for `STUCK` seconds while the process did nothing."""

    def __init__(self) -> None:
        self._wait: object = None
        self._since = self._used = 0.0

    def lasts(self, wait: object, now: float, used: float) -> bool:
        """Take a sample: where the thread waits, None if it does not; the time; the processor time used so far."""
        idle = used - self._used <= IDLE * max(now - self._since, SAMPLE)
        if wait is None or wait != self._wait or not idle:
            self._wait, self._since, self._used = wait, now, used
            return False
        return now - self._since > STUCK


def wait_until_stuck(relevant: Callable[[], bool], waits: Callable[[str], bool]) -> str | None:
    """Watch the main thread as long as `relevant` returns True, which is asked now and then. Returns the stack of the
    thread when it is stuck with its innermost frame in a file of which `waits` returns True."""
    stillness, asked = Stillness(), -math.inf
    while True:
        now = time.monotonic()
        # Without what this thread uses itself.
        stuck = stillness.lasts(_wait(waits), now, time.process_time() - time.thread_time())
        if stuck or now >= asked + ASK:
            if not relevant():
                return None
            if stuck:
                return "".join(traceback.format_stack(_main_frame()))
            asked = now
        time.sleep(SAMPLE)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _wait(waits: Callable[[str], bool]) -> tuple[int, int] | None:
    """The call in which the main thread is, if it waits there."""
    frame = _main_frame()
    if frame is None or not waits(frame.f_code.co_filename):
        return None
    while frame.f_back is not None and frame.f_code.co_filename == _OWN:
        # Each slice of a wait in a store has a frame of its own.
        frame = frame.f_back
    return id(frame), frame.f_lasti
