"""The detection of a main thread that waits for something that will not come.

A wait in native code cannot be interrupted. gloo forgets an operation that has begun when the connection to a dead peer
ends (`gloo`): a thread that waits for it waits until the timeout of the group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
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
"""Seconds after which a wait is stuck."""
ASK = 5.0
"""Seconds after which it is asked again whether a wait still matters."""

IDLE = 30.0
"""Seconds without work after which a worker in a call that was given up is killed."""
BUSY = 0.02
"""Least processor time of a working worker, as a fraction of `IDLE`."""

_OWN = f"{Path(__file__).parent}/process_groups.py"
_TORCH = tuple(
    f"{Path(torch.__file__).parent}/distributed/{n}.py" for n in ("distributed_c10d", "rendezvous")
)
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_native: Any = _distributed_c10d


def in_group(frame: FrameType) -> object:
    """The call in which the main thread waits for a process group or its store; None if it is in none."""
    if frame.f_code.co_filename not in (_OWN, *_TORCH):
        return None
    return _call(frame)


def blocked(frame: FrameType) -> object:
    """The call in which the main thread may be blocked, with the processor time that it has used so far: that stays the
    same while it is. None in the waits of Python's own library, as these can be interrupted."""
    file = frame.f_code.co_filename
    if file.startswith(_PYTHON) and "site-packages" not in file:
        return None
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    return _call(frame), time.clock_gettime(clock)


def _call(frame: FrameType) -> tuple[int, int]:
    while frame.f_back is not None and frame.f_code.co_filename == _OWN:
        # Each slice of a wait in a store has a frame of its own.
        frame = frame.f_back
    return id(frame), frame.f_lasti


def forgotten(groups: Collection[GlooGroup]) -> bool:
    """Return True if a collective in one of these groups is not over. They have ended, so it should have failed.

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
    """Tells when a thread has been in one call for `STUCK` seconds."""

    def __init__(self) -> None:
        self._call: object = None
        self._since = 0.0

    def lasts(self, call: object, now: float) -> bool:
        """Take a sample: the call in which the thread is, None if it is in none that counts, and the time."""
        if call is None or call != self._call:
            self._call, self._since = call, now
            return False
        return now - self._since > STUCK


class Idleness:
    """Tells when a process has used almost no processor time for `IDLE` seconds."""

    def __init__(self) -> None:
        self._since, self._used = math.inf, 0.0

    def lasts(self, used: float, now: float) -> bool:
        """Take a sample: the processor time that was used so far, and the time, in seconds."""
        if now < self._since or used - self._used > BUSY * IDLE:
            self._since, self._used = now, used
        return now - self._since > IDLE


def processor_time() -> float:
    """Seconds of processor time that this process and its descendants have used, without the calling thread and
    those of TensorPipe, of which one may poll."""
    import psutil  # slow, and it reads variables when it is imported

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() - time.thread_time() - _of_tensorpipe() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            used += times.user + times.system
    return used


def _of_tensorpipe() -> float:
    """Seconds of processor time that the threads of torch.distributed.rpc's transport have used."""
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        # It may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, _, rest = (thread / "stat").read_text().partition(" (TP_")
            if rest:
                fields = rest.rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_until_idle(relevant: Callable[[], bool], counts: Callable[[], bool]) -> str | None:
    """Watch this process as long as `relevant` returns True. Returns the stack of the main thread when it has been idle
    for `IDLE` seconds, of which only those are counted in which `counts` returns True."""
    idleness = Idleness()
    while relevant():
        if not counts():
            idleness = Idleness()
        elif idleness.lasts(processor_time(), time.monotonic()):
            frame = _main_frame()
            return "".join(traceback.format_stack(frame)) if relevant() else None
        time.sleep(IDLE / 30)
    return None


def wait_until_stuck(relevant: Callable[[], bool], call_of: Callable[[FrameType], object]) -> str | None:
    """Watch the main thread as long as `relevant` returns True, which is asked now and then. Returns the stack of the
    thread when it is stuck in what `call_of` returns for its innermost Python frame."""
    stillness, asked = Stillness(), -math.inf
    while True:
        now = time.monotonic()
        frame = _main_frame()
        stuck = stillness.lasts(call_of(frame) if frame is not None else None, now)
        if stuck or now >= asked + ASK:
            if not relevant():
                return None
            if stuck:
                return "".join(traceback.format_stack(frame))
            asked = now
        time.sleep(SAMPLE)


def _main_frame() -> FrameType | None:
    """The innermost Python frame of the main thread.

    CPython 3.11 holds the lock of its list of threads while it makes the frames. A garbage collection that this starts
    may free a tensor, which gives up the GIL. A thread that starts or ends then waits for the lock with the GIL, and
    the process stands still (python/cpython#106883). So none may start.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if collects:
            gc.enable()
