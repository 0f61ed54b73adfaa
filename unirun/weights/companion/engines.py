"""`HostEngines`: how a companion learns of the engines of its host, and tells which of them may serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from unirun.roles.peers import Peers
from unirun.values import Engine
from unirun.wire.reports import EngineWeights


class HostEngines(Protocol):
    """The engines of one host, as those who start them know them. Methods may be called in any thread."""

    def here(self) -> tuple[Engine, ...]:
        """All of them, as they are now."""

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in some thread, when there is another one, another process of one, or one has come alive."""

    def up_to_date(self, rank: int, incarnation: int, version: int | None) -> None:
        """This process has `version`. It may serve from the first time on; None: there is no version yet."""

    def broken(self, rank: int, incarnation: int, reason: str) -> None:
        """This process has to be started again: its weights are half new, or it does not answer."""


class AgentEngines:
    """The engines that the agent of this node runs. It tells them to the worker `peers` is of, and hears from it."""

    def __init__(self, channel: str, peers: Peers) -> None:
        """`channel` is the one whose versions they get."""
        self._channel, self._peers = channel, peers

    def here(self) -> tuple[Engine, ...]:
        """All of them, as the agent has told."""
        return self._peers.engines

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each update of the job."""
        self._peers.when_changed(listener)

    def up_to_date(self, rank: int, incarnation: int, version: int | None) -> None:
        """Tell the agent, which tells all that the engine is ready."""
        self._peers.tell(EngineWeights(self._channel, rank, incarnation, version, time.time()))

    def broken(self, rank: int, incarnation: int, reason: str) -> None:
        """Tell the agent, which kills the engine. The master has it started again."""
        self._peers.tell(EngineWeights(self._channel, rank, incarnation, None, time.time(), reason))


class EnginesInMemory:
    """Engines that a program names."""

    def __init__(self, engines: Sequence[Engine] = ()) -> None:
        self._engines = tuple(engines)
        self._listeners: list[Callable[[], None]] = []
        self.versions: dict[tuple[int, int], int | None] = {}
        """The versions of engines that may serve, by rank and incarnation."""
        self.reasons: dict[tuple[int, int], str] = {}
        """Of engines that have to be started again."""

    def set(self, *engines: Engine) -> None:
        """These are all engines now."""
        self._engines = engines
        for listener in self._listeners:
            listener()

    def here(self) -> tuple[Engine, ...]:
        """Return them."""
        return self._engines

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Keep it."""
        self._listeners.append(listener)

    def up_to_date(self, rank: int, incarnation: int, version: int | None) -> None:
        """Keep the version."""
        self.versions[rank, incarnation] = version

    def broken(self, rank: int, incarnation: int, reason: str) -> None:
        """Keep the reason."""
        self.versions.pop((rank, incarnation), None)
        self.reasons[rank, incarnation] = reason
