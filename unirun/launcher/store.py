"""The store of one generation of one role: a TCPStore on a socket that the agent holds."""

from __future__ import annotations

import signal
import socket

from unirun.rendezvous.endpoints import GENERATION_KEY


def serve(handle: int, generation: int) -> None:
    """Serve a TCPStore on the listening socket `handle` until SIGKILL. It holds its `generation` and nothing else."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket(fileno=handle)
    port = listener.getsockname()[1]
    listener.detach()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=handle)
    store.set(GENERATION_KEY, str(generation))
    signal.pause()
    del store
