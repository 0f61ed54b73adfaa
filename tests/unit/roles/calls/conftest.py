"""A role of any class, served by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unirun.roles import RoleGroup
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.dispatcher import Dispatcher
from unirun.roles.calls.group import role_group
from unirun.roles.calls.policy import invocations
from unirun.roles.inprocess import InprocTransport
from unirun.roles.peers import Peer, Peers
from unirun.values import WorkerId

Serve = Callable[..., RoleGroup]


class FakePeers(Peers):
    """A directory in which nothing changes."""

    def __init__(self, places: list[Peer]) -> None:
        self._places = places

    def size(self, role: str) -> int:
        """As many as there are places."""
        return len(self._places)

    def find(self, role: str, rank: int) -> Peer:
        """The place."""
        return self._places[rank]

    def view(self, role: str) -> None:
        """There are no views: roles do not grow."""

    brief = view

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Never."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(first, second)`` is the role group of workers that serve these objects."""
    closing: list[Callable[[], None]] = []

    def serve(*targets: Any, call_timeout: float = 30.0) -> RoleGroup:
        places = []
        for rank, target in enumerate(targets):
            me, transport = WorkerId("desk", rank, 0), InprocTransport()
            dispatcher = Dispatcher(target, me, invocations(target))
            places.append(Peer(me, transport.serve(me, dispatcher.handle)))
            threading.Thread(target=dispatcher.serve, daemon=True).start()
            closing.extend((dispatcher.stop, dispatcher.close, transport.close))
        transport = InprocTransport()
        caller = Caller(WorkerId("trainer", 0, 0), FakePeers(places), transport, call_timeout=call_timeout)
        closing.extend((caller.close, transport.close))
        return role_group(caller, "desk", len(targets))

    yield serve
    for close in closing:
        close()
