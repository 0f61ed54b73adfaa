"""The losses of workers that a caller has reported.

Each is reported once: by a call that was open, or by the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unirun.roles.peers import Peers
from unirun.values import WorkerId


class ReportedLosses:
    """The incarnation of each rank up to which losses are reported, for the ranks that were called.

    A worker that has died since its last call is not the one that was called: the state of that one is lost.
    """

    def __init__(self, peers: Peers, *, restarted: bool) -> None:
        """A caller that was `restarted` does not know what its predecessor reported: it begins at incarnation 0."""
        self._peers = peers
        self._first = 0 if restarted else None
        self._lock = threading.Lock()
        self._incarnations: dict[tuple[str, int], int] = {}

    def called(self, address: WorkerId) -> None:
        """A call is sent to the worker at `address`."""
        if self._first is None:
            self._incarnations.setdefault(address[:2], address.incarnation)

    def reported(self, address: WorkerId) -> None:
        """A call fails with the loss of the worker at `address`."""
        with self._lock:
            self._incarnations[address[:2]] = max(
                self._incarnations.get(address[:2], 0), address.incarnation + 1
            )

    def report(self, role: str, ranks: Sequence[int]) -> str:
        """The name of the first of `ranks` with a loss that is not reported, or "". All count as reported then."""
        found = ""
        with self._lock:
            for rank in ranks:
                known = self._incarnations.get((role, rank), self._first)
                if known is not None:
                    peer = self._peers.find(role, rank)
                    incarnation = peer.address.incarnation + peer.gone
                    if known < incarnation:
                        found = found or f"{role}:{rank}"
                        self._incarnations[role, rank] = incarnation
        return found
