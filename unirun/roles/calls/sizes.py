"""`RoleSizes`: the numbers of ranks that roles have for the calls of this process. They change between two calls.

A role that is to grow does so at a boundary: when no call of its trainer to it is open. So the trainer says that it is
at one, and makes the next call when the master has decided.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from unirun.roles.peers import Peers
from unirun.wire.messages import RoleView

BOUNDARY_INTERVAL, MAX_BOUNDARIES = 5.0, 12
"""Seconds after which a trainer says again that it is at a boundary, as a master that has ended did not hear it, and
how often it says so. In that time there is another master: a call that is sent before it has decided would fail, if the
role grows then."""

_SETTLED = ("running", "succeeded", "failed", "stopped")
"""The phases of roles that neither start nor recover."""


class RoleSizes:
    """The ranks of each role as of the latest call, and the generation that has them."""

    def __init__(
        self, peers: Peers, calls: Callable[[str], bool], boundary: Callable[[str], None] | None
    ) -> None:
        """`calls` says whether calls of this process to a role are open. `boundary` is called with a role that is to
        grow when there are none; a trainer has one."""
        self._peers, self._calls, self._boundary = peers, calls, boundary
        # A thread that updates them holds the lock; they may be outdated when a view has come since.
        self._ranks: dict[str, list[int]] = {}
        self._formed: dict[str, int] = {}
        self.following = threading.Lock()
        """Held while sizes are followed, and while calls that have waited for that are sent."""
        self._views = 0
        self.outdated = False
        """True if a view has come, or a role is still to grow."""

    def ranks(self, role: str, size: int) -> list[int]:
        """The ranks of a role, now `size`. All groups of the whole role have this list, which changes between calls."""
        view, found = self._peers.view(role), self._ranks.setdefault(role, [])
        found[:] = range(size)
        self._formed[role] = view.generation if view is not None else 0
        return found

    def is_all(self, role: str, ranks: Sequence[int]) -> bool:
        """Return True if these are the ranks of the whole role, however many it has."""
        return ranks is self._ranks.get(role)

    def differs(self, role: str, ranks: Sequence[int], count: int, generation: int) -> bool:
        """Return True if the whole role has, in this generation, another number of ranks than `count`."""
        if not self.is_all(role, ranks):
            return False
        return count != (len(ranks) if generation == self._formed[role] else self._peers.size(role))

    def changed(self) -> None:
        """There is a view."""
        self._views += 1
        self.outdated = True

    def waits(self) -> bool:
        """Return True if `follow` would wait: for another thread, or for a role that grows now."""
        if self.following.locked():
            return True
        return self.outdated and any(self._grows(role) and not self._calls(role) for role in [*self._ranks])

    def follow(self) -> None:
        """Let roles grow that are at a boundary, and take over the numbers of ranks that roles have now. This thread
        holds `following`, so that calls of others wait meanwhile."""
        if not self.outdated:
            return
        views = self._views
        again = [self._follow(role, ranks) for role, ranks in list(self._ranks.items())]
        self.outdated = any(again)
        if views != self._views:
            self.outdated = True

    def _follow(self, role: str, ranks: list[int]) -> bool:
        """The same for one role. Returns True if a later call is to look again."""
        view = self._peers.view(role)
        if view is None or self._peers.brief(role) is None:
            return False
        grows = self._grows(role)
        busy = grows and self._calls(role)
        if grows and not busy:
            # It has ranks of this generation until it forms the next one, which may take longer than is waited.
            self._take_over(role, view, ranks)
            self._let_grow(role, view.generation)
            view = self._peers.view(role) or view
        if view.phase == "reforming" and view.generation == self._formed[role]:
            # The ranks may be those of the generation that it is about to form.
            return True
        self._take_over(role, view, ranks)
        return busy

    def _grows(self, role: str) -> bool:
        """Return True if a role is to grow at a boundary of this process. Ranks of scripts that grow know theirs
        themselves. While another role recovers, none grows."""
        view, brief = self._peers.view(role), self._peers.brief(role)
        if self._boundary is None or view is None or brief is None or brief.kind != "workload":
            return False
        return view.grows and self._settled()

    def _settled(self) -> bool:
        return all(each.phase in _SETTLED for each in self._peers.views())

    def _take_over(self, role: str, view: RoleView, ranks: list[int]) -> None:
        """The ranks are those of the generation in this view."""
        self._formed[role] = view.generation
        if len(ranks) != (size := self._peers.size(role)):
            ranks[:] = range(size)

    def _let_grow(self, role: str, generation: int) -> None:
        """Say that a role is at a boundary, until the master has decided whether it grows."""
        assert self._boundary is not None
        for _ in range(MAX_BOUNDARIES):
            self._boundary(role)
            if self._peers.wait_for(partial(self._decided, role, generation), BOUNDARY_INTERVAL):
                return

    def _decided(self, role: str, generation: int) -> bool:
        """Return True if a role that was at a boundary has begun to form the generation after this one, or does not
        grow now."""
        view = self._peers.view(role)
        if view is None:
            return True
        if view.grows:
            return not self._settled()
        return view.phase != "reforming" or view.generation > generation
