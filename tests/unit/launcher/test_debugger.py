"""Breakpoints in a worker that no command comes to, and the end of a debugger."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import RendezvousError
from unirun.launcher import debugger
from unirun.wire.reports import DebugEnded, Debuggee


class Silent:
    """A stream to an agent that says nothing. The first one is waited at until `over`."""

    def __init__(self, over: threading.Event) -> None:
        self.there, self.over, self.closed = threading.Event(), over, False

    def receive(self, timeout: float) -> Any:
        self.there.set()
        assert self.over.wait(WAIT_TIMEOUT)
        raise RendezvousError("the peer sent nothing")

    def close(self) -> None:
        self.closed = True


def test_threads_wait_at_breakpoints_one_after_the_other_none_longer_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread whose time is over while another waits goes on. Nothing is left of a breakpoint that was passed."""
    environ = {"SOCKET": str(tmp_path / "agent.sock"), "ROLE": "actor", "RANK": "1", "INCARNATION": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(f"UNIRUN_{name}", value)
    over, opened = threading.Event(), list[tuple[float, Silent]]()

    def open_(first: Debuggee) -> Any:
        opened.append((first.patience, Silent(over)))
        return opened[-1][1]

    monkeypatch.setattr(debugger, "_open", open_)
    threads = [
        threading.Thread(target=debugger.breakpoint, args=(seconds,)) for seconds in (3600.0, 3600.0, 0.01)
    ]
    threads[0].start()
    eventually(lambda: opened, "the first one waits")
    assert opened[0][1].there.wait(WAIT_TIMEOUT)
    threads[1].start()
    threads[2].start()
    threads[2].join(WAIT_TIMEOUT)
    over.set()
    for thread in threads:
        thread.join(WAIT_TIMEOUT)
    # The second one has waited for its turn as long as the third.
    assert len(opened) == 2
    assert opened[1][0] < 3600.0 - 0.005
    assert all(stream.closed for _, stream in opened)
    assert not debugger._turn.locked()


class Told:
    """A stream to an agent, which keeps the messages that are sent."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self.closed = False

    def send(self, message: Any) -> None:
        self.words.append(message)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("latest", [True, False])
def test_a_debugger_that_is_left_makes_room_for_the_next_one(
    latest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Any] = [Told(), Told()]
    left, other = map(debugger.Debugger, streams)
    monkeypatch.setattr(debugger, "_debugger", left if latest else other)
    left.reset()
    left.leave()
    assert debugger._debugger is (None if latest else other)
    assert [stream.closed for stream in streams] == [True, False]
    assert streams[0].words == [DebugEnded()]
