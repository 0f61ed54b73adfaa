"""A profile of a worker, made by itself: stacks that a thread samples, and a trace of torch's profiler.

torch records the thread that starts its profiler, so the main thread starts and ends it, in the handler of a signal.
The rest is done by a thread beside it. `unirun.launcher.profiling` is the agent's side.

Stacks are folded: ``MainThread;step (my/train.py);forward (my/model.py)``, the outermost frame first, with the number
of samples in which they were seen. speedscope and flamegraph.pl read the same text.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from unirun import atomic

PROFILE, TRACE = "profile.json", "profile.trace.json.gz"
"""The files with the result, beside the request. The trace is there before the other one, or not at all. The other one
is empty when it could not be written."""

SAMPLE_INTERVAL = 0.01
"""Seconds between two samples."""

END_TIMEOUT = 30.0
"""Seconds in which the main thread has to come to Python code again, to end torch's profiler."""

PROFILE_THREAD = "unirun-profile"
"""The name of the thread that samples the others."""

BOOTSTRAP = re.compile(r"unirun/launcher/|<frozen runpy>")
"""In the paths of code that starts the user's."""


class WorkerProfile:
    """The profile that is under way in this process, which is written to `folder`. The main thread makes it, and gets
    `signum` when it has to end it, once the others were sampled."""

    def __init__(self, folder: Path, seconds: float, signum: int) -> None:
        self._folder, self._seconds, self._signum = folder, seconds, signum
        self._recorder: Any = None
        self._problem = ""
        self._sampled, self._ended = threading.Event(), threading.Event()

    def begin(self) -> None:
        """Start torch's profiler, and the thread that does the rest."""
        torch: Any = sys.modules.get("torch")
        try:
            if torch is None:
                self._problem = "it has not imported torch"
            elif torch.autograd._profiler_enabled():
                self._problem = "the program has started torch's profiler itself"
            else:
                device = "cuda" if torch.cuda.is_initialized() else None
                # Not `torch.profiler.profile`, whose first start imports modules for seconds.
                recorder = torch.autograd.profiler.profile(
                    record_shapes=True, use_device=device, use_kineto=True
                )
                recorder.__enter__()
                self._recorder = recorder
        except Exception as error:  # noqa: BLE001 - torch raises what it likes, and the rank goes on
            self._problem = f"torch's profiler: {error}"
        try:
            threading.Thread(target=self._run, name=PROFILE_THREAD, daemon=True).start()
        except RuntimeError as error:
            # No more threads can be started, and the rank goes on.
            self._sampled.set()
            self.end()
            self._problem = f"there is no thread for it: {error}"
            self._write(Counter())

    def end(self) -> None:
        """End torch's profiler, in the thread that has started it, if it is time to."""
        if self._recorder is None or not self._sampled.is_set() or self._ended.is_set():
            return
        try:
            self._recorder.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - as above
            self._problem = f"torch's profiler: {error}"
        self._ended.set()

    def _run(self) -> None:
        counts = sampled(self._seconds)
        self._sampled.set()
        if self._recorder is not None:
            main = threading.main_thread().ident
            if main is not None:
                signal.pthread_kill(main, self._signum)
            if not self._ended.wait(END_TIMEOUT):
                self._problem = f"its main thread was in native code for {END_TIMEOUT:g} s after the profile"
        self._write(counts)

    def _write(self, counts: Counter[str]) -> None:
        """Write the result, after which the next profile may begin."""
        global _profile
        # A full disk, or a worker that ends, costs the profile and nothing else.
        with contextlib.suppress(OSError):
            self._write_trace()
            result = {"stacks": counts, "without_trace": self._problem}
            try:
                atomic.replace(self._folder / PROFILE, json.dumps(result))
            except OSError:
                # An empty one takes no space, and tells the agent that there is none.
                atomic.replace(self._folder / PROFILE, b"")
        _profile = None

    def _write_trace(self) -> None:
        """Write the trace, or note why there is none. Raises OSError for a draft that cannot be removed."""
        if self._problem:
            return
        draft = self._folder / f"draft.{TRACE}"
        try:
            self._recorder.export_chrome_trace(str(draft))
            atomic.replace(self._folder / TRACE, gzip.compress(draft.read_bytes(), 3))
        except Exception as error:  # noqa: BLE001 - as above
            why = error.strerror if isinstance(error, OSError) else error
            self._problem = f"its trace cannot be written: {why}"
        finally:
            # On a full disk this makes room for the stacks.
            draft.unlink(missing_ok=True)


def sampled(seconds: float) -> Counter[str]:
    """The folded stacks of the other threads of this process, sampled for so many seconds."""
    counts: Counter[str] = Counter()
    end, me = time.monotonic() + seconds, threading.get_ident()
    while (now := time.monotonic()) < end:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():
            if number != me and (frames := _frames(frame)):
                counts[folded(frames, names.get(number, "a thread of C"))] += 1
        time.sleep(max(now + SAMPLE_INTERVAL - time.monotonic(), 0.001))
    return counts


def folded(frames: Sequence[tuple[str, str]], root: str) -> str:
    """One line for a stack below `root`: files and functions, the outermost first."""
    names = (f"{name} ({'/'.join(file.split('/')[-2:])})" for file, name in frames)
    return ";".join(each.replace(";", ":") for each in (root, *names))


def _frames(frame: FrameType | None) -> list[tuple[str, str]]:
    """The functions of a stack with their files, the outermost first, from the user's code on."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back
    while found and BOOTSTRAP.search(found[-1][0]):
        found.pop()
    return found[::-1]


_profile: WorkerProfile | None = None
"""The profile of this process; None without one."""


def profile(folder: Path, seconds: float, signum: int) -> None:
    """Begin a profile, unless one is under way. For the handler of a signal."""
    global _profile
    if _profile is None:
        _profile = WorkerProfile(folder, seconds, signum)
        _profile.begin()


def end_profile() -> None:
    """End torch's part of the profile that is under way, if it is time to. For the handler of a signal."""
    if _profile is not None:
        _profile.end()
