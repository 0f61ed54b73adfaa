"""A process's end is news, told once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from unirun.rendezvous import ProcessWatch, started_at

SOON = 20.0


@pytest.mark.starts_processes
def test_an_end_is_told_once() -> None:
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
            await asyncio.wait_for(gone.wait(), SOON)
        watch.close()
        await asyncio.sleep(0)
        return told

    assert asyncio.run(watch()) == 1


def test_a_process_that_is_gone_already_is_told_too() -> None:
    async def watch() -> None:
        gone = asyncio.Event()
        ProcessWatch(1 << 22, gone.set).close()
        await asyncio.wait_for(gone.wait(), SOON)

    asyncio.run(watch())


@pytest.mark.starts_processes
def test_nothing_is_told_after_close() -> None:
    async def watch() -> None:
        with subprocess.Popen(["sleep", "100"]) as child:
            watch = ProcessWatch(child.pid, lambda: (_ for _ in ()).throw(AssertionError("told after close")))
            watch.close()
            watch.close()
            child.kill()
            await asyncio.to_thread(child.wait, SOON)
            await asyncio.sleep(0)

    asyncio.run(watch())


@pytest.mark.parametrize(("late", "told"), [(None, False), (0, False), (1, True)])
def test_a_process_that_has_begun_at_another_time_is_another(late: int | None, told: bool) -> None:
    async def watch() -> None:
        gone = asyncio.Event()
        started = None if late is None else started_at(os.getpid()) + late
        watch = ProcessWatch(os.getpid(), gone.set, started)
        if told:
            await asyncio.wait_for(gone.wait(), SOON)
        else:
            await asyncio.sleep(0)
            assert not gone.is_set()
        watch.close()

    asyncio.run(watch())


@pytest.mark.starts_processes
def test_when_a_process_began_is_known_whatever_it_is_called() -> None:
    name = Path("/proc/self/comm")
    before, ticks = name.read_text(), os.sysconf("SC_CLK_TCK")
    began = started_at(os.getpid())
    try:
        name.write_text("a) R 1 (b")
        assert started_at(os.getpid()) == began
    finally:
        name.write_text(before)
    with subprocess.Popen(["sleep", "100"]) as child:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started_at(child.pid) / ticks
        child.kill()
    assert -1 < age < SOON
    assert began / ticks < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_process_that_is_gone_began_at_no_time() -> None:
    assert started_at(1 << 22) == 0
