"""The handle on a submitted job: its status, logs, end and result."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle

from unirun.errors import EXIT_FAILURE, JobError, JobFailed, RendezvousError, StoreError, WireError
from unirun.observe.jobdir import JobDir, all_jobs, choose_job
from unirun.observe.status import ENDED, JobStatus, read_status, runs
from unirun.rendezvous.masters import call_master, follow_to_end
from unirun.spec.read import nearest
from unirun.values import WorkerId
from unirun.wire.messages import Attach, Stop

if TYPE_CHECKING:
    from unirun.roles.calls.group import RoleGroup
    from unirun.roles.visitor import Visitor


MASTER_START_TIMEOUT = 30.0
"""Seconds in which the master of a submitted job must answer."""

RESULT = "result.pkl"
"""The file in a job's directory with what the trainer's ``fit`` returned."""


class JobHandle:
    """A submitted job. It reads the job's directory, and works as long as that exists.

    ::

        handle = job.submit("ppo", blocking=False)
        print(handle.status().phase)  # running
        print(handle["rollout"].generate("hello"))  # a call of the role's workers
        code = handle.wait(timeout=3600)  # seconds
    """

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._visitor: Visitor | None = None

    def __getitem__(self, role: str) -> RoleGroup:
        """All workers that `role` has now. Their methods are called as by a trainer.

        The first use connects this process to the job, and waits until that has a master. Raises `UsageError` for a
        role that the job does not have, `JobError` when the job has ended or nobody leads it.
        """
        return self._visit().role_group(role)

    def _visit(self) -> Visitor:
        if self._visitor is None:
            from unirun.roles.visitor import Visitor

            self.await_start()
            self._visitor = Visitor(self._job)
        return self._visitor

    def close(self) -> None:
        """Leave the job, which goes on. Calls that are open are not answered any more."""
        visitor, self._visitor = self._visitor, None
        if visitor is not None:
            visitor.close()

    def __enter__(self) -> JobHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JobHandle({self.run_id!r})"

    @property
    def run_id(self) -> str:
        """The job's id, which ``unirun status``, ``logs`` and ``stop`` take."""
        return self._job.run_id

    def status(self) -> JobStatus:
        """The state of the job: phase, roles, workers, failures. Raises `JobError` if its directory is gone."""
        return read_status(self._job)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the job's end, at most `timeout` seconds (None: no limit). Returns its exit code; 1 if it is lost.

        Raises `TimeoutError` if it has not ended by then; the job goes on.
        """
        return self._await_end(None, timeout)

    def stop(self) -> int:
        """Stop the job as SIGTERM does, and wait for its end.

        Returns its exit code: 143, or its own if it had ended before.
        """
        return self._await_end(Stop(int(signal.SIGTERM), "stopped by the program that submitted it"), None)

    def logs(self, role: str | None = None, rank: int | None = None) -> str:
        """The output of the latest incarnation of each worker; of all workers, of one `role`, or of one `rank` of it.

        Each line begins with its worker, ``[actor:2]``. The stdout of a worker comes first, then its stderr.
        Raises `JobError` if there is no such worker.
        """
        return "".join(self._lines(role, rank))

    @property
    def result(self) -> Any:
        """Wait for the job's end, and return what the trainer's `fit` returned. Raises `JobFailed`."""
        self.raise_if_failed()
        path = self._job.path / RESULT
        # None leaves no file.
        return cloudpickle.loads(path.read_bytes()) if path.exists() else None

    def raise_if_failed(self) -> None:
        """Wait for the job's end. Raises `JobFailed` if its exit code is not 0."""
        code = self.wait()
        if code:
            status = self.status()
            raise JobFailed(
                f"job {self.run_id} {status.phase} with exit code {code}: {status.reason}",
                f"see unirun logs {self.run_id}",
                code=code,
            )

    def await_start(self) -> None:
        """Wait until the job's master is there. Raises `JobError` when it is not within seconds."""
        deadline = time.monotonic() + MASTER_START_TIMEOUT
        while True:
            try:
                with call_master(self._job) as master:
                    # A stream that ends without a message would be recorded as refused.
                    master.send(Attach())
                return
            except (WireError, RendezvousError, StoreError) as error:
                if self.status().phase in ENDED:
                    return
                if time.monotonic() >= deadline:
                    raise JobError(f"the master of job {self.run_id} does not answer: {error}") from error
            time.sleep(0.02)

    def _await_end(self, stop: Stop | None, timeout: float | None) -> int:
        code = follow_to_end(self._job, stop, timeout).code
        return EXIT_FAILURE if code is None else code

    def _lines(self, role: str | None, rank: int | None) -> Iterator[str]:
        roles = self.status().roles
        names = [each.name for each in roles]
        if role is not None and role not in names:
            raise JobError(f"job {self.run_id} has no role {role!r}", nearest(role, names))
        chosen = [each for each in roles if role in (None, each.name)]
        if rank is not None and not any(rank == worker.rank for each in chosen for worker in each.workers):
            raise JobError(
                f"job {self.run_id} has no rank {rank} of {role or 'any role'}", "ranks begin at 0"
            )
        for each in chosen:
            for worker in each.workers:
                if rank not in (None, worker.rank):
                    continue
                folder = self._job.worker_logs(WorkerId(each.name, worker.rank, worker.incarnation))
                for name in ("stdout.log", "stderr.log"):
                    yield from _prefixed(f"[{each.name}:{worker.rank}] ", folder / name)


def _prefixed(prefix: str, path: Path) -> Iterator[str]:
    try:
        text = path.read_text(errors="backslashreplace")
    except FileNotFoundError:
        # It has not started yet.
        return
    if text:
        yield from (f"{prefix}{line}\n" for line in text.removesuffix("\n").split("\n"))


# `attach`: a process outside a job calls its workers.


def attach(job: str | None = None) -> JobHandle:
    """The handle on a job of this user that runs: its role groups, its status, its output.

    ::

        with unirun.attach("ppo-1a2b") as job:
            print(job["rollout"].generate("hello"))

    `job` is its id or the beginning of it; by default the newest that runs. Calls are those of a trainer, with the same
    promises, over sockets that prove the job's token. They go through restarts of workers and deaths of masters.
    Leaving changes nothing in the job. Raises `JobError` when there is no such job.
    """
    jobs = {each.run_id: each for each in all_jobs()}
    return JobHandle(jobs[choose_job(job, tuple(jobs), lambda run_id: runs(jobs[run_id]))])
