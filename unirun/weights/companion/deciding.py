"""The decision which engine gets which version: a state, what happens, and what is to be done.

An engine that was started, for the first time or again, has other weights than the channel. It is up to date when it
has the version that was the latest one when it came up, or a later one: where versions come faster than they are
loaded, no engine ever has the latest of all. Later ones follow while it serves. A failure leaves the weights of an
engine half new, so that it has to be started again; that of a process which is gone by then is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from unirun.values import Engine, Value

Version = tuple[int, int]
"""The number of restarts of the publisher, and the number that it gave the version. One that begins anew from an older
checkpoint gives lower numbers than before."""


class Known(Value):
    """An engine as the companion knows it."""

    engine: Engine
    asked: bool = False
    """The latest version was asked for, or is known."""
    answered: bool = False
    needs: Version | None = None
    """The version with which it is up to date; None: there was none when it came up."""
    has: Version | None = None
    """The version that was brought into it last."""
    gets: Version | None = None
    """The version that is being brought into it."""
    broken: bool = False


class State(Value):
    """The version that this host has, and the engines by rank."""

    version: Version | None = None
    engines: Mapping[int, Known] = {}


class Seen(Value):
    """The engines of this host are these now."""

    engines: tuple[Engine, ...]


class VersionPolled(Value):
    """The latest version of the channel was `version` when this was asked for these ranks; None: there was none."""

    version: Version | None
    engines: tuple[tuple[int, int], ...]


class Received(Value):
    """This host has `version`."""

    version: Version


class Brought(Value):
    """The engine of a rank has `version`."""

    rank: int
    incarnation: int
    version: Version


class UpdateFailed(Value):
    """A version could not be brought into the engine of a rank. `why`: in words."""

    rank: int
    incarnation: int
    why: str


Event = Seen | VersionPolled | Received | Brought | UpdateFailed


class PollVersion(Value):
    """Ask for the latest version, for these ranks and incarnations."""

    engines: tuple[tuple[int, int], ...]


class Bring(Value):
    """Bring `version` into an engine."""

    engine: Engine
    version: Version


class UpToDate(Value):
    """Tell that an engine has `version`, and may serve; None: it may with what it was started with."""

    rank: int
    incarnation: int
    version: Version | None


class Broken(Value):
    """Tell that an engine has to be started again, and why."""

    rank: int
    incarnation: int
    why: str


Command = PollVersion | Bring | UpToDate | Broken


def step(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """The state after `event`, and what is to be done."""
    commands: list[Command] = []
    if isinstance(event, Seen):
        state = replace(state, engines={e.rank: _seen(state.engines.get(e.rank), e) for e in event.engines})
    elif isinstance(event, Received):
        state = replace(state, version=event.version)
    elif isinstance(event, VersionPolled):
        for rank, incarnation in event.engines:
            known = _present(state, rank, incarnation)
            if known is not None:
                found = replace(known, answered=True, needs=event.version)
                if event.version is None and state.version is None:
                    commands.append(UpToDate(rank, incarnation, None))
                state = _with(state, found)
    else:
        known = _present(state, event.rank, event.incarnation)
        if known is not None and isinstance(event, Brought):
            state = _with(state, replace(known, gets=None, has=event.version))
        elif known is not None and isinstance(event, UpdateFailed):
            state = _with(state, replace(known, gets=None, broken=True))
            commands.append(Broken(event.rank, event.incarnation, event.why))
    if isinstance(event, Brought | VersionPolled):
        commands += _up_to_date(state, event)
    return _due(state, commands)


def _seen(known: Known | None, engine: Engine) -> Known:
    """The engine with all that is known of it: nothing, when it is another process."""
    if known is None or known.engine.incarnation != engine.incarnation:
        return Known(engine)
    return replace(known, engine=engine)


def _present(state: State, rank: int, incarnation: int) -> Known | None:
    """The engine, if it is this process still."""
    known = state.engines.get(rank)
    return known if known is not None and known.engine.incarnation == incarnation else None


def _before(version: Version | None, other: Version) -> bool:
    return version is None or version < other


def _with(state: State, known: Known) -> State:
    return replace(state, engines={**state.engines, known.engine.rank: known})


def _up_to_date(state: State, event: Brought | VersionPolled) -> list[Command]:
    """The engines of an event of which it is known now that they have enough."""
    whose = event.engines if isinstance(event, VersionPolled) else ((event.rank, event.incarnation),)
    found: list[Command] = []
    for rank, incarnation in whose:
        known = _present(state, rank, incarnation)
        if (
            known is not None
            and known.answered
            and known.has is not None
            and (known.needs is None or known.has >= known.needs)
        ):
            found.append(UpToDate(rank, incarnation, known.has))
    return found


def _due(state: State, commands: list[Command]) -> tuple[State, tuple[Command, ...]]:
    """Have engines get what they lack: the number of the latest version, or the version that is here."""
    asking: list[tuple[int, int]] = []
    for known in state.engines.values():
        engine = known.engine
        if known.broken or not engine.ready:
            continue
        if not known.asked:
            asking.append((engine.rank, engine.incarnation))
            known = replace(known, asked=True)
        if known.gets is None and state.version is not None and _before(known.has, state.version):
            commands.append(Bring(engine, state.version))
            known = replace(known, gets=state.version)
        state = _with(state, known)
    if asking:
        commands.append(PollVersion(tuple(asking)))
    return state, tuple(commands)
