"""`Engines`: how a companion learns of the engines of its host, and tells which of them may serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from unirun.weights.companion.deciding import Engine


class Engines(Protocol):
    """The engines of one host, as those who start them know them. Methods may be called in any thread."""

    def here(self) -> tuple[Engine, ...]:
        """All of them, as they are now."""

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in some thread, when there is another one, another process of one, or one has come alive."""

    def up_to_date(self, rank: int, incarnation: int, version: int | None) -> None:
        """This process has `version`. It may serve from the first time on; None: there is no version yet."""

    def broken(self, rank: int, incarnation: int, reason: str) -> None:
        """This process has to be started again: its weights are half new, or it does not answer."""


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
