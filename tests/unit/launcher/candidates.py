"""Views of a standby for its tests: the candidates that it starts, and the master that it follows."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.unit.rendezvous.standin import PATIENCE, Place
from unirun.launcher.standby import Standby
from unirun.wire.messages import Attach

T = TypeVar("T")


class Started:
    """The started masters: each is a process that records its arguments and sleeps."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "started"
        self.file.touch()
        self._program = folder / "python"
        self.then("exec sleep 100")
        monkeypatch.setattr(sys, "executable", str(self._program))

    def then(self, command: str) -> None:
        """Set a command that masters started from now on run after that."""
        self._program.write_text(f'#!/bin/sh\necho "$$ $*" >> {self.file}\n{command}\n')
        self._program.chmod(0o700)

    @property
    def lines(self) -> list[tuple[int, list[str]]]:
        """Pid and arguments of each."""
        rows = [line.split() for line in self.file.read_text().splitlines()]
        return [(int(row[0]), row[1:]) for row in rows]

    @property
    def deposing(self) -> list[str]:
        """The term that each was to depose."""
        return [arguments[-1] for _, arguments in self.lines]

    @property
    def inherited(self) -> str:
        """The file of the descriptor that the last argument of a candidate names, if it has looked."""
        file = Path(f"{self._program}.inherited")
        return file.read_text().strip() if file.exists() else ""

    async def until(self, count: int) -> None:
        """Wait until that many were started."""
        async with asyncio.timeout(PATIENCE):
            while len(self.lines) < count:
                await asyncio.sleep(0.005)


def run(place: Place, do: Callable[[Standby], Coroutine[Any, Any, T]], tcp: socket.socket | None = None) -> T:
    async def go() -> T:
        watch = Standby(place.job, place.lock, "n0", ("n0",), tcp)
        try:
            return await asyncio.wait_for(do(watch), PATIENCE)
        finally:
            watch.close()

    return asyncio.run(go())


def follow(place: Place, known: int = 0) -> int:
    """The term of the found master, after a message on its stream."""

    async def go(watch: Standby) -> int:
        epoch, stream = await watch.next(known, PATIENCE)
        stream.send(Attach())
        await stream.close()
        return epoch

    return run(place, go)
