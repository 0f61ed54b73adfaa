"""The next generation of a role's process group, formed in place by those that live on."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from unirun.rendezvous.endpoints import GENERATION_KEY, split_endpoint
from unirun.roles.peers import Peers
from unirun.wire.reports import GroupFormed

NEWS = 5.0
"""Seconds in which the news of another death must come that explains why a group could not be formed."""


class Formation:
    """Keeps the default group of this worker's role at the generation that the master has ordered."""

    def __init__(self, peers: Peers, formed: Callable[[int], None]) -> None:
        """`formed` is called with each generation, in the thread that calls `follow`."""
        self._peers, self._formed = peers, formed
        self._backend = ""

    @property
    def outdated(self) -> bool:
        """Whether the role has a later generation than this worker's group."""
        return self._wanted() > self._peers.generation

    def abort(self) -> None:
        """Wake what waits in the old group, as far as a backend can: NCCL has a call for it.

        In a gloo group everyone waits for somebody who is dead, or has given up and closed its connections, or is
        about to: each failure wakes the next.
        """
        distributed = _initialized()
        if distributed is not None and "nccl" in str(distributed.get_backend_config()):
            group = _c10d()._get_default_group()
            threading.Thread(target=group.abort, name="unirun-abort", daemon=True).start()

    def catch_up(self, generation: int) -> None:
        """Be at `generation`, of which somebody else has heard first; the agent's word is on its way."""
        deadline = time.monotonic() + NEWS
        while self._wanted() < generation and time.monotonic() < deadline:
            self._peers.wait(deadline - time.monotonic())
        self.follow()

    def follow(self) -> None:
        """Form the group of the present generation, again when a member dies meanwhile.

        Raises what forming or the user's `on_generation` raises when no death explains it.
        """
        while self.outdated:
            wanted = self._wanted()
            try:
                self._form()
                self._peers.generation = max(wanted, self.met())
                self._formed(self._peers.generation)
            except Exception:
                if not self._changes(wanted):
                    raise
                continue
            self._peers.tell(GroupFormed(self._peers.generation))

    def met(self) -> int:
        """The generation in whose store the members of the default group have met; that of the peers without a group.

        All generations have one address, so who comes late for one may be in time for the next.
        """
        distributed = _initialized()
        if distributed is None:
            return self._peers.generation
        store = _c10d()._get_default_store()
        while isinstance(store, distributed.PrefixStore):
            store = store.underlying_store
        # A group that was made with another store is as old as this worker thinks.
        return int(store.get(GENERATION_KEY)) if store.check([GENERATION_KEY]) else self._peers.generation

    def _form(self) -> None:
        """Leave the old default group, if there is one, and meet in the new store, where MASTER_ADDR and _PORT say.

        With the node of rank 0 that may have moved.
        """
        distributed = _initialized()
        if distributed is not None:
            # Kept: when forming the next one fails half-way, there is no group to ask.
            self._backend = str(distributed.get_backend_config())
            distributed.destroy_process_group()
        if endpoint := self._peers.known(self._peers.role).endpoint:
            os.environ["MASTER_ADDR"], port = split_endpoint(endpoint)
            os.environ["MASTER_PORT"] = str(port)
        if self._backend:
            importlib.import_module("torch.distributed").init_process_group(self._backend)

    def _wanted(self) -> int:
        return self._peers.known(self._peers.role).generation

    def _changes(self, generation: int) -> bool:
        """Whether the role has, or soon gets, another generation."""
        deadline = time.monotonic() + NEWS
        while self._wanted() == generation and time.monotonic() < deadline:
            self._peers.wait(deadline - time.monotonic())
        return self._wanted() != generation


def _initialized() -> Any:
    """`torch.distributed`, if this process has a default group."""
    if "torch.distributed" not in sys.modules:
        return None
    distributed: Any = importlib.import_module("torch.distributed")
    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _c10d() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")
