"""What a user has asked for with signals, until some master of the job is sure to know it."""

from __future__ import annotations

from collections.abc import Iterable

from unirun.job.state import ROLE_ENDS, RolePhase
from unirun.wire.messages import Stop

_STOPS = frozenset((RolePhase.STOPPING, *ROLE_ENDS))


class Wishes:
    """The stops that were asked for. A master may have died before it has written one, so they are kept.

    The first ends the job with its grace period, the second at once.
    """

    def __init__(self) -> None:
        self._asked: list[Stop] = []
        self._told = 0

    @property
    def first(self) -> Stop | None:
        """What was asked for first; None when nobody wants anything."""
        return self._asked[0] if self._asked else None

    @property
    def urgent(self) -> bool:
        """Whether the job shall end at once."""
        return len(self._asked) > 1

    def add(self, stop: Stop, *, told: bool) -> None:
        """Somebody asks; `told`: the master that leads is told at once."""
        self._asked.append(stop)
        if told:
            self._told = len(self._asked)

    def answer(self, name: str, grace: float) -> str:
        """What to tell the user who has just asked by the signal called `name`; `grace` is in seconds."""
        if self.urgent:
            return f"{name}: killing the workers now"
        return f"{name}: stopping; SIGKILL follows after {grace:g} s, or at once when it comes again"

    def for_next(self, phases: Iterable[str]) -> list[Stop]:
        """What the next master has to be told, which has said that its roles are in `phases`.

        When all of them stop already, a first wish that a master was told is known: told again, it would be the second.
        """
        known = self._told > 0 and all(phase in _STOPS for phase in phases)
        self._told = len(self._asked)
        return self._asked[1 if known else 0 : 2]
