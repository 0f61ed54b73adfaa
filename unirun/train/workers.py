"""`Workers`: the job behind a trainer, with one role of `TrainWorker`. It runs where jobs run, as the command starts
it, and ends with the process that has started it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from unirun import atomic
from unirun.errors import (
    EXIT_FAILURE,
    EXIT_PLACEMENT,
    EXIT_USAGE,
    JobError,
    PlacementError,
    RemoteTraceback,
    RendezvousError,
    StoreError,
    TrainingFailed,
    UsageError,
    WireError,
    WorkerLost,
)
from unirun.observe.jobdir import job_at, temporary_directory
from unirun.observe.status import ENDED, JobStatus
from unirun.rendezvous.masters import follow_to_end
from unirun.roles.calls.group import RoleGroup
from unirun.roles.visitor import Visitor
from unirun.train.job import JobHandle, python_path
from unirun.train.losses import LIMIT, LOSS_REPORT_TIMEOUT, loss_of
from unirun.train.output import RankOutput, pieces
from unirun.train.setup import ROLE, Setup
from unirun.wire.messages import Stop
from unirun.wire.reporting import gave_up

WORKERS_START_TIMEOUT = 120.0
"""Seconds in which the workers must be up."""

LOSS_REPORT_POLL_INTERVAL = 0.02
"""Seconds between two looks for that report."""

JOB_END_TIMEOUT = 30.0
"""Seconds in which the job must end."""

WORKERS_GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL for its workers."""

NOTE = "unirun: "
"""The beginning of the command's own lines."""


def shutdown_after(error: str) -> Stop:
    """The request with which a trainer ends its job, after an `error` of this type, if any."""
    after = f" after {error}" if error else ""
    return Stop(
        int(signal.SIGTERM),
        f"its trainer was shut down{after}",
        grace=WORKERS_GRACE_SECONDS,
        code=EXIT_FAILURE if error else 0,
    )


class Workers:
    """The workers of one trainer, from `start` to `stop`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.name = f"train-{secrets.token_hex(3)}"
        """The id of the job."""
        self._handle = JobHandle(job_at(self.name))
        self._process: subprocess.Popen[bytes] | None = None
        self._visitor: Visitor | None = None
        self._owner = os.getpid()
        self._said: deque[str] = deque(maxlen=30)
        self.error = ""
        """The type of the error that has ended the last run or the program; with one, the job has not succeeded when it
        is stopped."""
        self._readers: list[threading.Thread] = []
        self._output = RankOutput()

    def start(self) -> None:
        """Start them, and wait until all are up. Raises `UsageError`, `PlacementError`, `JobError`,
        `TrainingFailed`."""
        with tempfile.TemporaryDirectory(prefix="unirun-", dir=temporary_directory("the job file")) as folder:
            file = Path(folder, "job.json")
            atomic.replace(file, json.dumps(self._setup.job_file(self.name)))
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "unirun.launcher.tethered", str(os.getpid()), "unirun"),
                    *("--quiet", "--config", str(file), "--rdzv-id", self.name),
                    *self._setup.options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
            for pipe, out in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
                assert pipe is not None
                reader = threading.Thread(target=self._pass_on, args=(pipe, out), daemon=True)
                reader.start()
                self._readers.append(reader)
            try:
                self._connect(time.monotonic() + WORKERS_START_TIMEOUT)
                self.wait_until_whole(WORKERS_START_TIMEOUT)
            except BaseException:
                self.stop()
                raise

    def _connect(self, deadline: float) -> None:
        while self._visitor is None:
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                raise self._refused(code)
            try:
                self._visitor = Visitor(job_at(self.name))
            except (JobError, RendezvousError, WireError, StoreError) as error:
                # It has not begun yet.
                if time.monotonic() >= deadline:
                    raise TrainingFailed(
                        f"the workers did not start within {WORKERS_START_TIMEOUT:g} s: {error}"
                    ) from error
                time.sleep(0.01)

    def _refused(self, code: int) -> Exception:
        """The command has ended before the job began: it has said why."""
        for reader in self._readers:
            reader.join(JOB_END_TIMEOUT)
        text = "\n".join(line.removeprefix(NOTE) for line in self._said) or f"exit code {code}"
        if code == EXIT_PLACEMENT:
            return PlacementError(text, role=ROLE, needed=self._setup.least, available=0)
        if code == EXIT_USAGE:
            return UsageError(text)
        return TrainingFailed(f"the workers could not be started: {text}")

    def _pass_on(self, pipe: IO[bytes], out: str) -> None:
        """Show what workers write, and keep what the command says."""
        with pipe:
            for piece in pieces(pipe):
                if out == "stderr" and piece.startswith(NOTE):
                    self._said.append(piece.rstrip())
                else:
                    self._output.show(out, piece)

    @property
    def visitor(self) -> Visitor:
        """The calls of this process."""
        if self._visitor is None:
            raise UsageError("the trainer has no workers", "call start()")
        return self._visitor

    @property
    def group(self) -> RoleGroup:
        """All workers that there are now."""
        return self.visitor.role_group(ROLE)

    @property
    def lives(self) -> bool:
        """True if the job goes on."""
        return self._process is not None and self._process.poll() is None and not self._over()

    def _over(self) -> bool:
        view = self._visitor.peers.view(ROLE) if self._visitor is not None else None
        return view is not None and all(worker.phase == "ended" for worker in view.workers)

    @property
    def generation(self) -> int:
        """The number of times that their process group was formed again, as ranks were lost."""
        return self.visitor.peers.known(ROLE).generation

    @property
    def world_size(self) -> int:
        """The number of ranks now."""
        return self.visitor.peers.size(ROLE)

    @property
    def incarnations(self) -> tuple[int, ...]:
        """The number of times that each rank was started again."""
        view = self.visitor.peers.view(ROLE)
        return tuple(worker.incarnation for worker in view.workers) if view is not None else ()

    def wait_until_whole(self, timeout: float) -> None:
        """Wait until every rank takes calls. Raises `TrainingFailed` after `timeout` seconds, and when the job has
        ended."""
        peers, deadline = self.visitor.peers, time.monotonic() + timeout

        def settled() -> bool:
            view = peers.view(ROLE)
            whole = view is not None and all(worker.phase == "serving" for worker in view.workers)
            return whole and view is not None and view.phase == "running"

        def again() -> bool:
            """Return True if a rank ends as often as it starts, as the first hook of its backend fails."""
            found = self.incarnations
            return any(
                new - old >= LIMIT for old, new in zip(before or [0] * len(found), found, strict=False)
            )

        before = self.incarnations
        while not peers.wait_for(lambda: settled() or self._over() or again(), 0.5):
            if not self.lives or time.monotonic() >= deadline:
                raise self.failure(f"not all ranks were up within {timeout:g} s")
        if self._over():
            raise self.failure("the workers have ended")
        if not settled():
            raise self.failure(
                f"a rank was started {LIMIT} times and does not come up: on_start or on_failure of the backend "
                f"{self._setup.backend!r} ends it"
            )

    def failure(self, problem: str) -> TrainingFailed:
        """The error of workers that are gone, with what the job has to say."""
        with contextlib.suppress(JobError):
            status = self._handle.status()
            if status.phase in ENDED:
                problem = f"{problem}: {status.reason}"
            elif status.failures:
                last = status.failures[-1]
                problem = f"{problem}: {loss_of(last.who, last.exit, last.message)}"
        return TrainingFailed(problem, f"see unirun logs {self.name}")

    def loss(self, error: WorkerLost, called: Sequence[int]) -> str:
        """The end of the worker whose loss `error` reports. `called` are the incarnations of the ranks that were
        called."""
        if isinstance(error.__cause__, RemoteTraceback):
            # The worker has reported its end itself.
            return f"{error.worker} {error.problem.removeprefix(f'{error.worker} ')}"
        rank, deadline = int(error.worker.rpartition(":")[2]), time.monotonic() + LOSS_REPORT_TIMEOUT
        while True:
            updates = self.visitor.peers.updates
            with contextlib.suppress(JobError):
                for each in reversed(self._handle.status().failures):
                    if each.who == error.worker and each.incarnation >= (*called, *[0] * (rank + 1))[rank]:
                        return loss_of(each.who, each.exit, each.message)
            if time.monotonic() >= deadline:
                return loss_of(error.worker, "")
            self.visitor.peers.wait(updates, LOSS_REPORT_POLL_INTERVAL)

    def grow(self) -> None:
        """Have more ranks, if there is room for some."""
        self.visitor.grow(ROLE)

    def status(self) -> JobStatus:
        """The state of the job."""
        return self._handle.status()

    def stop(self) -> None:
        """End the job, and wait for that. Does nothing in a fork of the process that has started it."""
        if os.getpid() != self._owner:
            return
        visitor, self._visitor = self._visitor, None
        if visitor is not None:
            visitor.close()
        process = self._process
        if process is None:
            return
        if visitor is not None:
            with contextlib.suppress(JobError, TimeoutError):
                follow_to_end(job_at(self.name), shutdown_after(self.error), JOB_END_TIMEOUT)
        elif process.poll() is None:
            process.terminate()
        try:
            process.wait(JOB_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            gave_up("the end of the trainer's job", JOB_END_TIMEOUT)
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(JOB_END_TIMEOUT)
        self._output.close(JOB_END_TIMEOUT)
        self._process = None
