"""A connection to another process ends once, whoever ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from unirun.errors import PeerLost
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.weights import hub
from unirun.weights.messages import Peek
from unirun.weights.sources import PeerConnection

WHO = WorkerId("actor", 0, 0)
QUESTION = Peek("policy", None)


class Wire:
    """A transport and its only channel, which answers when it is told to."""

    def __init__(self) -> None:
        self.answers: list[Callable[[Parcel], None]] = []
        self.broken: Callable[[str], None] = lambda _: None

    def connect(self, who: WorkerId, endpoint: str, broken: Callable[[str], None], name: str) -> Wire:
        self.broken = broken
        return self

    def call(self, parcel: Parcel, done: Callable[[Parcel], None]) -> None:
        self.answers.append(done)

    def close(self) -> None:
        pass


@pytest.fixture
def wire() -> Any:
    return Wire()


def test_who_waits_is_told_why_the_connection_was_closed(wire: Any) -> None:
    line = PeerConnection(WHO, wire, "")
    future = line.ask(QUESTION)
    line.close("the job has lost it")
    with pytest.raises(PeerLost, match="actor:0 is gone: the job has lost it"):
        future.result(0)
    with pytest.raises(PeerLost):
        line.ask(QUESTION)


def test_an_answer_that_comes_while_the_connection_is_closed_changes_nothing(wire: Any) -> None:
    line = PeerConnection(WHO, wire, "")
    future = line.ask(QUESTION)
    line.close()
    wire.answers[0](Parcel(b"late"))
    with pytest.raises(PeerLost):
        future.result(0)


def test_an_answer_that_has_come_stays(wire: Any) -> None:
    line = PeerConnection(WHO, wire, "")
    future = line.ask(QUESTION)
    wire.answers[0](Parcel(b"in time"))
    wire.broken("the peer closed the stream")
    assert future.result(0).head == b"in time"
    assert line.lost


def test_threads_that_make_their_first_channels_at_once_have_one_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    other = threading.Event()
    made: list[object] = []

    class Slow:
        def __init__(self, context: object) -> None:
            made.append(self)
            if len(made) > 1:
                other.set()
            # A second one that is made meanwhile would end the wait.
            other.wait(0.05)

    monkeypatch.setattr(hub, "Hub", Slow)
    context: Any = SimpleNamespace(hub=None)
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(hub.hub_of, [context] * 2))
    assert found == set(made)
    assert len(made) == 1
