"""The file with the status of a job: written at most every so often, and by a thread, so that no event waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from unirun.observe.jobdir import JobDir
from unirun.observe.status import JobStatus, write_status
from unirun.wire.reporting import report_error

DELAY, MAX_DELAY = 0.02, 1.0
"""Seconds in which changes are gathered into one writing: ten times the processor time that it takes, within these."""


class StatusFile:
    """The status file of one master. `snapshot` returns a function that makes the current status, None when nothing is
    to be written any more; `failed` is called with the reason when a write fails."""

    def __init__(
        self,
        job: JobDir,
        snapshot: Callable[[], Callable[[], JobStatus] | None],
        failed: Callable[[str], None],
    ) -> None:
        self._job, self._snapshot, self._failed = job, snapshot, failed
        self._one_by_one = asyncio.Lock()
        self._news = asyncio.Event()
        self._took = 0.0
        self._written = 0

    def write_soon(self) -> None:
        """Write it in a moment: more may change until then."""
        self._news.set()

    async def write(self) -> None:
        """Write it now."""
        async with self._one_by_one:
            self._news.clear()
            status = self._snapshot()
            if status is not None and (problem := await asyncio.to_thread(self._replace, status)):
                # A full disk must not end a job that can go on; the next change tries again.
                self._failed(problem)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write it after each change, and for the last time at the end: an event that comes later, such as the end of a
        stream, writes nothing."""
        task = asyncio.ensure_future(self._keep())
        try:
            yield
        finally:
            async with self._one_by_one:
                # A thread that writes cannot be cancelled.
                task.cancel()
            await self.write()

    async def _keep(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(min(max(DELAY, 10 * self._took), MAX_DELAY))
            try:
                await self.write()
            except Exception as error:  # noqa: BLE001 - a status that cannot be made must not end a job
                report_error(error)

    def _replace(self, status: Callable[[], JobStatus]) -> str:
        """Replace the file, and return the reason why it could not be written; empty when it was, or was not to be."""
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
        """Return True if another master has written the status since this one did: then the term of this one
        is over, though it has not been told yet."""
        return self._written != 0 and _written_at(self._job.state) not in (0, self._written)


def _written_at(path: Path) -> int:
    """The time at which a file was written, in nanoseconds; 0 when it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
