"""Following log files: inotify tells when there is more, so nothing is polled and nothing is missed.

The files belong to the workers, who write to them directly. Reading them as slowly as a terminal does can
therefore hold up nobody but the reader.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

Sink = Callable[[bytes], None]
"""Gets whole lines, each with its end (a newline, or the return of a progress bar); one over `MAX_LINE` in parts."""

MAX_LINE = 1 << 16
_CHUNK = 1 << 20
_IN_MODIFY = 0x2
_OVERFLOW = -1
_LOOK = 200
"""Milliseconds between two looks at files for which the user's inotify watches do not suffice."""
_libc = ctypes.CDLL(None, use_errno=True)


class _File:
    """One followed file: what was read and is no whole line yet stays in `rest`."""

    def __init__(self, path: Path, sink: Sink) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._sink = sink
        self._rest = b""

    def read(self) -> None:
        """Pass on everything that is there now."""
        while data := os.read(self._handle, _CHUNK):
            data = self._rest + data
            whole = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
            if len(data) - whole > MAX_LINE:
                whole = len(data)
            self._rest = data[whole:]
            if whole:
                self._sink(data[:whole])

    def close(self) -> None:
        """Pass on the last line, even if it was cut off, and close."""
        self.read()
        if self._rest:
            self._sink(self._rest + b"\n")
            self._rest = b""
        os.close(self._handle)


class LogFollower:
    """Follows files in a thread of its own."""

    def __init__(self) -> None:
        # -1 when the user's inotify instances are used up: then the files are looked at from time to time.
        self._inotify: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._files: dict[int, _File] = {}
        self._unwatched: list[_File] = []
        self._paths: dict[Path, int | _File] = {}
        self._new: list[tuple[Path, Sink | None]] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="unirun-logs", daemon=True)
        self._thread.start()

    def follow(self, path: Path, sink: Sink) -> None:
        """Follow `path`, which exists, from its beginning."""
        with self._lock:
            self._new.append((path, sink))
        os.write(self._waker, b"+")

    def release(self, path: Path) -> None:
        """Pass on what is left of `path`, to which nobody writes any more, and close it."""
        with self._lock:
            self._new.append((path, None))
        os.write(self._waker, b"-")

    def finish(self, timeout: float | None = None) -> bool:
        """Pass on what is left of every file and end; False when the sinks took longer than `timeout`."""
        self._stopping = True
        os.write(self._waker, b".")
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        for handle in (self._inotify, self._wake, self._waker):
            if handle >= 0:
                os.close(handle)
        return True

    def _run(self) -> None:
        poll = select.poll()
        if self._inotify >= 0:
            poll.register(self._inotify, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {handle for handle, _ in poll.poll(_LOOK if self._unwatched else None)}
            for file in self._unwatched:
                file.read()
            if self._wake in ready:
                os.read(self._wake, 4096)
                # Read before the rest: what was named before `finish` was called is followed to its end.
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
            # The kernel could not keep up with the writers and has dropped events: any file may have grown.
            for file in self._all():
                file.read()
            return
        for watch in changed & self._files.keys():
            self._files[watch].read()

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for path, sink in new:
            if sink is None:
                self._drop(path)
                continue
            try:
                file = _File(path, sink)
            except OSError as error:
                sink(f"unirun: {path} cannot be followed: {error.strerror}\n".encode())
                continue
            watch = _libc.inotify_add_watch(self._inotify, os.fsencode(path), _IN_MODIFY)
            if watch >= 0:
                self._files[watch] = file
                self._paths[path] = watch
            else:
                self._unwatched.append(file)
                self._paths[path] = file
            file.read()

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
