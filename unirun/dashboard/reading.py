"""Files that grow while they are read, in bounded memory: lines as they come, the end of a log, and a search in one."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from unirun.errors import JobError
from unirun.observe.jobdir import JobDir, directories_of_nodes
from unirun.observe.status import JobStatus
from unirun.values import Value, WorkerId

BLOCK = 1 << 20
"""Bytes that are read at once."""

FIRST_READ = 64 << 20
"""Bytes of a file that was never read before, from its end: what is older is left out."""

LONGEST_LINE = 4 << 20
"""Bytes of a line of a file of JSON; a longer one is left out."""

PAGE = 256 << 10
"""Bytes of a log that are shown at once, from its end."""

SEARCHED = 64 << 20
"""Bytes of a log that one search goes through."""

FOUND = 200
"""Lines that one search gives."""

STREAMS = ("stdout", "stderr")

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


class Tail:
    """The objects that are appended to a file of JSON lines, each given once. Another file of the same name, and one
    that has become shorter, is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at, self._inode, self._rest = 0, -1, b""
        self.left_out = 0
        """Bytes of the file that were not read, as it was too long."""

    def new(self) -> Iterator[dict[str, Any]]:
        """The objects since the last call. A line that is not whole yet comes with a later call; one that is no object
        never does."""
        try:
            file = open_ordinary(self._path)
        except OSError:
            return
        with file:
            info = os.fstat(file.fileno())
            if info.st_ino != self._inode or info.st_size < self._at:
                self._inode, self._rest = info.st_ino, b""
                self._at = self.left_out = max(0, info.st_size - FIRST_READ)
            file.seek(self._at)
            while block := file.read(BLOCK):
                self._at += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                if len(self._rest) > LONGEST_LINE:
                    self._rest = b""
                yield from _objects(lines)

    def changed(self) -> bool:
        """Return True if there is something to read. It costs one call of the system."""
        try:
            info = os.stat(self._path)
        except OSError:
            return False
        return info.st_ino != self._inode or info.st_size != self._at


def _objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def open_ordinary(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for a symbolic link, a FIFO or a device."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(handle, "rb")


class RankLog(Value):
    """One file with output of a rank: of which `attempt` (a run of a job that Slurm has requeued), in which directory
    of those that nodes have (`folder`), of which incarnation, and of which stream."""

    attempt: int
    folder: int
    incarnation: int
    stream: str
    size: int


class LogPart(Value):
    """The bytes of a log from `start` to `end` as text, of `size` in all. Its first line is whole, unless it is longer
    than the part."""

    text: str
    start: int
    end: int
    size: int


class Match(Value):
    """A line that was found, and the offset at which it begins."""

    at: int
    line: str


class Found(Value):
    """The lines that were found, the last one first, and the offset down to which was searched: 0 for all of it."""

    matches: tuple[Match, ...]
    down_to: int


def log_files(job: JobDir, status: JobStatus, role: str, rank: int) -> list[RankLog]:
    """The logs of one rank, of every attempt and incarnation, the oldest first. Raises `JobError` for a rank that the
    job does not have."""
    _check(status, role, rank)
    found: dict[tuple[int, int, str], RankLog] = {}
    for attempt, folders in enumerate(_folders(job)):
        for number, folder in enumerate(folders):
            above = folder.worker_logs(WorkerId(role, rank, 0)).parent
            for incarnation in _numbers(above):
                for stream in STREAMS:
                    size = _size(above / str(incarnation) / f"{stream}.log")
                    if size is not None:
                        # Where hosts share the home directory, the first folder may have a copy of the others.
                        log = RankLog(attempt, number, incarnation, stream, size)
                        found.setdefault((attempt, incarnation, stream), log)
    return [found[key] for key in sorted(found)]


def log_path(job: JobDir, status: JobStatus, role: str, rank: int, log: RankLog) -> Path:
    """The path of one of `log_files`. All of its parts are numbers and names that the job has. Raises `JobError`."""
    _check(status, role, rank)
    folders = _folders(job)
    if log.stream not in STREAMS or not 0 <= log.attempt < len(folders):
        raise JobError(f"{role}:{rank} has no such log")
    if not 0 <= log.folder < len(folders[log.attempt]):
        raise JobError(f"{role}:{rank} has no such log")
    worker = WorkerId(role, rank, log.incarnation)
    return folders[log.attempt][log.folder].worker_logs(worker) / f"{log.stream}.log"


def _check(status: JobStatus, role: str, rank: int) -> None:
    if not any(each.name == role and 0 <= rank < len(each.workers) for each in status.roles):
        raise JobError(f"job {status.run_id} has no {role}:{rank}"[:200])


def _folders(job: JobDir) -> list[tuple[JobDir, ...]]:
    """The directories with logs, of each attempt. In a step of Slurm each node has one of its own."""
    before = [(job.attempt(n), *directories_of_nodes(job, n)) for n in job.attempts]
    return [*before, (job, *directories_of_nodes(job))]


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def _size(path: Path) -> int | None:
    try:
        with open_ordinary(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return None


def read_part(path: Path, *, before: int | None = None, after: int | None = None) -> LogPart:
    """The last lines of a log, of at most `PAGE` bytes: those before an offset, or at the end. With `after`, what has
    come since; if that is too much, the last of it. Raises OSError."""
    with open_ordinary(path) as file:
        size = os.fstat(file.fileno()).st_size
        end = size if before is None else min(max(before, 0), size)
        start = max(0, end - PAGE)
        if after is not None and start <= after <= end:
            file.seek(after)
            return LogPart(file.read(end - after).decode(errors="replace"), after, end, size)
        file.seek(max(0, start - 1))
        data = file.read(end - max(0, start - 1))
        if start > 0:
            # The byte before tells whether a line begins here.
            cut = data.find(b"\n") + 1
            data = data[cut:] if 0 < cut < len(data) else data[1:]
        return LogPart(data.decode(errors="replace"), end - len(data), end, size)


def search(path: Path, words: str, before: int | None = None) -> Found:
    """The lines with `words`, whatever their case, backwards from an offset or the end; at most `FOUND` of them, in at
    most `SEARCHED` bytes. Raises OSError."""
    needle = words.lower()
    matches: list[Match] = []
    with open_ordinary(path) as file:
        size = os.fstat(file.fileno()).st_size
        end = size if before is None else min(max(before, 0), size)
        floor, rest = max(0, end - SEARCHED), b""
        while end > floor:
            start = max(floor, end - BLOCK)
            file.seek(start)
            data = file.read(end - start) + rest
            # The first line may begin in the block before, unless that is not read. The last byte ends a line.
            first = data.find(b"\n", 0, len(data) - 1) + 1 if start > floor else 0
            if start > floor and first == 0 and len(data) < LONGEST_LINE:
                end, rest = start, data
                continue
            for at, line in _backwards(data, first):
                if needle in line.decode(errors="replace").lower():
                    matches.append(Match(start + at, line[:2000].decode(errors="replace")))
                    if len(matches) == FOUND:
                        return Found(tuple(matches), start + at)
            end, rest = start, data[:first]
    return Found(tuple(matches), floor)


def _backwards(data: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """The lines of `data` from `first` on with their offsets, the last one first."""
    end = len(data)
    while end > first:
        at = data.rfind(b"\n", first, end - 1) + 1 if end - 1 > first else 0
        at = max(at, first)
        yield at, data[at:end].rstrip(b"\r\n")
        end = at
