"""`ProcessWatch` reports the end of a process once."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.observe.jobdir import ProcessWatch


@pytest.mark.starts_processes
def test_process_watch_calls_once_when_the_process_ends() -> None:
    async def watch() -> int:
        told = 0
        gone = asyncio.Event()

        def when_gone() -> None:
            nonlocal told
            told += 1
            gone.set()

        with subprocess.Popen(["sleep", "100"]) as child:
            watch = ProcessWatch(child.pid, when_gone)
            await asyncio.sleep(0)
            assert not gone.is_set()
            child.kill()
            await asyncio.wait_for(gone.wait(), WAIT_TIMEOUT)
        watch.close()
        await asyncio.sleep(0)
        return told

    assert asyncio.run(watch()) == 1


def test_process_watch_calls_for_a_process_that_is_already_gone() -> None:
    async def watch() -> None:
        gone = asyncio.Event()
        ProcessWatch(1 << 22, gone.set).close()
        await asyncio.wait_for(gone.wait(), WAIT_TIMEOUT)

    asyncio.run(watch())


@pytest.mark.starts_processes
def test_process_watch_does_not_call_after_close() -> None:
    async def watch() -> None:
        with subprocess.Popen(["sleep", "100"]) as child:
            watch = ProcessWatch(child.pid, lambda: (_ for _ in ()).throw(AssertionError("told after close")))
            watch.close()
            watch.close()
            child.kill()
            await asyncio.to_thread(child.wait, WAIT_TIMEOUT)
            await asyncio.sleep(0)

    asyncio.run(watch())
