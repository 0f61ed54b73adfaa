"""``torchrun --rdzv-backend=etcd-v3``: rendezvous through etcd, with a new store for each round.

torch finds `get_handler` by the entry point group ``torchrun.handlers`` and calls it whenever its rendezvous package
is imported, whatever the backend; so this module imports nothing that would slow down other backends.

The keys of a run in etcd, below the prefix (``/torchrun/``, or that of ``--rdzv-conf=prefix=…``)::

    <run>/state/current          torch's rendezvous state, changed by compare-and-set only
    <run>/nodes/<node>           one for each node that has joined
    <run>/rounds/<round>/…       keys that the agents of a round exchange

All keys have leases, and the last node that leaves deletes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["create_handler", "get_handler"]


def get_handler() -> Callable[[Any], Any]:
    """Return the factory of handlers for this backend; torch's entry point."""
    return create_handler


def create_handler(params: Any) -> Any:
    """Create torch's `RendezvousHandler` for one node from its `RendezvousParameters`.

    Raises `UsageError` when the endpoint or a key of ``--rdzv-conf`` is invalid, and torch's
    `RendezvousConnectionError` when etcd cannot be reached.
    """
    from unirun.rendezvous.torchrun.handler import connect

    return connect(params)
