"""Follow log files by inotify, without polling.

Workers write directly to the files, so a slow reader, such as a terminal, does not block them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

Sink = Callable[[bytes], None]
"""Receives whole lines, each with its end (a newline, or the carriage return of a progress bar); a line over `MAX_LINE`
bytes in parts. A sink that takes parts receives data as it comes."""

MAX_LINE = 1 << 16
_CHUNK = 1 << 20
_IN_MODIFY = 0x2
_OVERFLOW = -1
_UNWATCHED_POLL_INTERVAL = 200
"""Milliseconds between two reads of files that could not get an inotify watch, of which each user has a limited
number."""
_libc = ctypes.CDLL(None, use_errno=True)


class _File:
    """One followed file.

    It is open only while it is read: a job may have more ranks than a process may have descriptors. An incomplete line
    stays in `rest`, unless the sink takes `parts`.
    """

    def __init__(self, path: Path, sink: Sink, parts: bool, start: int) -> None:
        self._path, self._sink, self._parts = path, sink, parts
        self._offset = start
        self._rest = b""
        self._inode: tuple[int, int] | None = None

    def read(self) -> None:
        """Pass on all new data. Raises OSError."""
        handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.fstat(handle)
            self._inode = self._inode or (stat.st_dev, stat.st_ino)
            if self._inode != (stat.st_dev, stat.st_ino):
                raise FileNotFoundError(errno.ENOENT, "another file has taken its place")
            while data := os.pread(handle, _CHUNK, self._offset):
                self._offset += len(data)
                self._pass_on(data)
        finally:
            os.close(handle)

    def _pass_on(self, data: bytes) -> None:
        if self._parts:
            self._sink(data)
            return
        data = self._rest + data
        whole = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        if len(data) - whole > MAX_LINE:
            whole = len(data)
        self._rest = data[whole:]
        if whole:
            self._sink(data[:whole])

    def close(self) -> None:
        """Pass on the rest, with a newline after an incomplete last line."""
        try:
            self.read()
        except OSError as error:
            self._sink(f"unirun: {self._path} cannot be read: {error.strerror}\n".encode())
        if self._rest:
            self._sink(self._rest + b"\n")
            self._rest = b""


class LogFollower:
    """Follows files in a thread."""

    def __init__(self, *, shared: bool = False) -> None:
        # -1 when the user's inotify instances are used up, and for files in a `shared` directory, as inotify does not
        # see what other hosts write: then the files are polled.
        self._inotify: int = -1 if shared else _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._files: dict[int, _File] = {}
        self._unwatched: list[_File] = []
        self._paths: dict[Path, int | _File] = {}
        self._new: list[tuple[Path, _File | None]] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="unirun-logs", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._close()
            raise

    def follow(self, path: Path, sink: Sink, *, parts: bool = False, start: int = 0) -> None:
        """Follow the existing file `path` from the offset `start`. With `parts` the sink also gets incomplete lines."""
        with self._lock:
            self._new.append((path, _File(path, sink, parts, start)))
        os.write(self._waker, b"+")

    def release(self, path: Path) -> None:
        """Pass on the rest of `path`, which is complete, and stop following it."""
        with self._lock:
            self._new.append((path, None))
        os.write(self._waker, b"-")

    def finish(self, timeout: float | None = None) -> bool:
        """Pass on the rest of every file and stop. Returns False when the sinks took longer than `timeout` seconds."""
        self._stopping = True
        os.write(self._waker, b".")
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._close()
        return True

    def _close(self) -> None:
        for handle in (self._inotify, self._wake, self._waker):
            if handle >= 0:
                os.close(handle)

    def _run(self) -> None:
        poll = select.poll()
        if self._inotify >= 0:
            poll.register(self._inotify, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {handle for handle, _ in poll.poll(_UNWATCHED_POLL_INTERVAL if self._unwatched else None)}
            _look_at(self._unwatched)
            if self._wake in ready:
                os.read(self._wake, 4096)
                # Read first: files added before `finish` was called are followed to their end.
                stopping = self._stopping
                self._take_new()
                if stopping:
                    break
            if self._inotify in ready:
                self._read_changed()
        for file in self._all():
            file.close()

    def _all(self) -> list[_File]:
        return [*self._files.values(), *self._unwatched]

    def _read_changed(self) -> None:
        changed = self._changed()
        if _OVERFLOW in changed:
            # The event queue overflowed, so any file may have grown.
            _look_at(self._all())
            return
        _look_at(self._files[watch] for watch in changed & self._files.keys())

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for path, file in new:
            if file is None:
                self._drop(path)
                continue
            watch = _libc.inotify_add_watch(self._inotify, os.fsencode(path), _IN_MODIFY)
            if watch >= 0:
                self._files[watch] = file
                self._paths[path] = watch
            else:
                self._unwatched.append(file)
                self._paths[path] = file
            _look_at([file])

    def _drop(self, path: Path) -> None:
        found = self._paths.pop(path, None)
        if isinstance(found, int):
            _libc.inotify_rm_watch(self._inotify, found)
            self._files.pop(found).close()
        elif found is not None:
            self._unwatched.remove(found)
            found.close()

    def _changed(self) -> set[int]:
        data = os.read(self._inotify, 1 << 16)
        found, at = set(), 0
        while at < len(data):
            found.add(int.from_bytes(data[at : at + 4], "little", signed=True))
            at += 16 + int.from_bytes(data[at + 12 : at + 16], "little")
        return found


def _look_at(files: Iterable[_File]) -> None:
    """Read all `files`. A failed read is repeated at the next change, and reported at the end."""
    for file in files:
        with contextlib.suppress(OSError):
            file.read()
