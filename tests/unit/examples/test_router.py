"""The router of the example of a stack: each request has the engine with the fewest open ones, whatever has failed before."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[3] / "examples" / "rl_stack"


@pytest.fixture(scope="module")
def router() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module("router")


ENGINES = ["a", "b", "c"]

histories = st.lists(
    st.tuples(st.sets(st.sampled_from(ENGINES)), st.floats(0.0, 1.0), st.integers(0, 2)), max_size=8
)
"""For each request the engines that are down, the seconds since the one before, and the requests that are open meanwhile."""


@given(histories)
def test_a_request_goes_to_the_least_busy_engine_and_to_those_that_have_failed_last(
    router: Any, history: list[tuple[set[str], float, int]]
) -> None:
    made, now = router.Router(ENGINES), 100.0
    rests = dict.fromkeys(ENGINES, 0.0)

    def request(down: set[str], inside: int, busy: list[str]) -> None:
        tried: list[str] = []

        def ask(engine: str, path: str, body: Any, patience: float) -> dict[str, Any]:
            tried.append(engine)
            assert made.requests == {each: busy.count(each) + (each == engine) for each in ENGINES}
            if engine in down:
                rests[engine] = now + router.REST
                raise router.Unavailable(engine)
            if inside:
                request(down, inside - 1, [*busy, engine])
            return {}

        before = router.ask
        router.ask = ask
        wanted = sorted(ENGINES, key=lambda each: (rests[each] > now, busy.count(each)))
        try:
            answer = made.complete({})
        except router.Unavailable:
            assert down == {*ENGINES}
        else:
            assert answer == {"engine": tried[-1]}
        finally:
            router.ask = before
        assert tried == wanted[: len(tried)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "time", SimpleNamespace(monotonic=lambda: now))
        for down, seconds, inside in history:
            now += seconds
            request(down, inside, [])
            assert made.requests == dict.fromkeys(ENGINES, 0)
