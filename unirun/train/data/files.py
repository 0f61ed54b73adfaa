"""`Files`: a dataset of many files, whose names may be too many for the memory. It needs no torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, Self

import fsspec
import numpy as np

from unirun.errors import UsageError

CHUNK = 1 << 20
"""Bytes of a list that are looked through at a time."""

LINES = 1024
"""Lines of a list that are read at a time."""

Read = Callable[[IO[bytes]], Iterable[Any]]


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path there. Raises ValueError and ImportError for a URL of a kind that
    fsspec does not know."""
    if "://" in url:
        found: tuple[Any, str] = fsspec.url_to_fs(url)
        return found
    # In a path, two colons are part of a name.
    files = fsspec.filesystem("file")
    return files, files._strip_protocol(url)


def opened(url: str) -> AbstractContextManager[IO[bytes]]:
    """A file, to be read."""
    files, path = file_system(url)
    found: AbstractContextManager[IO[bytes]] = files.open(path, "rb")
    return found


def lines(file: IO[bytes]) -> Iterator[str]:
    """The lines of a file, as text without their ends."""
    for line in file:
        yield _text(line)


class Files:
    """A dataset in files: paths, or URLs that fsspec knows (``s3://…``). `read` gets each file, open for reading bytes,
    and returns its items; by default they are its lines.

    Whole files go to the ranks. `paths` is a sequence of them, one path, or a pattern as ``"data/*.jsonl"``, whose
    files are sorted by name. `Files.listed_in` takes a list of any length. `read` gives the same items each time, and
    goes to the processes of a `DataLoader`, so it is a function at the top level of a module.

    Raises `UsageError` if a pattern matches nothing, or if `paths` is none of these.
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], read: Read = lines
    ) -> None:
        self._paths: Sequence[str] | _Listed = _paths_of(paths)
        self._read = read

    @classmethod
    def listed_in(cls, url: str | os.PathLike[str], read: Read = lines) -> Self:
        """The files whose paths or URLs are the lines of the file `url`, which is never in memory as a whole.

        It is read through once now, and a block of lines when one of them is needed. Empty lines name no file. The list
        must not change while it is used. Raises `UsageError` when it has, and OSError.
        """
        files = cls((), read)
        files._paths = _Listed(os.fspath(url))
        return files

    def __len__(self) -> int:
        """The number of files."""
        return len(self._paths)

    def path(self, index: int) -> str:
        """The path or URL of a file; empty for an empty line."""
        return self._paths[index]

    def items(self, index: int, begin: int = 0) -> Iterator[Any]:
        """The items of a file without the first `begin`, which are read and dropped. Raises OSError."""
        path = self.path(index)
        if path:
            with opened(path) as file:
                yield from itertools.islice(self._read(file), begin, None)


def _paths_of(paths: Any) -> Sequence[str]:
    if isinstance(paths, str | os.PathLike):
        return _matching(os.fspath(paths))
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise UsageError(
            f"Files(): expected paths, found a {type(paths).__name__}",
            "pass a list of paths, a pattern as 'data/*.jsonl', or use Files.listed_in(url)",
        )
    return tuple(os.fspath(path) for path in paths)


def _matching(pattern: str) -> Sequence[str]:
    if "*" not in pattern:
        return (pattern,)
    files, path = file_system(pattern)
    matching = files.glob(path, detail=True)
    # A link may be one to a directory.
    whole = (each for each, about in matching.items() if about["type"] == "file" or not files.isdir(each))
    found = tuple(map(files.unstrip_protocol, sorted(whole)) if "://" in pattern else sorted(whole))
    if not found:
        raise UsageError(
            f"Files(): no file matches {pattern!r}", "check the pattern, from this working directory"
        )
    return found


class _Listed:
    """The lines of a file: where each `LINES`-th begins, and the block of lines that was used last."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._count, self._begins = _scan(url)
        self._block, self._held = -1, list[str]()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        block, line = divmod(index, LINES)
        if block != self._block:
            self._held, self._block = self._lines(block), block
        return self._held[line]

    def _lines(self, block: int) -> list[str]:
        begin, end = self._begins[block : block + 2].tolist()
        with opened(self._url) as file:
            file.seek(begin)
            data = file.read(end - begin)
        found = data.removesuffix(b"\n").split(b"\n")
        if len(data) != end - begin or len(found) != min(LINES, self._count - block * LINES):
            raise UsageError(
                f"{self._url} has changed since it was read first", "leave it as it is until the job ends"
            )
        return [_text(line) for line in found]


def _scan(url: str) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """The number of lines, and where each `LINES`-th begins, with the end of the last one."""
    begins = [np.zeros(1, np.int64)]
    count, at, ends_at = 0, 0, 0
    with opened(url) as file:
        while chunk := file.read(CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1 + at
            # The end of line number n, from 1, is where a block begins if n is a multiple.
            # A copy, as a slice would keep the ends of all lines in memory.
            begins.append(ends[(LINES - 1 - count) % LINES :: LINES].copy())
            count += len(ends)
            at += len(chunk)
            ends_at = int(ends[-1]) if len(ends) else ends_at
    if ends_at < at:
        count += 1
    found = np.concatenate(begins)
    return count, found if found[-1] == at else np.append(found, at)


def _text(line: bytes) -> str:
    return line.decode().removesuffix("\n").removesuffix("\r")
