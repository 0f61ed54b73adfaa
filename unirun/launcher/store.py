"""The store of one generation of one role: a TCPStore on a socket that the agent holds."""

from __future__ import annotations

import signal
import socket


def serve(handle: int) -> None:
    """Serve an empty TCPStore on the listening socket `handle` until SIGKILL."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket(fileno=handle)
    port = listener.getsockname()[1]
    listener.detach()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=handle)
    signal.pause()
    del store
