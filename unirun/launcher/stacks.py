"""The stacks of the workers of a node, taken by its agent: by a signal, else by py-spy where it is installed.

A worker answers the signal in C (`unirun.launcher.sampler.answer_for_stacks`), so also while one of its threads holds
the GIL. What has no such handler, or is stopped, is left to py-spy; of the rest there is what the kernel tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirun.failover.hangs import STOPPED
from unirun.failover.stacks import parsed
from unirun.launcher.process import takes_signal
from unirun.launcher.sampler import STACKS_MEMORY, STACKS_SIGNAL
from unirun.wire.reports import ThreadStack

LOOK_INTERVAL = 0.01
"""Seconds between two looks at the answers."""

PY_SPY_TIMEOUT = 3.0
"""Seconds that py-spy may take for a process."""


class Asked:
    """A process that was sent the signal: the memory that it writes to, and how much of that it had written."""

    def __init__(self, pid: int) -> None:
        """Raises OSError if the process cannot be asked."""
        if not takes_signal(pid, STACKS_SIGNAL) or state_of(pid)[0] in STOPPED:
            raise OSError(f"process {pid} does not answer")
        self._memory = _memory_of(pid)
        try:
            # What was asked for before is not needed any more.
            os.ftruncate(self._memory, 0)
            os.kill(pid, STACKS_SIGNAL)
        except OSError:
            self.close()
            raise
        self.text, self._size = "", -1

    def answered(self) -> bool:
        """Return True if it has written all of its stacks: there are some, and no more than at the last look."""
        size = os.fstat(self._memory).st_size
        done = size == self._size and size > 0
        self._size = size
        if done:
            self.text = os.pread(self._memory, size, 0).decode(errors="replace")
        return done and "\nCurrent thread" in f"\n{self.text}"

    def close(self) -> None:
        """Close its memory."""
        os.close(self._memory)


def _memory_of(pid: int) -> int:
    """The memory to which a worker writes its stacks. Raises OSError if it has none."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(entry.path).startswith(f"/memfd:{STACKS_MEMORY}"):
                return os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {pid} has no memory for stacks")


async def take_texts(pids: Mapping[int, int], timeout: float) -> dict[int, str]:
    """Let processes write their stacks. Returns what those have written that have answered within `timeout` seconds, by
    the keys of `pids`."""
    asked: dict[int, Asked] = {}
    for number, pid in pids.items():
        # It may have ended, or be of another user.
        with contextlib.suppress(OSError):
            asked[number] = Asked(pid)
    texts: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(texts) < len(asked) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_INTERVAL)
            texts |= {n: each.text for n, each in asked.items() if n not in texts and each.answered()}
    finally:
        for each in asked.values():
            each.close()
    return texts


async def take_stacks(
    pids: Mapping[int, int], timeout: float
) -> dict[int, tuple[str, tuple[ThreadStack, ...]]]:
    """The source and the stacks of each of these processes that has some, by the keys of `pids`."""
    texts = await take_texts(pids, timeout)
    found = {number: ("the signal", parsed(text)) for number, text in texts.items()}
    spy = py_spy()
    silent = [number for number in pids if number not in found]
    if spy is not None and silent:
        answers = await asyncio.gather(*(_spied(spy, pids[number]) for number in silent))
        found |= {n: ("py-spy", threads) for n, threads in zip(silent, answers, strict=True) if threads}
    return found


def py_spy() -> str | None:
    """The path of py-spy, if it is installed in this environment or in PATH."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")


async def _spied(spy: str, pid: int) -> tuple[ThreadStack, ...]:
    """The stacks of a process as py-spy sees them, without a pause of it; none if it may not, or it is no Python."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    command = (spy, "dump", "--nonblocking", "--json", "--pid", str(pid))
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=null)
    except OSError:
        # It is of another kind of machine, for example, or this host is out of processes.
        return ()
    try:
        async with asyncio.timeout(PY_SPY_TIMEOUT):
            out, _ = await process.communicate()
        return tuple(threads_of(json.loads(out)))
    except (TimeoutError, ValueError, KeyError, TypeError):
        return ()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def threads_of(dumped: Sequence[Mapping[str, Any]]) -> Iterator[ThreadStack]:
    """The threads in what ``py-spy dump --json`` has written."""
    for thread in dumped:
        frames = tuple(f"{each['filename']}:{each['line']} in {each['name']}" for each in thread["frames"])
        main = thread.get("os_thread_id") == thread["pid"] or thread.get("thread_name") == "MainThread"
        yield ThreadStack(thread.get("thread_name") or str(thread.get("os_thread_id")), frames, main)


def state_of(pid: int) -> tuple[str, bool]:
    """The state of a process as ``ps`` shows it, and whether a debugger holds it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "?", False
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return fields.get("State", "?").split()[0], fields.get("TracerPid", "0").strip() != "0"


def kernel_of(pid: int) -> str:
    """The function of the kernel in which the main thread of a process waits; empty if that is not known."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0 \n")
    return ""
