"""Faults that a Python worker injects into itself, when its agent asks for them (``unirun inject``).

The agent writes the fault to a file in the worker's directory, and sends a signal. The handler is Python's, so the
fault comes as soon as the main thread executes Python code: not while it is in a call of native code.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from unirun.wire.reporting import report

FAULT_SIGNAL = signal.SIGRTMAX - 3
"""The signal; SIGUSR1 and SIGUSR2 are the user's."""

FAULT_FILE = "fault"
"""The file with the fault, such as ``exit=3``."""


def await_faults(environ: Mapping[str, str]) -> None:
    """Let this worker take faults, when it is started."""
    folder = Path(environ["TORCHELASTIC_ERROR_FILE"]).parent
    signal.signal(FAULT_SIGNAL, partial(_take, folder / FAULT_FILE))


def _take(path: Path, *_signal: Any) -> None:
    try:
        text = path.read_text()
    except OSError as error:
        report(f"unirun: no fault can be read from {path}: {error.strerror}")
        return
    report(f"unirun: the fault {text} is injected")
    fault, _, amount = text.partition("=")
    match fault:
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
