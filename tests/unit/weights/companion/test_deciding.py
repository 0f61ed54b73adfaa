"""The decision which engine gets which version, and when it may serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.values import Engine
from unirun.weights.companion.deciding import (
    Bring,
    Broken,
    Brought,
    Command,
    Event,
    PollVersion,
    Received,
    Seen,
    State,
    UpdateFailed,
    UpToDate,
    Version,
    VersionPolled,
    step,
)


def engine(rank: int = 0, incarnation: int = 0, *, alive: bool = True) -> Engine:
    return Engine(rank, incarnation, f"http://127.0.0.1:{8000 + rank}", alive)


def v(number: int, restarts: int = 0) -> Version:
    return restarts, number


def after(*events: Event) -> tuple[Command, ...]:
    """The commands of the last of these events."""
    state = State()
    commands: tuple[Command, ...] = ()
    for event in events:
        state, commands = step(state, event)
    return commands


NEW = (Seen((engine(),)), VersionPolled(None, ((0, 0),)))
"""An engine that is there before any version."""

FIRST = (*NEW, Received(v(1)), Brought(0, 0, v(1)))
"""The same, with the first version."""


def test_an_engine_may_serve_at_once_as_long_as_there_is_no_version() -> None:
    assert after(*NEW[:1]) == (PollVersion(((0, 0),)),)
    assert after(*NEW) == (UpToDate(0, 0, None),)


def test_an_engine_that_does_not_answer_yet_gets_nothing() -> None:
    starting = Seen((engine(alive=False),))
    assert after(Received(v(1)), starting) == ()
    assert after(Received(v(1)), starting, Seen((engine(),))) == (
        Bring(engine(), v(1)),
        PollVersion(((0, 0),)),
    )


def test_each_engine_gets_each_version() -> None:
    two = Seen((engine(0), engine(1)))
    assert after(two, Received(v(1))) == (Bring(engine(0), v(1)), Bring(engine(1), v(1)))
    assert after(*FIRST) == (UpToDate(0, 0, v(1)),)
    assert after(*FIRST, Received(v(2))) == (Bring(engine(), v(2)),)


def test_a_slow_engine_leaves_versions_out_and_holds_no_other_up() -> None:
    two = (Seen((engine(0), engine(1))), Received(v(1)), Brought(0, 0, v(1)))
    assert after(*two, Received(v(2))) == (Bring(engine(0), v(2)),)
    assert after(*two, Received(v(2)), Received(v(3)), Brought(1, 0, v(1))) == (Bring(engine(1), v(3)),)


def test_an_engine_that_was_started_again_may_serve_when_it_has_the_latest_version() -> None:
    again = engine(incarnation=1)
    assert after(*FIRST, Seen((again,))) == (Bring(again, v(1)), PollVersion(((0, 1),)))
    # Version 2 is published, and not here yet.
    history = (*FIRST, Seen((again,)), VersionPolled(v(2), ((0, 1),)))
    assert after(*history) == ()
    assert after(*history, Brought(0, 1, v(1))) == ()
    assert after(*history, Brought(0, 1, v(1)), Received(v(2))) == (Bring(again, v(2)),)
    assert after(*history, Brought(0, 1, v(1)), Received(v(2)), Brought(0, 1, v(2))) == (
        UpToDate(0, 1, v(2)),
    )


def test_whichever_comes_first_the_version_or_the_answer_both_are_needed() -> None:
    assert after(Received(v(1)), Seen((engine(),)), Brought(0, 0, v(1))) == ()
    assert after(Received(v(1)), Seen((engine(),)), Brought(0, 0, v(1)), VersionPolled(v(1), ((0, 0),))) == (
        UpToDate(0, 0, v(1)),
    )


def test_an_engine_need_not_have_versions_that_came_while_it_loaded() -> None:
    history = (Received(v(1)), Seen((engine(),)), VersionPolled(v(1), ((0, 0),)), Received(v(2)))
    assert after(*history, Brought(0, 0, v(1))) == (UpToDate(0, 0, v(1)), Bring(engine(), v(2)))


def test_a_failure_is_told_and_the_engine_gets_nothing_more() -> None:
    history = (*FIRST, Received(v(2)), UpdateFailed(0, 0, "it did not answer"))
    assert after(*history) == (Broken(0, 0, "it did not answer"),)
    assert after(*history, Received(v(3))) == ()
    assert after(*history, Seen((engine(incarnation=1),)))[0] == Bring(engine(incarnation=1), v(2))


def test_news_of_a_process_that_is_gone_are_forgotten() -> None:
    history = (*FIRST, Received(v(2)), Seen((engine(incarnation=1),)))
    for event in (UpdateFailed(0, 0, "gone"), Brought(0, 0, v(2)), VersionPolled(v(2), ((0, 0), (7, 0)))):
        assert after(*history, event) == ()
    assert after(*FIRST, Received(v(2)), Seen(()), UpdateFailed(0, 0, "gone")) == ()


@examples(200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["publish", "rewind", "receive", "answer", "load", "fail", "restart"]),
            st.integers(0, 1),
        ),
        max_size=40,
    )
)
def test_in_any_order_no_engine_serves_old_weights_and_in_the_end_all_have_the_latest(
    happenings: list[tuple[str, int]],
) -> None:
    published: Version | None = None
    state, engines = State(), {rank: engine(rank) for rank in range(2)}
    loading: dict[int, Bring] = {}
    asking: list[tuple[Version | None, tuple[tuple[int, int], ...]]] = []
    born: dict[tuple[int, int], Version | None] = {}
    serves: dict[tuple[int, int], Version | None] = {}

    def happens(event: Event) -> None:
        nonlocal state
        state, commands = step(state, event)
        for command in commands:
            if isinstance(command, Bring):
                assert command.engine == engines[command.engine.rank]
                assert command.engine.rank not in loading
                loading[command.engine.rank] = command
            elif isinstance(command, PollVersion):
                asking.append((published, command.engines))
                born.update(dict.fromkeys(command.engines, published))
            elif isinstance(command, UpToDate):
                whose = command.rank, command.incarnation
                needed = born[whose]
                assert needed is None or (command.version is not None and command.version >= needed)
                serves[whose] = command.version

    def seen() -> None:
        happens(Seen((*engines.values(),)))

    def restart(rank: int) -> None:
        loading.pop(rank, None)
        engines[rank] = engine(rank, engines[rank].incarnation + 1)
        seen()

    def load(rank: int) -> None:
        if rank in loading:
            done = loading.pop(rank)
            happens(Brought(rank, done.engine.incarnation, done.version))

    def answer() -> None:
        if asking:
            happens(VersionPolled(*asking.pop(0)))

    seen()
    for what, rank in happenings:
        if what == "publish":
            restarts, number = published or v(0)
            published = restarts, number + 1
        elif what == "rewind" and published is not None:
            # The publisher begins anew from an older checkpoint.
            published = published[0] + 1, max(published[1] - 3, 0)
        elif what == "receive" and published is not None and state.version != published:
            happens(Received(published))
        elif what == "answer":
            answer()
        elif what == "load":
            load(rank)
        elif what == "fail" and rank in loading:
            happens(UpdateFailed(rank, loading.pop(rank).engine.incarnation, "no"))
            restart(rank)
        elif what == "restart":
            restart(rank)
    if published is not None and state.version != published:
        happens(Received(published))
    while asking:
        answer()
    while loading:
        load(next(iter(loading)))
    assert {rank: serves[rank, e.incarnation] for rank, e in engines.items()} == {0: published, 1: published}
