"""The file with the status of a job: written at most every so often, and by a thread, so that no event waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from unirun.observe import JobStatus, write_status
from unirun.rendezvous import JobDir
from unirun.reporting import report_error

DELAY, MAX_DELAY = 0.02, 1.0
"""Seconds in which changes are gathered into one writing: ten times the processor time that it takes, within these."""


class StatusFile:
    """Of one master. `snapshot` gives what makes the status of this moment, None when nothing is to be written any
    more; `failed` is told why it could not be written."""

    def __init__(
        self,
        job: JobDir,
        snapshot: Callable[[], Callable[[], JobStatus] | None],
        failed: Callable[[str], None],
    ) -> None:
        self._job, self._snapshot, self._failed = job, snapshot, failed
        self._one_by_one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: asyncio.TimerHandle | None = None
        self._closed = False
        self._took = 0.0
        self._written = 0

    def write_soon(self) -> None:
        """Write it in a moment: more may change until then."""
        if self._due is None and not self._closed:
            delay = min(max(DELAY, 10 * self._took), MAX_DELAY)
            self._due = asyncio.get_running_loop().call_later(delay, self._begin)

    async def write(self) -> None:
        """Write it now."""
        async with self._one_by_one:
            self._cancel()
            status = self._snapshot()
            if status is not None and (problem := await asyncio.to_thread(self._replace, status)):
                # A full disk must not end a job that can go on; the next change tries again.
                self._failed(problem)

    async def close(self) -> None:
        """Write it for the last time: an event that comes later, such as the end of a stream, writes nothing."""
        self._closed = True
        await self.write()

    def _cancel(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _begin(self) -> None:
        task = asyncio.ensure_future(self.write())
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report_error(error)

    def _replace(self, status: Callable[[], JobStatus]) -> str:
        """Why it could not be written; empty when it was, or was not to be."""
        began = time.thread_time()
        made, problem = status(), ""
        if self._another_writes():
            return ""
        try:
            write_status(self._job, made)
        except OSError as error:
            problem = f"the state cannot be written: {error}"
        # One of its files may have been replaced even so.
        self._written = _written_at(self._job.state)
        self._took = time.thread_time() - began
        return problem

    def _another_writes(self) -> bool:
        """Whether another master has written the status since this one did: then the term of this one is over, though
        it has not been told yet."""
        return self._written != 0 and _written_at(self._job.state) not in (0, self._written)


def _written_at(path: Path) -> int:
    """When a file was written, in nanoseconds; 0 when it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
