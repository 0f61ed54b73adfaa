"""The command's copy of what nodes on other hosts write: the files of a job's directory, as `feed` sends them."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from unirun.errors import FrameError, RendezvousError, WireError
from unirun.failover.silence import SILENT
from unirun.launcher.hosts.connection import Remote, carried, reach
from unirun.launcher.hosts.feed import GROWING, REPLACED
from unirun.launcher.hosts.hostlist import Host
from unirun.observe.jobdir import JobDir, open_log
from unirun.observe.ownership import make_private
from unirun.wire.aio import Stream
from unirun.wire.messages import Chunk, Complete, Current, Dismissed, Message, Resume

AGAIN = 1.0
"""Seconds between two attempts to reach a host again."""

CONNECT = 15.0
"""Seconds that an attempt may take."""


class Mirror:
    """Copies the files of one node into the directory `job`, over one ssh connection after another.

    `note` is told when the connection is lost and when it is back.
    """

    def __init__(
        self,
        job: JobDir,
        host: Host,
        remote: Remote | None,
        note: Callable[[str], None],
        silent: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        """`remote` sends all files already; without one, the node is asked for what is not here. `silent` is
        called with the node, and True when the connection to it is lost, or has brought nothing for `SILENT`
        seconds; False when it is back."""
        self._job, self._host, self.node, self._remote, self._note = job, host, host.name, remote, note
        self._silent = silent
        self._offsets = {} if remote is not None else offsets_here(job, host.name)
        self.current = asyncio.Event()
        """Set when all that the node had written when it was asked is here, or when it does not answer."""

    async def run(self) -> None:
        """Copy until the node's agent has ended and everything is here."""
        remote = self._remote or await self._again()
        while not await self._copied(remote.stream):
            self._note(f"the connection to {self.node} is lost; no rank depends on it")
            self._silent(self.node, True)
            await remote.close()
            remote = await self._again()
            self._silent(self.node, False)
            self._note(f"the connection to {self.node} is back")
        self.current.set()
        await remote.close()

    async def _copied(self, stream: Stream) -> bool:
        """Take what comes. False when the connection was lost first."""
        try:
            while True:
                match message := await self._next(stream):
                    case Chunk():
                        self._take(message)
                    case Current():
                        self.current.set()
                    case Complete():
                        return True
                    case Dismissed(problem):
                        self._note(f"{self.node}: {problem}")
                        return True
        except (FrameError, OSError) as error:
            self._note(f"{self.node}: {error}; its files are not copied any more, and stay there")
            return True
        except WireError:
            return False

    async def _next(self, stream: Stream) -> Message:
        """Return the next message. After `SILENT` seconds without one the node counts as silent until one comes; ssh's
        keep-alive ends the wait for a host that is lost."""
        try:
            async with asyncio.timeout(SILENT):
                return await stream.receive()
        except TimeoutError:
            self._silent(self.node, True)
        message = await stream.receive()
        self._silent(self.node, False)
        return message

    def _take(self, chunk: Chunk) -> None:
        offset = self._offsets.get(chunk.path, 0)
        write(self._job.path, self.node, chunk, offset)
        if not chunk.whole:
            self._offsets[chunk.path] = offset + len(base64.b64decode(chunk.data))

    async def _again(self) -> Remote:
        """Connect, and ask for the rest."""
        while True:
            try:
                async with asyncio.timeout(CONNECT):
                    remote = await reach(self._host)
            except (RendezvousError, TimeoutError):
                self.current.set()
                await asyncio.sleep(AGAIN)
                continue
            remote.stream.send(Resume(self._job.run_id, self.node, self._offsets, carried(os.environ)))
            return remote


def offsets_here(job: JobDir, node: str) -> dict[str, int]:
    """The number of bytes of each file of `node` that are in `job`.

    What masters of several nodes may have written begins anew.
    """
    logs = job.logs.resolve()
    files = {str(Path("logs", path.relative_to(logs))): path for path in logs.rglob("*") if is_regular(path)}
    files |= {path.name: path for path in job.path.glob("agent.*.log")}
    if job.head is not None and job.head.node == node:
        files |= {name: job.path / name for name in GROWING}
    elif job.head is None:
        for name in GROWING:
            (job.path / name).unlink(missing_ok=True)
    return {name: path.stat().st_size for name, path in files.items() if path.exists()}


def is_regular(path: Path) -> bool:
    """Return True if `path` is a regular file, and not a link to one."""
    return path.is_file() and not path.is_symlink()


def write(folder: Path, node: str, chunk: Chunk, offset: int) -> None:
    """Write what `node` sends into the job's directory `folder`: all of a file, or what follows after `offset`.

    Raises `FrameError` for a file that a node has no business to write, and for a gap; OSError.
    """
    name = PurePosixPath(chunk.path)
    agent_log = len(name.parts) == 1 and name.match("agent.*.log")
    log = len(name.parts) > 1 and name.parts[0] == "logs"
    known = chunk.path in REPLACED if chunk.whole else chunk.path in GROWING or agent_log or log
    if not known or ".." in name.parts:
        raise FrameError(f"{node} sends a file called {chunk.path!a:.80}")
    data = base64.b64decode(chunk.data)
    if chunk.whole:
        target = folder / name
        fresh = target.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.replace(target)
        return
    if chunk.offset != offset:
        raise FrameError(f"{node} sends {chunk.path!a:.80} from {chunk.offset} on, not {offset}")
    # Other users may be able to write where logs lie, below --log-dir. Each host has the part of the event
    # log that its own masters have written, so all parts are appended.
    base, below = (folder / "logs", name.relative_to("logs")) if log else (folder, name)
    make_private(base)
    with os.fdopen(open_log(base, Path(below)), "ab") as file:
        file.write(data)
