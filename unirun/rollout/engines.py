"""`Engines`: the engines of a role, their addresses and their readiness; in memory, or in the file of addresses.

The agent of each node keeps the file, for all processes that it starts; its path is in ``UNIRUN_ADDRS_FILE``. It is
JSON, with a list for each role that has addresses, and is replaced whenever something changes::

    {"engine": [{"rank": 0, "incarnation": 0, "host": "10.0.0.5", "ports": {"http": 20001},
                 "addr": "10.0.0.5:20001", "ready": true, "node": "n0"}]}
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec

from unirun.errors import UsageError
from unirun.values import Engine, Value

__all__ = ["ADDRESSES", "AddressFile", "Engine", "EngineList", "Engines"]

ADDRESSES = "UNIRUN_ADDRS_FILE"
"""The environment variable with the path of the file of addresses."""

ADDRESSES_POLL_INTERVAL = 0.05
"""Seconds between two looks at the file. A look takes some microseconds."""


class Engines(Protocol):
    """The engines of one role."""

    def engines(self) -> tuple[Engine, ...]:
        """All of them as they are now, and the same tuple while nothing changes. Raises `UsageError`: no such role."""

    async def changed(self, known: tuple[Engine, ...], timeout: float) -> tuple[Engine, ...]:
        """Wait until they are not those that are `known`, for at most `timeout` seconds; return them."""


class EngineList:
    """Engines that the program itself names, for servers outside a job and for tests."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._engines = tuple(engines)
        self._news = asyncio.Event()

    @classmethod
    def at(cls, *urls: str) -> EngineList:
        """Engines at these URLs, which are ready."""
        return cls(Engine(rank, 0, url, True) for rank, url in enumerate(urls))

    def set(self, engines: Iterable[Engine]) -> None:
        """These are the engines from now on. To be called in the thread of the event loop."""
        self._engines = tuple(engines)
        self._news.set()
        self._news = asyncio.Event()

    def engines(self) -> tuple[Engine, ...]:
        """See `Engines`."""
        return self._engines

    async def changed(self, known: tuple[Engine, ...], timeout: float) -> tuple[Engine, ...]:
        """See `Engines`."""
        try:
            async with asyncio.timeout(timeout):
                while self._engines == known:
                    await self._news.wait()
        except TimeoutError:
            pass
        return self._engines


class _Address(Value, forbid_unknown_fields=False):
    """An entry of the file, as far as it is read here. The agent may be of another version than this process."""

    rank: int
    incarnation: int
    addr: str
    ready: bool


class AddressFile:
    """The engines of `role` in the file of addresses at `path`. There are none while there is no file."""

    def __init__(self, path: str, role: str) -> None:
        self.path, self.role = path, role
        self._engines: tuple[Engine, ...] = ()
        self._seen: tuple[int, int, int] | None = None
        self._looked = float("-inf")

    def engines(self) -> tuple[Engine, ...]:
        """See `Engines`. The file is looked at once in `ADDRESSES_POLL_INTERVAL` seconds, and read when it is another
        one."""
        now = time.monotonic()
        if now - self._looked >= ADDRESSES_POLL_INTERVAL:
            self._looked = now
            self._look()
        return self._engines

    async def changed(self, known: tuple[Engine, ...], timeout: float) -> tuple[Engine, ...]:
        """See `Engines`."""
        deadline = time.monotonic() + timeout
        while (found := self.engines()) == known and (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(ADDRESSES_POLL_INTERVAL, left))
        return found

    def _look(self) -> None:
        try:
            status = os.stat(self.path)
            seen = status.st_ino, status.st_mtime_ns, status.st_size
            if seen == self._seen:
                return
            with open(self.path, "rb") as file:
                raw = file.read()
        except FileNotFoundError:
            self._engines, self._seen = (), None
            return
        self._engines, self._seen = self._read(raw), seen

    def _read(self, raw: bytes) -> tuple[Engine, ...]:
        try:
            roles = msgspec.json.decode(raw, type=dict[str, list[_Address]])
        except msgspec.DecodeError as error:
            raise UsageError(f"{self.path} is no file of addresses: {error}") from error
        if self.role not in roles:
            raise UsageError(
                f"role {self.role!r} has no address in this job",
                f"roles with addresses: {', '.join(sorted(roles)) or 'none'}",
            )
        return tuple(
            Engine(each.rank, each.incarnation, f"http://{each.addr}", each.ready)
            for each in roles[self.role]
        )
