"""`unirun.EngineClient` and engines that are processes: killed, stopped and started again while hundreds of requests run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import unirun
from tests.testbed import engine as stub
from tests.testbed.engine import tokens
from tests.waiting import WAIT_TIMEOUT
from unirun.rollout import Answer

pytestmark = pytest.mark.processes


class Engines:
    """Stubs of one role. The test is their agent: it starts them, and keeps the file of addresses."""

    def __init__(self, folder: Path, count: int, latency: float) -> None:
        self.path, self.latency = folder / "addresses.json", latency
        self.processes: list[subprocess.Popen[str]] = []
        self.ports = [0] * count
        self.incarnations, self.ready = [0] * count, [True] * count
        for rank in range(count):
            self.processes.append(self._started(rank))
        self.tell()

    def _started(self, rank: int) -> subprocess.Popen[str]:
        options = ["--port", str(self.ports[rank]), "--latency", str(self.latency), "--enable-scale-out"]
        command = [sys.executable, stub.__file__, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self.ports[rank] = int(process.stdout.readline().rpartition(":")[2])
        assert process.stdout.readline().startswith("Application startup complete")
        return process

    def tell(self) -> None:
        """Replace the file of addresses."""
        entries = [
            {
                "rank": rank,
                "incarnation": self.incarnations[rank],
                "host": "127.0.0.1",
                "ports": {"http": port},
                "addr": f"127.0.0.1:{port}",
                "ready": self.ready[rank],
                "node": "n0",
            }
            for rank, port in enumerate(self.ports)
        ]
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"engine": entries}))
        os.replace(new, self.path)

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    def unready(self, rank: int) -> None:
        """It was seen that this one answers no more."""
        self.ready[rank] = False
        self.tell()

    async def restart(self, rank: int) -> None:
        """Do what an agent does then: SIGKILL, and the same program again on the same port."""
        self.close(rank)
        self.incarnations[rank] += 1
        self.processes[rank] = await asyncio.to_thread(self._started, rank)
        self.ready[rank] = True
        self.tell()

    def close(self, rank: int) -> None:
        process = self.processes[rank]
        process.kill()
        process.wait(WAIT_TIMEOUT)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Three, each of whose outputs takes 0.1 s."""
    made = Engines(tmp_path, 3, latency=0.1)
    monkeypatch.setenv("UNIRUN_ADDRS_FILE", str(made.path))
    yield made
    for rank in range(3):
        made.close(rank)


async def asked(client: unirun.EngineClient, count: int, at_a_time: int) -> list[list[Answer]]:
    """The answers to `count` requests, of which each is a list with all that its call returned."""
    numbers = iter(range(count))
    answers: list[list[Answer]] = [[] for _ in range(count)]

    async def ask() -> None:
        for number in numbers:
            answers[number].append(await client.generate([number, 1], max_tokens=8))

    await asyncio.gather(*(ask() for _ in range(at_a_time)))
    return answers


def all_answered_once(answers: list[list[Answer]]) -> None:
    assert [[each.token_ids for each in found] for found in answers] == [
        [tokens([number, 1], 8)] for number in range(len(answers))
    ]


async def killed(engines: Engines) -> None:
    """Two of three die; one of them comes back."""
    await asyncio.sleep(0.1)
    engines.signal(0, signal.SIGKILL)
    await asyncio.sleep(0.1)
    engines.unready(0)
    engines.signal(1, signal.SIGKILL)
    await engines.restart(0)


async def told_to_end(engines: Engines) -> None:
    """One gets SIGTERM, and aborts what it has."""
    await asyncio.sleep(0.1)
    engines.signal(1, signal.SIGTERM)
    await asyncio.sleep(0.1)
    await engines.restart(1)


async def stopped(engines: Engines) -> None:
    """One hangs, which its agent notices some time later."""
    await asyncio.sleep(0.1)
    engines.signal(1, signal.SIGSTOP)
    await asyncio.sleep(0.3)
    engines.unready(1)
    await engines.restart(1)


async def restarted(engines: Engines) -> None:
    """One after the other, all of them, and for a moment none is ready."""
    for rank in range(3):
        await engines.restart(rank)
    for rank in range(3):
        engines.unready(rank)
    for rank in range(3):
        await engines.restart(rank)


@pytest.mark.parametrize("accident", [killed, told_to_end, stopped, restarted])
def test_of_200_requests_none_is_lost_and_none_is_answered_twice(
    engines: Engines, accident: Callable[[Engines], Awaitable[None]]
) -> None:
    async def story() -> None:
        # On a busy machine one request may meet nearly all of these ends.
        async with unirun.EngineClient("engine", timeout=WAIT_TIMEOUT, attempts=10) as client:
            running = asyncio.create_task(asked(client, 200, at_a_time=40))
            await accident(engines)
            all_answered_once(await running)

    asyncio.run(story())


def test_an_engine_that_was_started_again_serves_as_its_next_incarnation(engines: Engines) -> None:
    async def story() -> None:
        async with unirun.EngineClient("engine", timeout=WAIT_TIMEOUT) as client:
            all_answered_once(await asked(client, 6, at_a_time=6))
            engines.signal(2, signal.SIGKILL)
            await engines.restart(2)
            later = await asked(client, 30, at_a_time=6)
        all_answered_once(later)
        places = {(str(answer.engine), answer.engine.incarnation) for found in later for answer in found}
        assert places >= {("engine:0", 0), ("engine:1", 0), ("engine:2", 1)}

    asyncio.run(story())
