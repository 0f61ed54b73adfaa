"""Which deaths of workers a caller has been told of. Each is told once: by a call that was open, or by the next one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unirun.roles.calls.directory import Directory
from unirun.roles.transport.protocol import Address


class Losses:
    """Of all workers that a caller has called. A worker that has died since its last call is not the one that was
    called: what it held is gone."""

    def __init__(self, directory: Directory, *, restarted: bool) -> None:
        """A caller that was `restarted` does not know what its predecessor was told: it begins at incarnation 0."""
        self._directory = directory
        self._first = 0 if restarted else None
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], int] = {}

    def call(self, address: Address) -> None:
        """The worker at `address` is called."""
        if self._first is None:
            self._known.setdefault(address[:2], address.incarnation)

    def told(self, address: Address) -> None:
        """A call fails with the loss of the worker at `address`."""
        with self._lock:
            self._known[address[:2]] = max(self._known.get(address[:2], 0), address.incarnation + 1)

    def tell(self, role: str, ranks: Sequence[int]) -> str:
        """The name of the first of `ranks` with a death that was not told, or "". From now on, all of them are told."""
        found = ""
        with self._lock:
            for rank in ranks:
                known = self._known.get((role, rank), self._first)
                if known is not None:
                    place = self._directory.find(role, rank)
                    incarnation = place.address.incarnation + place.gone
                    if known < incarnation:
                        found = found or f"{role}:{rank}"
                        self._known[role, rank] = incarnation
        return found
