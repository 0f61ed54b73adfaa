"""The decision which engine gets which version: a state, what happens, and what is to be done.

An engine that was started, for the first time or again, has other weights than the channel. It is up to date when it
has the version that was the latest one when it came up, or a later one: where versions come faster than they are
loaded, no engine ever has the latest of all. Later ones follow while it serves. A failure leaves the weights of an
engine half new, so that it has to be started again; that of a process which is gone by then is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


class PollVersion(Value):
    """Ask for the latest version, for these ranks and incarnations."""

    engines: tuple[tuple[int, int], ...]


class Bring(Value):
    """Bring `version` into an engine."""

    engine: Engine
    version: Version


class Tell(Value):
    """Tell that an engine has `version`, and may serve; None: it may with what it was started with. With a `problem`,
    it has to be started again."""

    rank: int
    incarnation: int
    version: Version | None
    problem: str = ""


Command = PollVersion | Bring | Tell

Decision = tuple[State, tuple[Command, ...]]
"""The state after an event, and what is to be done."""

Event = Callable[[State], Decision]
"""One of the functions below, with its arguments."""


def seen(state: State, engines: Sequence[Engine]) -> Decision:
    """The engines of this host are these now."""
    return _due(replace(state, engines={e.rank: _seen(state.engines.get(e.rank), e) for e in engines}))


def received(state: State, version: Version) -> Decision:
    """This host has `version`."""
    return _due(replace(state, version=version))


def polled(state: State, version: Version | None, engines: Sequence[tuple[int, int]]) -> Decision:
    """The latest version of the channel was `version` when this was asked for these ranks and incarnations; None: there
    was none."""
    told: list[Tell] = []
    for rank, incarnation in engines:
        known = _present(state, rank, incarnation)
        if known is not None:
            known = replace(known, answered=True, needs=version)
            state = _with(state, known)
            if version is None and state.version is None:
                told.append(Tell(rank, incarnation, None))
            told += _up_to_date(known)
    return _due(state, told)


def brought(state: State, rank: int, incarnation: int, version: Version) -> Decision:
    """The engine of a rank has `version`."""
    known = _present(state, rank, incarnation)
    if known is None:
        return _due(state)
    known = replace(known, gets=None, has=version)
    return _due(_with(state, known), _up_to_date(known))


def failed(state: State, rank: int, incarnation: int, problem: str) -> Decision:
    """A version could not be brought into the engine of a rank."""
    known = _present(state, rank, incarnation)
    if known is None:
        return _due(state)
    known = replace(known, gets=None, broken=True)
    return _due(_with(state, known), [Tell(rank, incarnation, None, problem)])


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


def _up_to_date(known: Known) -> list[Tell]:
    """The news that an engine has enough, if that is known now."""
    has = known.has
    if not known.answered or has is None or (known.needs is not None and has < known.needs):
        return []
    return [Tell(known.engine.rank, known.engine.incarnation, has)]


def _due(state: State, told: Sequence[Tell] = ()) -> Decision:
    """Have engines get what they lack: the number of the latest version, or the version that is here."""
    commands: list[Command] = [*told]
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
