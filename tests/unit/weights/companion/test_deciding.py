"""The decision which engine gets which version, and when it may serve."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.values import Engine
from unirun.weights.companion.deciding import (
    Bring,
    Command,
    Decision,
    Event,
    PollVersion,
    State,
    Tell,
    Version,
    brought,
    failed,
    polled,
    received,
    seen,
)


def engine(rank: int = 0, incarnation: int = 0, *, alive: bool = True) -> Engine:
    return Engine(rank, incarnation, f"http://127.0.0.1:{8000 + rank}", alive)


def v(number: int, restarts: int = 0) -> Version:
    return restarts, number


def on(function: Callable[..., Decision], *arguments: object) -> Event:
    return lambda state: function(state, *arguments)


def after(*events: Event) -> tuple[Command, ...]:
    """The commands of the last of these events."""
    state = State()
    commands: tuple[Command, ...] = ()
    for event in events:
        state, commands = event(state)
    return commands


NEW = (on(seen, (engine(),)), on(polled, None, ((0, 0),)))
"""An engine that is there before any version."""

FIRST = (*NEW, on(received, v(1)), on(brought, 0, 0, v(1)))
"""The same, with the first version."""


def test_an_engine_may_serve_at_once_as_long_as_there_is_no_version() -> None:
    assert after(*NEW[:1]) == (PollVersion(((0, 0),)),)
    assert after(*NEW) == (Tell(0, 0, None),)


def test_an_engine_that_does_not_answer_yet_gets_nothing() -> None:
    starting = on(seen, (engine(alive=False),))
    assert after(on(received, v(1)), starting) == ()
    assert after(on(received, v(1)), starting, on(seen, (engine(),))) == (
        Bring(engine(), v(1)),
        PollVersion(((0, 0),)),
    )


def test_each_engine_gets_each_version() -> None:
    two = on(seen, (engine(0), engine(1)))
    assert after(two, on(received, v(1))) == (Bring(engine(0), v(1)), Bring(engine(1), v(1)))
    assert after(*FIRST) == (Tell(0, 0, v(1)),)
    assert after(*FIRST, on(received, v(2))) == (Bring(engine(), v(2)),)


def test_a_slow_engine_leaves_versions_out_and_holds_no_other_up() -> None:
    two = (on(seen, (engine(0), engine(1))), on(received, v(1)), on(brought, 0, 0, v(1)))
    assert after(*two, on(received, v(2))) == (Bring(engine(0), v(2)),)
    assert after(*two, on(received, v(2)), on(received, v(3)), on(brought, 1, 0, v(1))) == (
        Bring(engine(1), v(3)),
    )


def test_an_engine_that_was_started_again_may_serve_when_it_has_the_latest_version() -> None:
    again = engine(incarnation=1)
    assert after(*FIRST, on(seen, (again,))) == (Bring(again, v(1)), PollVersion(((0, 1),)))
    # Version 2 is published, and not here yet.
    history = (*FIRST, on(seen, (again,)), on(polled, v(2), ((0, 1),)))
    assert after(*history) == ()
    assert after(*history, on(brought, 0, 1, v(1))) == ()
    assert after(*history, on(brought, 0, 1, v(1)), on(received, v(2))) == (Bring(again, v(2)),)
    assert after(*history, on(brought, 0, 1, v(1)), on(received, v(2)), on(brought, 0, 1, v(2))) == (
        Tell(0, 1, v(2)),
    )


def test_whichever_comes_first_the_version_or_the_answer_both_are_needed() -> None:
    assert after(on(received, v(1)), on(seen, (engine(),)), on(brought, 0, 0, v(1))) == ()
    assert after(
        on(received, v(1)),
        on(seen, (engine(),)),
        on(brought, 0, 0, v(1)),
        on(polled, v(1), ((0, 0),)),
    ) == (Tell(0, 0, v(1)),)


def test_an_engine_need_not_have_versions_that_came_while_it_loaded() -> None:
    history = (
        on(received, v(1)),
        on(seen, (engine(),)),
        on(polled, v(1), ((0, 0),)),
        on(received, v(2)),
    )
    assert after(*history, on(brought, 0, 0, v(1))) == (Tell(0, 0, v(1)), Bring(engine(), v(2)))


def test_a_failure_is_told_and_the_engine_gets_nothing_more() -> None:
    history = (*FIRST, on(received, v(2)), on(failed, 0, 0, "it did not answer"))
    assert after(*history) == (Tell(0, 0, None, "it did not answer"),)
    assert after(*history, on(received, v(3))) == ()
    assert after(*history, on(seen, (engine(incarnation=1),)))[0] == Bring(engine(incarnation=1), v(2))


def test_news_of_a_process_that_is_gone_are_forgotten() -> None:
    history = (*FIRST, on(received, v(2)), on(seen, (engine(incarnation=1),)))
    for event in (
        on(failed, 0, 0, "gone"),
        on(brought, 0, 0, v(2)),
        on(polled, v(2), ((0, 0), (7, 0))),
    ):
        assert after(*history, event) == ()
    assert after(*FIRST, on(received, v(2)), on(seen, ()), on(failed, 0, 0, "gone")) == ()


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

    def happens(function: Callable[..., Decision], *arguments: object) -> None:
        nonlocal state
        state, commands = function(state, *arguments)
        for command in commands:
            if isinstance(command, Bring):
                assert command.engine == engines[command.engine.rank]
                assert command.engine.rank not in loading
                loading[command.engine.rank] = command
            elif isinstance(command, PollVersion):
                asking.append((published, command.engines))
                born.update(dict.fromkeys(command.engines, published))
            elif not command.problem:
                whose = command.rank, command.incarnation
                needed = born[whose]
                assert command.version is not None or state.version is None
                assert needed is None or (command.version is not None and command.version >= needed)
                serves[whose] = command.version

    def look() -> None:
        happens(seen, (*engines.values(),))

    def restart(rank: int) -> None:
        loading.pop(rank, None)
        engines[rank] = engine(rank, engines[rank].incarnation + 1)
        look()

    def load(rank: int) -> None:
        if rank in loading:
            done = loading.pop(rank)
            happens(brought, rank, done.engine.incarnation, done.version)

    def answer() -> None:
        if asking:
            happens(polled, *asking.pop(0))

    look()
    for what, rank in happenings:
        if what == "publish":
            restarts, number = published or v(0)
            published = restarts, number + 1
        elif what == "rewind" and published is not None:
            # The publisher begins anew from an older checkpoint.
            published = published[0] + 1, max(published[1] - 3, 0)
        elif what == "receive" and published is not None and state.version != published:
            happens(received, published)
        elif what == "answer":
            answer()
        elif what == "load":
            load(rank)
        elif what == "fail" and rank in loading:
            happens(failed, rank, loading.pop(rank).engine.incarnation, "no")
            restart(rank)
        elif what == "restart":
            restart(rank)
    if published is not None and state.version != published:
        happens(received, published)
    while asking:
        answer()
    while loading:
        load(next(iter(loading)))
    assert {rank: serves[rank, e.incarnation] for rank, e in engines.items()} == {0: published, 1: published}
