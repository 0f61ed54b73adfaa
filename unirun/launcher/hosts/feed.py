"""From a node to the command over ssh: its end of the stream, and the growth of its files that goes over it.

The command writes the same files, so that everything that reads a job's directory works there too. Bytes
behind the last ones that it has are sent again after a reconnect; a slow command is waited for, as the files
are here.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from unirun.failover.silence import HEARTBEAT_INTERVAL
from unirun.observe.jobdir import JobDir
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Chunk, Current
from unirun.wire.reports import Message

FILE_POLL_INTERVAL = 0.05
"""Seconds between two looks at the files: it bounds how late a line is shown. One look at 100 files takes 0.3 ms."""

MAX_CHUNK_BYTES = 1 << 18
"""Bytes of one chunk."""

GROWING = ("events.jsonl", "metrics.jsonl", "master.log")
REPLACED = ("state.json", "summary.json")
"""Files of the head's directory besides the logs, by how they change. Of the logs, those called ``*.log`` grow."""

OF_ALL_HOSTS = "filtered_*.log"
"""The logs to which the agents of all hosts copy lines."""


def feed(job: JobDir, stream: BlockingStream, offsets: dict[str, int]) -> None:
    """Send what is in the files of `job` after `offsets` until its agent has ended. Raises `ConnectionLost`."""
    for message in news(job, offsets):
        if message is None:
            time.sleep(FILE_POLL_INTERVAL)
        else:
            stream.send(message)


def news(
    job: JobDir, offsets: dict[str, int], clock: Callable[[], float] = time.monotonic
) -> Iterator[Message | None]:
    """The messages about the files of `job` after `offsets`, until its agent has ended; None before each pause.

    That all was sent is said at each heartbeat interval: it shows the command that this host lives, as ssh needs 15 s
    to give one up.
    """
    seen: dict[str, tuple[int, int]] = {}
    files: dict[str, int] = {}
    told = -math.inf
    while True:
        # Looked at first: what the agent and its workers have written is there when they have ended.
        over = not job.alive()
        for name in _growing(job):
            for chunk in _growth(job, name, offsets.get(name, 0), files):
                yield chunk
                offsets[name] = chunk.offset + len(chunk.data)
        for name in REPLACED:
            replaced = _whole(job, name, seen)
            if replaced is not None:
                yield replaced
        if over:
            yield Current(over=True)
            return
        if clock() >= told + HEARTBEAT_INTERVAL:
            yield Current()
            told = clock()
        yield None


def _growing(job: JobDir) -> Iterator[str]:
    """The names of the files that grow, relative to the job's directory."""
    yield from (name for name in GROWING if (job.path / name).exists())
    yield from (path.name for path in job.path.glob("agent.*.log"))
    logs = job.logs.resolve()
    for folder, _, names in os.walk(logs):
        # A worker may have made a pipe or a socket there, at which a read would wait, or fail.
        for path in filter(Path.is_file, (Path(folder, name) for name in names)):
            yield str(Path("logs", path.relative_to(logs)))


def _growth(job: JobDir, name: str, offset: int, files: dict[str, int]) -> Iterator[Chunk]:
    """The parts of the file `name` after `offset`. A log is sent from its begin again, also if it is empty now, when it
    is shorter, or another file than the one in `files`; one that does not only grow also when that is not known."""
    try:
        with open(job.path / name, "rb") as file:
            info = os.fstat(file.fileno())
            known = files.get(name, info.st_ino if name.endswith(".log") else None)
            files[name] = info.st_ino
            again = (
                name.startswith("logs/") and (known != info.st_ino or info.st_size < offset) and offset > 0
            )
            file.seek(offset := 0 if again else offset)
            while (data := file.read(MAX_CHUNK_BYTES)) or again:
                yield Chunk(name, offset, data)
                offset += len(data)
                again = False
    except OSError:
        # It has just been removed, or a worker has made it for others alone.
        return


def _whole(job: JobDir, name: str, seen: dict[str, tuple[int, int]]) -> Chunk | None:
    """The file `name` if it is another than the one `seen` last."""
    try:
        with open(job.path / name, "rb") as file:
            info = os.fstat(file.fileno())
            key = (info.st_ino, info.st_mtime_ns)
            if seen.get(name) == key:
                return None
            data = file.read()
    except FileNotFoundError:
        return None
    seen[name] = key
    return Chunk(name, 0, data, whole=True)


# A stream of messages over this process's stdin and stdout, to the command that has started it by ssh.

MARK = b"\x00unirun node\n"
"""The mark that a node writes first: the login shell of a host may write to stdout before it."""


class _Stdio:
    """Two descriptors with the methods of a socket that `BlockingStream` calls."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink

    def fileno(self) -> int:
        return self._source

    def recv(self, size: int) -> bytes:
        return os.read(self._source, size)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._sink, view) :]

    def close(self) -> None:
        os.close(self._source)
        os.close(self._sink)


def over_stdio() -> BlockingStream:
    """The stream to the command. What this process writes to stdout otherwise goes to stderr from now on."""
    source, sink = (os.dup(number) for number in (0, 1))
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    stdio = _Stdio(source, sink)
    stdio.sendall(MARK)
    return BlockingStream(cast(socket.socket, stdio))
