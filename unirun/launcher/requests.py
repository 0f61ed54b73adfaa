"""Requests of an agent to a Python worker: a fault that it injects into itself (``unirun inject``), a debugger
(``unirun debug``), or a profile (``unirun profile``).

The agent writes the request to a file in the worker's directory, and sends a signal. The handler is Python's, so the
worker answers as soon as the main thread executes Python code: not while it is in a call of native code. Each request
has its own file, as signals that come meanwhile are one. A worker sends the signal to itself at the end of a profile.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from unirun import atomic
from unirun.launcher.process import takes_signal
from unirun.wire.reporting import report

REQUEST_SIGNAL = signal.SIGRTMAX - 3
"""The signal; SIGUSR1 and SIGUSR2 are the user's."""

REQUEST = "request."
"""The begin of the name of a file with a request, such as ``exit=3``. They are taken in the order of the names."""


PROFILER = "unirun.launcher.profiler"


def send_request(pid: int, folder: str, text: str) -> str:
    """Ask the worker that has the process `pid`, and the `folder`. Returns the problem, empty if it was asked."""
    try:
        if takes_signal(pid, REQUEST_SIGNAL):
            atomic.replace(Path(folder, f"{REQUEST}{time.monotonic_ns():020}"), text)
            os.kill(pid, REQUEST_SIGNAL)
            return ""
    except OSError as error:
        return str(error)
    return "it does not run unirun's code, or not yet"


def await_requests(environ: Mapping[str, str]) -> None:
    """Let this worker take requests, when it is started."""
    folder = Path(environ["TORCHELASTIC_ERROR_FILE"]).parent
    signal.signal(REQUEST_SIGNAL, partial(_take, folder))


def _take(folder: Path, _signum: int, frame: FrameType | None) -> None:
    # It is imported by the first profile.
    if (profiler := sys.modules.get(PROFILER)) is not None:
        profiler.end_profile()
    with ExitStack() as rest:
        # An error that a request raises is for the user's code, and those behind it are answered before.
        for path in sorted(folder.glob(f"{REQUEST}*"), reverse=True):
            rest.callback(_take_one, folder, path, frame)


def _take_one(folder: Path, path: Path, frame: FrameType | None) -> None:
    try:
        text = path.read_text()
        path.unlink()
    except FileNotFoundError:
        # Taken by the handler of a signal that came during a request before.
        return
    except OSError as error:
        report(f"unirun: no request can be taken from {path}: {error.strerror}")
        return
    _answer(folder, text, frame)


def _answer(folder: Path, text: str, frame: FrameType | None) -> None:
    what, _, amount = text.partition("=")
    if what == "debug":
        # Imported here: pdb is for those that are debugged.
        from unirun.launcher.debugger import attach

        attach(int(amount), frame)
        return
    if what == "profile":
        from unirun.launcher.profiler import profile

        profile(folder, float(amount), REQUEST_SIGNAL)
        return
    report(f"unirun: the fault {text} is injected")
    match what:
        case "exit":
            os._exit(int(amount))
        case "oom":
            raise MemoryError("injected by unirun inject")
        case "hang":
            _hang()
        case "hang-gil":
            _hang_with_the_gil()


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


def _hang_with_the_gil() -> NoReturn:
    import ctypes

    # Functions of a PyDLL are called without a release of the GIL.
    pause = ctypes.PyDLL(None).pause
    while True:
        pause()
