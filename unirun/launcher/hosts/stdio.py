"""A stream of messages over this process's stdin and stdout, to the command that has started it by ssh."""

from __future__ import annotations

import os
import socket
from typing import cast

from unirun.wire.blocking import BlockingStream

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
