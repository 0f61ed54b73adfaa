"""Requests of the example of a stack: a server that is down is asked again, until the time of the request is over."""

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
def web() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module("web")


class Connection:
    """A connection to a server that is down for a while, and starts with status 503."""

    opened = closed = tries = 0
    ready_after = 0

    def __init__(self, addr: str, timeout: float) -> None:
        Connection.opened += 1
        self.status = 200

    def request(self, method: str, path: str, body: str) -> None:
        Connection.tries += 1
        if Connection.tries < Connection.ready_after:
            raise ConnectionRefusedError
        self.status = 503 if Connection.tries == Connection.ready_after else 200

    def getresponse(self) -> Connection:
        return self

    def read(self) -> bytes:
        return b"7"

    def close(self) -> None:
        Connection.closed += 1


@given(st.integers(0, 30), st.floats(0.0, 1.0))
def test_a_server_is_asked_again_as_long_as_the_patience_lasts(
    web: Any, ready_after: int, patience: float
) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def time_of(tries: int) -> float:
        at = 100.0
        for _ in range(tries):
            at += 0.05
        return at

    Connection.opened = Connection.closed = Connection.tries = 0
    Connection.ready_after = ready_after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web.http.client, "HTTPConnection", Connection)
        patch.setattr(web, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
        allowed = next(tries for tries in range(100) if time_of(tries) >= 100.0 + patience) + 1
        if allowed > ready_after:
            assert web.ask("a", "/", patience=patience) == 7
            assert Connection.tries == ready_after + 1
        else:
            with pytest.raises(web.Unavailable):
                web.ask("a", "/", patience=patience)
            assert Connection.tries == allowed
        assert Connection.opened == Connection.closed == Connection.tries
