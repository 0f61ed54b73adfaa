"""The directory of the contract's workers, which the test writes."""

from __future__ import annotations

from collections.abc import Callable

from unirun.roles.peers import Peer


class Board:
    """A directory that the test writes. Those who look at it are told of each change."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Peer] = {}
        self._listeners: list[Callable[[], None]] = []

    def put(self, *places: Peer) -> None:
        """Write where workers are now, all at once."""
        for place in places:
            self._places[place.address[:2]] = place
        for listener in self._listeners:
            listener()

    def size(self, role: str) -> int:
        """The number of ranks of a role."""
        return sum(name == role for name, _ in self._places)

    def find(self, role: str, rank: int) -> Peer:
        """The peer that has this rank."""
        return self._places[role, rank]

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` at each `put`."""
        self._listeners.append(listener)
