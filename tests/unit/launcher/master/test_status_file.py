"""The status of a job is written when it has changed, and not otherwise."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.unit.failover.job import Job
from tests.waiting import WAIT_TIMEOUT, eventually_async
from unirun.failover.status_views import status_of
from unirun.launcher.master.shell import StatusFile
from unirun.observe.jobdir import JobDir
from unirun.observe.status import JobStatus, read_status, write_status


@pytest.fixture
def job_dir(tmp_path: Path) -> JobDir:
    return JobDir(tmp_path)


def status_file(job: JobDir, problems: list[str]) -> StatusFile:
    return StatusFile(job, lambda: partial(status_of, Job({"actor": 1}).state, {}, {}), problems.append)


def test_a_status_file_that_was_closed_writes_nothing_more(job_dir: JobDir) -> None:
    problems: list[str] = []

    async def main() -> None:
        file = status_file(job_dir, problems)
        async with file.kept():
            file.write_soon()
        job_dir.state.unlink()
        # The stream of an agent may end after the master has closed its files.
        file.write_soon()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert not job_dir.state.exists()
    assert problems == []


def test_a_status_that_cannot_be_written_is_told_and_written_with_the_next_change(job_dir: JobDir) -> None:
    problems: list[str] = []

    async def main() -> None:
        file = status_file(job_dir, problems)
        job_dir.state.mkdir()
        async with file.kept():
            await file.write()
            assert problems, "nothing was told"
            job_dir.state.rmdir()
            file.write_soon()

    asyncio.run(main())
    assert job_dir.state.is_file()


def test_a_status_is_written_on_when_it_was_touched_but_not_when_another_master_has_written_it(
    job_dir: JobDir,
) -> None:
    problems: list[str] = []
    state = Job({"actor": 1}).state

    async def main() -> None:
        file = StatusFile(job_dir, lambda: partial(status_of, state, {}, {}, epoch=1), problems.append)
        await file.write()
        os.utime(job_dir.state, ns=(1, 1))
        await file.write()
        assert job_dir.state.stat().st_mtime_ns != 1
        write_status(job_dir, status_of(state, {}, {}, epoch=2))
        await file.write()
        assert read_status(job_dir).epoch == 2

    asyncio.run(main())
    assert problems == []


def test_a_change_while_the_status_is_written_is_written_too(job_dir: JobDir) -> None:
    made: list[str] = []

    async def main() -> None:
        loop, name = asyncio.get_running_loop(), "first"

        def changes() -> None:
            nonlocal name
            name = "second"
            file.write_soon()

        def snapshot() -> Callable[[], JobStatus]:
            return partial(make, name)

        def make(name: str) -> JobStatus:
            if name == "first":
                changed = threading.Event()
                loop.call_soon_threadsafe(changes)
                loop.call_soon_threadsafe(changed.set)
                assert changed.wait(WAIT_TIMEOUT)
            made.append(name)
            return status_of(Job({"actor": 1}).state, {}, {})

        file = StatusFile(job_dir, snapshot, made.append)
        async with file.kept():
            file.write_soon()
            await eventually_async(lambda: "second" in made, "the change is written")

    asyncio.run(asyncio.wait_for(main(), WAIT_TIMEOUT))
