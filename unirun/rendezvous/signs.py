"""How an agent that hears no master sees that its node has not been given up (`unirun.failover.silence`). Blocking."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import time

from unirun.rendezvous.keys import silent_key
from unirun.rendezvous.store.protocol import Store
from unirun.wire.address import TcpAddress

_PAUSE = 0.01


def is_marked(store: Store, run_id: str, node: str) -> bool:
    """Whether a master has marked `node` as silent. Raises `StoreError`."""
    return store.get(silent_key(run_id, node)) is not None


def takes_bytes(address: TcpAddress, timeout: float) -> bool:
    """Whether the kernel at `address` has a connection and a byte of it for who listens there, who may be stopped.

    That the connection is made does not show it: the last packet of that may be lost.
    """
    end = time.monotonic() + timeout
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address.addr, address.port), timeout) as sock,
    ):
        sock.send(_HANDSHAKE)
        while time.monotonic() < end:
            if not _unacknowledged(sock):
                return True
            time.sleep(_PAUSE)
    return False


_HANDSHAKE = b"\x16"
"""What the first record of TLS begins with."""


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes that the peer's kernel has not acknowledged."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, struct.pack("i", 0))
    return int(struct.unpack("i", answer)[0])
