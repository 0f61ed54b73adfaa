"""Signs that a node has not been given up (`unirun.failover.silence`), for an agent that hears no master. Blocking."""

from __future__ import annotations

from unirun.rendezvous.keys import silent_key
from unirun.rendezvous.store.protocol import Store


def is_marked(store: Store, run_id: str, node: str) -> bool:
    """Return True if a master has marked `node` as silent. Raises `StoreError`."""
    return store.get(silent_key(run_id, node)) is not None
