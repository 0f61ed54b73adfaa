"""`should_stop`: all ranks of a role stop at the same step when the job, or one of them, is told to end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

from unirun.errors import UsageError
from unirun.observe.spans import spans
from unirun.roles.context import init

KEY = "unirun/stop"

STOP = "stop "
"""Before the last step, in the store, once that is final."""

STORE_TIMEOUT = timedelta(seconds=30)
"""For an answer of the role's store."""

AHEAD_SECONDS = 0.1
"""Steps of so much time are taken from the store at once, so that short steps do not wait for it."""

MAX_AHEAD = 10_000
"""Calls of `should_stop` without a look at the store, at most."""

LOST_TIMEOUT = 2.0
"""Seconds after which a rank of a role that restarts ends by itself, as it may wait for the rank that was lost."""

TOLD = 128 + signal.SIGTERM
"""The exit code of a process that has stopped as it was told."""


class Agreement:
    """The step at which the ranks of a role stop, in a store that they share.

    The store has the last step that a rank may run, which is beyond all that have begun: ``7``, or ``stop 7`` once it
    is final. A rank that needs more steps, or is told to end, compares and sets it in one operation, so no rank is past
    the step that becomes final.
    """

    def __init__(self, store: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._now = store, now
        self._seen, self._last, self._final = "", -1, False
        self._before: tuple[int, float] | None = None

    def reached(self, step: int, *, told: bool) -> bool:
        """Return True from the step on that no rank runs any more. `told`: this rank knows that the job ends. Raises
        torch's `DistError` when the store is gone."""
        ahead = self._ahead(step)
        while not self._final:
            if step <= self._last and not told:
                return False
            wanted = f"{STOP}{self._last}" if told else str(step + ahead)
            self._seen = self._store.compare_set(KEY, self._seen, wanted).decode()
            self._final = self._seen.startswith(STOP)
            self._last = int(self._seen.removeprefix(STOP))
        return step > self._last

    def _ahead(self, step: int) -> int:
        """The steps after this one that will take `AHEAD_SECONDS`, if they are as long as the one before."""
        now, before = self._now(), self._before
        self._before = step, now
        if before is None:
            return 0
        calls = AHEAD_SECONDS / max(now - before[1], AHEAD_SECONDS / MAX_AHEAD)
        return int(calls) * max(step - before[0], 0)


class Stopping:
    """The end of this process at a step of its own, in place of that by SIGTERM."""

    def __init__(self, *, chained: bool = True) -> None:
        """With `chained`, the handler of SIGTERM that was there is called as well; otherwise only by `close`."""
        self.stopped = self.told = False
        self._agreement: Agreement | None = None
        self._where: tuple[Any, ...] = ()
        self._series, self._step, self._chained = 0, -1, chained
        self._peers = init().peers
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("should_stop was called in another thread first", "call it in the main thread")
        self._before = signal.signal(signal.SIGTERM, self._signalled)
        if not callable(self._before):
            self._peers.when_changed(self._look)

    def should_stop(self, step: int, run: int = 0) -> bool:
        """Return True when the ranks of the role stop before `step` of this run."""
        if init().world_size == 1:
            self.stopped = self.told
        else:
            self.stopped = self._agreed(step, run).reached(step, told=self.told)
        return self.stopped

    def _agreed(self, step: int, run: int) -> Agreement:
        """The agreement about this run, in the store of this generation. All ranks may count again."""
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        where = (*address, self._peers.generation, run)
        series = 0 if where != self._where else self._series + (step < self._step)
        if self._agreement is None or (where, series) != (self._where, self._series):
            from unirun.roles.process_groups import dist

            store = dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)
            self._agreement = Agreement(dist.PrefixStore(f"{run}/{series}", store))
        self._where, self._series, self._step = where, series, step
        return self._agreement

    def close(self) -> None:
        """Let SIGTERM do what it did before, and do it now if it has come meanwhile."""
        signal.signal(signal.SIGTERM, self._before)
        if self.told:
            signal.raise_signal(signal.SIGTERM)

    def _signalled(self, signum: int, frame: FrameType | None) -> None:
        self.told = True
        if self._chained and callable(self._before):
            self._before(signum, frame)

    def _look(self) -> None:
        """If the role restarts because a rank was lost, others may wait for that one, and reach no step."""
        view = self._peers.view(self._peers.role)
        if view is None or view.phase != "restarting" or not any(w.phase == "lost" for w in view.workers):
            return
        timer = threading.Timer(LOST_TIMEOUT, self._leave)
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        if not self.stopped:
            spans().close()
            os._exit(TOLD)


_stopping: dict[int, Stopping] = {}
"""By process, as a fork is not told by the same signal."""


def should_stop(step: int) -> bool:
    """Return True when this rank is to save a checkpoint and leave, before it runs `step`: at the same step in all
    ranks of the role. Every rank asks before each step, or before the same ones::

        for step in range(first, STEPS):
            if unirun.should_stop(step):
                save(step)
                break
            ...

    From the first call on, SIGTERM does not end this process. It is sent when the job is stopped, preempted or
    cancelled; a rank that gets it alone stops the others, too. Ranks agree in the store of the role, which most steps
    do not wait for, and not by a collective. The process has the grace period to save, and its exit code is 143 if it
    ends normally. A handler of SIGTERM that the script has installed is called as well.

    Without the launcher it works under torchrun, and with plain Python. Raises `UsageError` if the first call is not in
    the main thread, and torch's ``DistError`` if the store of the role is gone.
    """
    pid = os.getpid()
    if pid not in _stopping:
        _stopping[pid] = Stopping()
    return _stopping[pid].should_stop(step)


def has_stopped() -> bool:
    """Return True if `should_stop` has returned True in this process."""
    return os.getpid() in _stopping and _stopping[os.getpid()].stopped
