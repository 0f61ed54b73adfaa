"""Listening sockets of a job's processes, read from the kernel."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_TCP_LISTEN = "0A"
_UNIX_LISTENS = 0x10000


@dataclass(frozen=True)
class Listener:
    """One socket that takes connections (or, for udp, datagrams). `address` is a host for tcp and udp, a path for unix,
    ``@…`` for one that has no file; `owners` are the pids that have it open."""

    kind: str
    address: str
    port: int
    owners: frozenset[int]


def listeners_of(pids: Collection[int], net: Path = Path("/proc/net")) -> list[Listener]:
    """All sockets on which these processes listen; `net` has the tables of their network."""
    owners = _owners(pids)
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "packet"):
        for line in _lines(net / kind):
            fields = line.split()
            inode = fields[8] if kind == "packet" else fields[9]
            if inode not in owners or (kind.startswith("tcp") and fields[3] != _TCP_LISTEN):
                continue
            host, port = ("", 0) if kind == "packet" else _address(fields[1])
            found.append(Listener(kind, host, port, owners[inode]))
    for line in _lines(net / "unix"):
        fields = line.split(None, 7)
        if fields[6] in owners and int(fields[3], 16) & _UNIX_LISTENS:
            path = fields[7].rstrip("\n") if len(fields) > 7 else ""
            found.append(Listener("unix", path, 0, owners[fields[6]]))
    return found


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except FileNotFoundError:
        return []


def _owners(pids: Collection[int]) -> dict[str, frozenset[int]]:
    """The process that has each socket open, by inode."""
    found: dict[str, set[int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for handle in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{handle}"))
                    if match:
                        found.setdefault(match[1], set()).add(pid)
    return {inode: frozenset(who) for inode, who in found.items()}


def _address(text: str) -> tuple[str, int]:
    """``0100007F:1F90``: 32-bit words in the order of this machine's bytes."""
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(port, 16)
