"""``torchrun --rdzv-backend=etcd-v3``: nodes meet through etcd, and each round has a store of its own.

torch finds `get_handler` by the entry point group ``torchrun.handlers`` and calls it whenever its rendezvous package
is imported, whatever the backend; so nothing is imported here that a run with another backend would have to wait for.

What a run has in etcd, below the prefix (``/torchrun/`` unless ``--rdzv-conf=prefix=…`` says otherwise)::

    <run>/state/current          torch's rendezvous state, changed by compare-and-set only
    <run>/nodes/<node>           one for each node that has joined
    <run>/rounds/<round>/…       what the agents of a round tell each other

All of it hangs on leases, and the last node that leaves removes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["NAME", "create_handler", "get_handler"]

NAME = "etcd-v3"
"""What follows ``--rdzv-backend=``."""


def get_handler() -> Callable[[Any], Any]:
    """The entry point: how torch makes a handler for this backend."""
    return create_handler


def create_handler(params: Any) -> Any:
    """torch's `RendezvousHandler` for one node, from its `RendezvousParameters`.

    Raises `UsageError` when the endpoint or a key of ``--rdzv-conf`` is wrong, and torch's `RendezvousConnectionError`
    when etcd cannot be reached.
    """
    from unirun.rendezvous.torchrun.handler import connect

    return connect(params)
