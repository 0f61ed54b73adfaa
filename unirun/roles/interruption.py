"""The interruption of a user's function that runs in the main thread, whatever it waits for, when a peer is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

INTERRUPT = signal.SIGRTMIN + 7
"""The signal that interrupts a function in the main thread. Any signal that is free would do."""

INTERRUPT_RETRY_INTERVAL = 0.05
"""Seconds between two signals to the main thread, until the function that runs there has noticed its interruption."""


class Interrupted(BaseException):
    """The function is over for this rank: another one has failed or was lost, or the driver has ended it. Raised in the
    user's function, which has no reason to catch it."""


class MainThread:
    """The function that runs in the main thread, as other threads interrupt it."""

    def __init__(self) -> None:
        """Listen for the signal. Raises ValueError in any other thread than the main one."""
        self._check: Callable[[], None] | None = None
        self._waking = False
        """True from `wake` until the function has noticed. No event: its lock may be held when the signal comes."""
        signal.signal(INTERRUPT, self._signalled)

    def run(self, function: Callable[[], T], check: Callable[[], None]) -> T:
        """Call `function`. `check`, which raises `Interrupted` when it is due, is called now and after `wake`. A
        function may run another one, which is then the one that is interrupted."""
        before = self._check
        try:
            self._check = check
            check()
            return function()
        finally:
            self._check = before
            self._waking = False

    def runs(self, check: Callable[[], None]) -> bool:
        """Return True while the function with this `check` runs, and has not been interrupted."""
        return self._check == check

    def wake(self, check: Callable[[], None]) -> None:
        """Let the function with this `check` notice that it is interrupted. A signal that comes just before a system
        call does not end that, so it is sent until the function has noticed."""
        if self.runs(check):
            self._waking = True
            self._signal()

    def _signal(self) -> None:
        if not self._waking:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
        threading.Timer(INTERRUPT_RETRY_INTERVAL, self._signal).start()

    def _signalled(self, signum: int, frame: FrameType | None) -> None:
        check = self._check
        if check is None or _imports(frame):
            # A module that was imported in part would stay so in this process.
            return
        self._waking = False
        # Once: what the function does to clean up is not interrupted.
        self._check = None
        check()
        self._check = check


_main_thread: MainThread | None = None


def main_thread() -> MainThread:
    """The one for calls of this process. Raises ValueError in any other thread than the main one."""
    global _main_thread
    if _main_thread is None:
        _main_thread = MainThread()
    signal.signal(INTERRUPT, _main_thread._signalled)
    return _main_thread


def _imports(frame: FrameType | None) -> bool:
    """Return True if the function is importing a module."""
    while frame is not None and frame.f_code is not MainThread.run.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
