"""The address at which a process listens: unix socket paths of any length, and TCP addresses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirun.errors import RendezvousError
from unirun.values import Value

_LIMIT = 107


class UnixAddress(Value, tag="unix"):
    """A unix socket at `path`, which processes on `host` can reach, and no others."""

    path: str
    host: str

    @classmethod
    def here(cls, path: str | Path) -> UnixAddress:
        """The socket's address on this host."""
        return cls(os.fspath(path), socket.gethostname())

    def __str__(self) -> str:
        return self.path

    def local_path(self) -> str:
        """The path. Raises `RendezvousError` on another host than its own, where a file of that name says nothing."""
        if self.host != socket.gethostname():
            raise RendezvousError(f"{self.path} can be reached on host {self.host} only", "try it there")
        return self.path


class TcpAddress(Value, tag="tcp"):
    """A TCP socket at the numeric IPv4 or IPv6 address `addr`; `node` is the name in the certificate of who listens."""

    addr: str
    port: int
    node: str

    @property
    def host(self) -> str:
        """The node."""
        return self.node

    def __str__(self) -> str:
        return f"[{self.addr}]:{self.port}" if ":" in self.addr else f"{self.addr}:{self.port}"


Address = UnixAddress | TcpAddress


@contextmanager
def unix_address(path: str | Path) -> Iterator[str]:
    """A string that names `path` for ``bind`` and ``connect`` as long as the context lasts.

    The kernel takes 107 bytes at most. A longer path is reached through a descriptor of its directory, so a
    job directory may lie as deep as the user likes.
    """
    text = os.fspath(path)
    if len(os.fsencode(text)) <= _LIMIT:
        yield text
        return
    directory, name = os.path.split(text)
    handle = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)
