"""Reward functions in processes of their own, which hang, crash and print."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually_async
from unirun.errors import RewardFailed, UsageError
from unirun.rollout.rewards import START_TIMEOUT, Rewards


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(WAIT_TIMEOUT):
            await story()

    asyncio.run(whole())


LARGE = 1 << 20
"""Bytes of an answer that do not fit into one read."""


def length(text: str, *, factor: float = 1.0, with_text: bool = False) -> float | str:
    print("not an answer")
    return text if with_text else len(text) * factor


def misbehave(what: str, marks: str = "") -> float:
    if what == "raise":
        raise ValueError("not a number")
    first = not marks or not os.path.exists(marks)
    if marks:
        Path(marks).touch()
    if what == "hang" and first:
        time.sleep(3600)
    if what == "crash" and first:
        os._exit(3)
    return 1.0


@pytest.mark.starts_processes
def test_calls_are_answered_by_processes_that_may_print() -> None:
    async def story() -> None:
        rewards = Rewards(length, processes=2)
        found = await asyncio.gather(*(rewards("x" * n, factor=0.5) for n in range(20)))
        assert found == [0.5 * n for n in range(20)]
        assert await rewards("x" * LARGE, with_text=True) == "x" * LARGE
        await rewards.close()

    play(story)


@pytest.mark.starts_processes
def test_a_call_that_is_cancelled_gives_its_place_to_the_next_and_leaves_no_process() -> None:
    async def story() -> None:
        rewards = Rewards(misbehave, processes=1)
        for _ in range(2):
            hangs = asyncio.create_task(rewards("hang"))
            while not rewards._all:
                await asyncio.sleep(0.01)
            hangs.cancel()
            await asyncio.wait({hangs})
            assert not rewards._all, "nothing is kept of a process that was killed"
        assert await rewards("answer") == 1.0
        (process,) = rewards._all
        await rewards.close()
        assert not os.path.exists(f"/proc/{process._process.pid}")

    play(story)


@pytest.mark.starts_processes
def test_a_process_whose_call_is_cancelled_while_it_starts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def recorded(*command: Any, **more: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **more))
        return started[-1]

    async def story() -> None:
        call = asyncio.create_task(Rewards(length)("x"))
        while not started:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        assert await started[0].wait() == -signal.SIGKILL

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    play(story)


def replaced(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The function of a module that has this source for all who import it later."""
    monkeypatch.syspath_prepend(str(folder))
    (folder / f"{name}.py").write_text("def reward():\n    return 1.0\n")
    found: Callable[[], float] = importlib.import_module(name).reward
    (folder / f"{name}.py").write_text(source)
    return found


@pytest.mark.starts_processes
def test_processes_that_start_end_when_they_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "begun"
    slow = f"import pathlib, time\npathlib.Path({str(marks)!r}).touch()\ntime.sleep(3600)\n"
    reward = replaced("slow_rewards", slow, tmp_path, monkeypatch)

    async def story() -> None:
        rewards = Rewards(reward, processes=1)
        call = asyncio.create_task(rewards())
        await eventually_async(marks.exists)
        async with asyncio.timeout(START_TIMEOUT / 2):
            await rewards.close()
        with pytest.raises(RewardFailed, match="was closed"):
            await call

    play(story)


def number(text: str) -> float:
    return float(text)


@pytest.mark.starts_processes
def test_numbers_that_are_none_come_as_they_are() -> None:
    async def story() -> None:
        rewards = Rewards(number, processes=1)
        assert math.isnan(await rewards("nan"))
        assert await rewards(-math.inf) == -math.inf
        await rewards.close()

    play(story)


@pytest.mark.starts_processes
def test_a_function_that_cannot_be_imported_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = replaced("gone_rewards", "", tmp_path, monkeypatch)

    async def story() -> None:
        rewards = Rewards(reward, processes=1)
        with pytest.raises(RewardFailed, match="has not started"):
            await rewards()
        assert rewards.failed == 1
        await rewards.close()

    play(story)


@pytest.mark.starts_processes
def test_a_function_that_raises_is_not_tried_again() -> None:
    async def story() -> None:
        rewards = Rewards(misbehave, processes=1)
        with pytest.raises(RewardFailed, match="not a number"):
            await rewards("raise")
        assert rewards.failed == 1
        assert await rewards("nothing") == 1.0
        await rewards.close()

    play(story)


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("hang", "not returned within .*; make it faster, or give it more time"),
        ("crash", "exit code 3, in each of 2 processes; correct it: what it has written may say why"),
    ],
)
def test_a_process_that_hangs_or_crashes_is_replaced_so_many_times(
    what: str, problem: str, tmp_path: Path
) -> None:
    async def story() -> None:
        rewards = Rewards(misbehave, processes=1, timeout=0.2 if what == "hang" else 15.0, attempts=2)
        # The second process answers.
        assert await rewards(what, str(tmp_path / "mark")) == 1.0
        assert len(rewards._all) == 1, "one that has ended is not kept: its number may be another process's"
        with pytest.raises(RewardFailed, match=problem):
            await rewards(what)
        assert not rewards._all
        await rewards.close()

    play(story)


@pytest.mark.starts_processes
def test_calls_that_are_open_end_with_the_processes_and_none_is_started_after_that() -> None:
    async def story() -> None:
        rewards = Rewards(misbehave, processes=1)
        assert await rewards("answer") == 1.0
        calls = [asyncio.create_task(rewards("hang")) for _ in range(3)]
        await eventually_async(rewards._idle.empty)
        (process,) = rewards._all
        for _ in range(2):
            await rewards.close()
            assert not os.path.exists(f"/proc/{process._process.pid}")
        calls.append(asyncio.create_task(rewards("answer")))
        await asyncio.wait(calls)
        assert [type(call.exception()) for call in calls] == [RewardFailed] * 4
        assert not rewards._all

    play(story)


def leave_another(fifo: str) -> None:
    """Hang, and leave a process that keeps the pipes as long as the other end of `fifo` is open."""
    if os.fork() == 0:
        os.setsid()
        with open(fifo, "rb") as end:
            end.read()
        os._exit(0)
    time.sleep(3600)


@pytest.mark.starts_processes
def test_a_call_that_is_cancelled_while_its_process_is_replaced_gives_its_place_to_the_next(
    tmp_path: Path,
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    keeps = os.open(fifo, os.O_RDWR)

    async def story() -> None:
        rewards = Rewards(leave_another, processes=1, timeout=0.5)
        call = asyncio.create_task(rewards(str(fifo)))
        await eventually_async(lambda: len(rewards._all) == 1)
        (process,) = rewards._all
        await eventually_async(lambda: process._process.returncode is not None)
        call.cancel()
        await asyncio.wait({call})
        os.close(keeps)
        await rewards.close()
        await process.end()

    play(story)


def start_another(fifo: str) -> None:
    with open(fifo, "w") as out:
        subprocess.Popen(["sh", "-c", "echo; exec sleep 3600"], stdout=out)
    time.sleep(3600)


@pytest.mark.starts_processes
def test_a_process_that_is_replaced_takes_along_what_it_has_started(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def read() -> bytes | None:
        """None while a process has the other end and says nothing."""
        try:
            return os.read(reader, 1)
        except BlockingIOError:
            return None

    async def story() -> None:
        rewards = Rewards(start_another, processes=1)
        hangs = asyncio.create_task(rewards(str(fifo)))
        await eventually_async(lambda: read() == b"\n")
        (process,) = rewards._all
        hangs.cancel()
        await asyncio.wait({hangs})
        await eventually_async(lambda: read() == b"")
        await process.end()

    play(story)
    os.close(reader)


@pytest.mark.parametrize("wrong", [lambda text: 1.0, play.__code__, asyncio.sleep])
def test_a_function_that_another_process_cannot_find_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        Rewards(wrong)
