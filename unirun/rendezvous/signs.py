"""How an agent that hears no master sees that its node has not been given up (`unirun.failover.silence`). Blocking."""

from __future__ import annotations

from unirun.rendezvous.keys import silent_key
from unirun.rendezvous.store.protocol import Store


def is_marked(store: Store, run_id: str, node: str) -> bool:
    """Whether a master has marked `node` as silent. Raises `StoreError`."""
    return store.get(silent_key(run_id, node)) is not None
