"""Whether the main thread waits in a process group, and whether anything still moves in this process.

A wait in native code cannot be interrupted, and gloo forgets some of its waits when a peer dies: see `gloo`.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from unirun.roles import process_groups

SAMPLE = 0.1
"""Seconds between two looks at the main thread."""
STUCK = 1.0
"""Seconds after which a wait in which nothing moves is stuck."""
IDLE = 0.05
"""The share of a processor that a process uses at most in which nothing moves."""

_TORCH = str(Path(torch.__file__).parent)
_OWN = process_groups.__file__
_WAITS = (
    f"{_TORCH}/distributed/",
    f"{_TORCH}/autograd/graph.py",  # Tensor.backward, in which DDP and FSDP wait
    f"{_TORCH}/nn/parallel/distributed.py",
    f"{_TORCH}/_ops.py",  # functional collectives, which DTensor uses
    _OWN,
)
"""Files of the innermost Python frame while a thread waits for a process group or its store."""


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


def wait_until_stuck(relevant: Callable[[], bool]) -> str | None:
    """Watch the main thread as long as `relevant` returns True. Returns its stack when it is stuck."""
    stillness = Stillness()
    while relevant():
        if stillness.lasts(_main_wait(), time.monotonic(), time.process_time()):
            return "".join(traceback.format_stack(_main_frame()))
        time.sleep(SAMPLE)
    return None


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _main_wait() -> tuple[int, int] | None:
    """The call into a process group or its store in which the main thread is; None if it is in none."""
    frame = _main_frame()
    if frame is None or not frame.f_code.co_filename.startswith(_WAITS):
        return None
    while frame.f_back is not None and frame.f_code.co_filename == _OWN:
        # Each slice of a wait in a store has a frame of its own.
        frame = frame.f_back
    return id(frame), frame.f_lasti
