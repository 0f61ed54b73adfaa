"""The agent's side of profiles: it asks a worker for one (`unirun.launcher.profiler`), and sends it to the master.

A thread of the worker sees the others only where these release the GIL. py-spy sees them anywhere, so its stacks take
the place of the worker's own where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import convert

from unirun.launcher.events import AgentState, Worker
from unirun.launcher.profiler import BOOTSTRAP, END_TIMEOUT, PROFILE, PROFILE_THREAD, TRACE
from unirun.launcher.requests import send_request
from unirun.launcher.stacks import py_spy
from unirun.values import Value, natural
from unirun.wire.messages import Profile
from unirun.wire.reports import Message, Profiled, TracePart

PROFILE_TIMEOUT = END_TIMEOUT + 30.0
"""Seconds after its profile in which a worker has to have written it."""

PROFILE_POLL_INTERVAL = 0.05
"""Seconds between two looks whether it has."""

SPY_TIMEOUT = 5.0
"""Seconds that py-spy may take besides those of the profile."""

PART_BYTES, MOST_BYTES = 1 << 20, 128 << 20
"""Bytes of a trace in one message, and of one that is sent at all."""


class _Written(Value):
    """The file that a worker writes at the end."""

    stacks: dict[str, int]
    without_trace: str


class Profiling:
    """Profiles of a node's workers. `state` gives the agent's state; `tell` sends to the master."""

    def __init__(self, state: Callable[[], AgentState], tell: Callable[[Message], None]) -> None:
        self._state, self._tell = state, tell
        self._busy: set[int] = set()

    async def profile(self, order: Profile) -> None:
        """Profile a worker, and send the result."""
        worker = self._state().find(order.role, order.rank)
        if worker is None or worker.pid is None or worker.sent is not None:
            self._tell(Profiled(order.number, problem="it has no process now, or is told to end"))
        elif worker.id in self._busy:
            self._tell(Profiled(order.number, problem="another unirun profile is under way"))
        else:
            self._busy.add(worker.id)
            try:
                self._tell(await self._profiled(worker, worker.pid, order))
            finally:
                self._busy.discard(worker.id)

    async def _profiled(self, worker: Worker, pid: int, order: Profile) -> Profiled:
        folder = Path(worker.request.logs, worker.request.folder)
        for name in (PROFILE, TRACE):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        if problem := send_request(pid, str(folder), f"profile={order.seconds:g}"):
            return Profiled(order.number, problem=problem)
        deadline = time.monotonic() + order.seconds + PROFILE_TIMEOUT
        spied = await _spied(pid, order.seconds)
        while not (folder / PROFILE).exists():
            if worker.id not in self._state().workers:
                return Profiled(order.number, problem="it has ended meanwhile")
            if time.monotonic() > deadline:
                text = "its main thread is not in Python code; unirun stacks shows where it is"
                return Profiled(order.number, problem=text)
            await asyncio.sleep(PROFILE_POLL_INTERVAL)
        try:
            if not (written := (folder / PROFILE).read_bytes()):
                return Profiled(order.number, problem=f"it cannot write to {folder}: is the disk full?")
            result = convert(json.loads(written), _Written)
            without = result.without_trace or await self._send(folder / TRACE, order.number)
        except (OSError, ValueError) as error:
            return Profiled(order.number, problem=f"its profile cannot be read: {error}")
        return Profiled(order.number, tuple(sorted((spied or result.stacks).items())), without)

    async def _send(self, path: Path, number: int) -> str:
        """Send a trace in parts. Returns the reason why it was not sent. Raises OSError."""
        data = await asyncio.to_thread(path.read_bytes)
        if len(data) > MOST_BYTES:
            return f"it has {len(data) >> 20} MiB, and is in {path} of its node"
        for at in range(0, len(data), PART_BYTES):
            self._tell(TracePart(number, data[at : at + PART_BYTES]))
            await asyncio.sleep(0)
        path.unlink()
        return ""


async def _spied(pid: int, seconds: float) -> dict[str, int]:
    """The folded stacks of a process as py-spy sees them; none if it is not installed, or may not."""
    if (spy := py_spy()) is None:
        return {}
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    how = ("--format", "raw", "--rate", "100", "--idle", "--threads", "--function", "--nonblocking")
    command = (
        spy,
        "record",
        *how,
        "--duration",
        str(math.ceil(seconds)),
        "--pid",
        str(pid),
        "--output",
        "/dev/stdout",
    )
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=null)
    except OSError:
        # It is of another kind of machine, for example, or this host is out of processes.
        return {}
    try:
        async with asyncio.timeout(seconds + SPY_TIMEOUT):
            out, _ = await process.communicate()
        return counts_in(out.decode(errors="replace"))
    except TimeoutError:
        return {}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def counts_in(text: str) -> dict[str, int]:
    """The folded stacks and their counts in what ``py-spy record --format raw`` has written, without the frames in
    which unirun starts the user's code."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        name = re.sub(r"^thread \(\w+\): ", "", thread)
        if (times := natural(count)) is None or name == PROFILE_THREAD:
            continue
        while frames and BOOTSTRAP.search(frames[0]):
            del frames[0]
        folded = ";".join((name, *frames))
        found[folded] = found.get(folded, 0) + times
    return found
