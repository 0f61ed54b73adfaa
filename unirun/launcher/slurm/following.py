"""Follows a batch job: shows its output and its state, and ends it when the user asks for that."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from unirun.errors import EXIT_FAILURE, JobError, RendezvousError
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.logs import LogFollower
from unirun.observe.batchjob import SLURM_OUTAGE_TIMEOUT, BatchJob, BatchState, ask_slurm, batch_state
from unirun.observe.jobdir import JobDir
from unirun.observe.status import read_summary

FIRST_LOOK, LAST_LOOK = 1.0, 5.0
"""Seconds between two looks at a batch job: the longer nothing has changed the longer, up to the second."""


def cancel(batch: BatchJob, *, now: bool = False) -> None:
    """End a batch job: SIGTERM to all its processes, and SIGKILL after the cluster's KillWait, or with `now` at once.

    Raises `JobError` when it has ended or is another user's, `RendezvousError` when Slurm does not answer.
    """
    ask_slurm("scancel", *(["--signal=KILL", "--full"] if now else []), batch.id)


def wait_for_end(batch: BatchJob, timeout: float) -> BatchState:
    """Wait until a batch job has ended. Raises `TimeoutError` after `timeout` seconds, `RendezvousError`."""
    deadline = time.monotonic() + timeout
    while (state := batch_state(batch)).active:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"Slurm job {batch.id} has not ended within {timeout:g} s")
        time.sleep(FIRST_LOOK)
    return state


class Follower:
    """Follows one batch job in the foreground."""

    def __init__(self, job: JobDir, batch: BatchJob, *, quiet: bool) -> None:
        self._job, self._batch, self._quiet = job, batch, quiet
        self._signals: list[signal.Signals] = []
        self._woken = threading.Event()
        self._shown: tuple[object, ...] = ()
        self._unwritten: OSError | None = None

    def run(self) -> int:
        """Follow the job until it has ended. Returns its exit code, or 128 + the signal that has ended it.

        Raises `RendezvousError` when Slurm has not answered for `SLURM_OUTAGE_TIMEOUT` seconds; the job goes on then.
        """
        with self._catching(), self._output() as logs:
            state = self._to_its_end(logs)
        if self._unwritten is not None:
            raise self._unwritten
        code = self._code(state)
        return 128 + self._signals[0] if self._signals and code else code

    def _to_its_end(self, logs: LogFollower) -> BatchState:
        followed = False
        pause, asked = FIRST_LOOK, 0
        answered = time.monotonic()
        while True:
            try:
                state = batch_state(self._batch)
                answered = time.monotonic()
            except RendezvousError as error:
                if time.monotonic() > answered + SLURM_OUTAGE_TIMEOUT:
                    raise
                self._note((str(error),), f"{error}; trying again")
            else:
                changed = self._tell(state)
                pause = FIRST_LOOK if changed else min(1.5 * pause, LAST_LOOK)
                if not followed and state.output and os.path.exists(state.output):
                    logs.follow(Path(state.output), self._show, parts=True)
                    followed = True
                if not state.active or self._unwritten is not None:
                    return state
            self._woken.wait(pause)
            self._woken.clear()
            if asked < min(len(self._signals), 2):
                asked = min(len(self._signals), 2)
                pause = FIRST_LOOK
                self._cancel(now=asked > 1)

    def _tell(self, state: BatchState) -> bool:
        """Tell a new state, and the first reason for which the job is pending; whether there was something to tell."""
        key = (state.state, state.nodes, state.restarts, bool(state.reason))
        return self._note(key, f"Slurm job {self._batch.id}: {state.words}")

    def _note(self, key: tuple[object, ...], text: str) -> bool:
        new = key != self._shown
        self._shown = key
        if new and not self._quiet:
            warn(text)
        return new

    def _cancel(self, *, now: bool) -> None:
        name = self._signals[-1].name
        warn(f"{name}: {'killing' if now else 'cancelling'} Slurm job {self._batch.id}")
        try:
            cancel(self._batch, now=now)
        except (JobError, RendezvousError) as error:
            # It has ended meanwhile, or the next signal asks again.
            warn(str(error))

    def _show(self, data: bytes) -> None:
        """Called in the thread of the log follower."""
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError as error:
            self._unwritten = error
            self._woken.set()

    def _code(self, state: BatchState) -> int:
        """The job's own exit code; where it has left none, that of Slurm."""
        with contextlib.suppress(JobError):
            if (told := read_summary(self._job).code) is not None:
                return told
        if state.code is not None:
            return state.code
        warn(f"Slurm does not tell how job {self._batch.id} has ended")
        return EXIT_FAILURE

    @contextlib.contextmanager
    def _output(self) -> Iterator[LogFollower]:
        logs = LogFollower(shared=True)
        try:
            yield logs
        finally:
            logs.finish()

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """Keep SIGINT and SIGTERM as requests to cancel the job. SIGHUP ends this process, and the job goes on.

        As for a job that runs here, SIGTERM that comes after a request does not hurry.
        """

        def keep(signum: int, _: FrameType | None) -> None:
            if signum == signal.SIGINT or not self._signals:
                self._signals.append(signal.Signals(signum))
                self._woken.set()

        before = {each: signal.signal(each, keep) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
