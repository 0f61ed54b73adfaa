"""The choice of an engine for a request, and what follows when it has not answered. Pure: nothing here does anything.

The engine with the fewest requests in flight gets the next one. An engine that has failed is doubted for a while, as it
would always have the fewest. A request that an engine had not finished is sent again, to another one if there is one.
It is given up when the server says that the request is wrong, or when engines have failed on it `attempts` times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

from unirun.rollout.engines import Engine
from unirun.values import Value

__all__ = ["Failure", "GiveUp", "Load", "Send", "Wait", "begun", "choose", "cut", "ended", "follow"]

SHORTEST, LONGEST = 0.05, 2.0
"""Seconds for which an engine is doubted after its first failure in a row, and at most."""


class Load(Value):
    """The requests of one client to `engine`: the number of those `in_flight`, and that of the latest one (`turn`).

    The engine has failed `failures` times in a row, and is doubted until the time `doubted`.
    """

    engine: Engine
    in_flight: int = 0
    turn: int = 0
    failures: int = 0
    doubted: float = 0.0


class Send(Value):
    """The request goes to this engine."""

    engine: Engine


class Wait(Value):
    """No engine can have it now; look again after so many `seconds` (None: only when the engines have changed)."""

    seconds: float | None


Kind = Literal["refused", "lost", "unready", "aborted", "status"]


class Failure(Value):
    """An engine did not answer a request. `words` are those of the server or of the operating system.

    ``refused``: it never got the request. ``lost``: its connection ended. ``unready``: it was no longer ready, so that
    it was not waited for. ``aborted``: it has ended the request before its end. ``status``: it answered with `status`,
    which is no success, or what nobody can read.
    """

    engine: Engine
    kind: Kind
    words: str
    status: int = 0

    @property
    def was_tried(self) -> bool:
        """True if the engine may have failed because of this request."""
        return self.kind in ("lost", "unready") or (self.kind == "status" and self.status not in (502, 503))

    @property
    def is_final(self) -> bool:
        """True if another engine would say the same: the request is wrong, or the server does not know it."""
        return self.kind == "status" and (self.status < 500 or self.status == 501)


class GiveUp(Value):
    """The request has failed, because of `failure`; if not `wrong`, engines have failed on it too often."""

    failure: Failure
    wrong: bool


def choose(loads: Iterable[Load], avoid: Collection[Engine], now: float) -> Send | Wait:
    """The engine for a request that those to `avoid` have failed on; they get it only when there is no other."""
    best: Load | None = None
    order: tuple[bool, int, int] | None = None
    next_look: float | None = None
    for load in loads:
        if not load.engine.ready:
            continue
        if load.doubted > now:
            next_look = load.doubted if next_look is None else min(next_look, load.doubted)
            continue
        its = (load.engine in avoid, load.in_flight, load.turn)
        if order is None or its < order:
            best, order = load, its
    if best is not None:
        return Send(best.engine)
    return Wait(None if next_look is None else next_look - now)


def begun(load: Load, turn: int) -> Load:
    """`load` with one more request, which has the number `turn`."""
    return msgspec.structs.replace(load, in_flight=load.in_flight + 1, turn=turn)


def cut(load: Load) -> Load:
    """`load` with one request less, of which nobody waits for the answer."""
    return msgspec.structs.replace(load, in_flight=load.in_flight - 1)


def ended(load: Load, failure: Failure | None, now: float) -> Load:
    """`load` with one request less; it has failed with `failure`, or was answered."""
    left = load.in_flight - 1
    if failure is None or failure.is_final:
        return msgspec.structs.replace(load, in_flight=left, failures=0, doubted=0.0)
    if load.doubted > now:
        # The requests that an engine takes with it when it dies are one failure.
        return msgspec.structs.replace(load, in_flight=left)
    doubt = min(SHORTEST * 2 ** min(load.failures, 8), LONGEST)
    return msgspec.structs.replace(load, in_flight=left, failures=load.failures + 1, doubted=now + doubt)


def follow(failures: tuple[Failure, ...], attempts: int) -> GiveUp | None:
    """The end of a request with these `failures`; None when it is sent again."""
    latest = failures[-1]
    if latest.is_final:
        return GiveUp(latest, True)
    if sum(each.was_tried for each in failures) >= attempts:
        return GiveUp(latest, False)
    return None
