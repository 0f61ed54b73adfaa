"""The agent's side of debuggers, with fake ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.launcher.agent import worker
from tests.waiting import eventually_async
from unirun.errors import ConnectionLost
from unirun.launcher import debugger, debugging
from unirun.launcher.debugging import Debugging
from unirun.launcher.events import AgentState, LinkMessage
from unirun.launcher.hangs import is_held
from unirun.values import WorkerId
from unirun.wire.messages import Debug, DebugInput
from unirun.wire.reports import DEBUGGER, DebugEnded, Debuggee, DebugOutput, Listening, Message, Notice

WHO = WorkerId("actor", 1, 0)


class FakeStream:
    """A stream to a worker. What is put into `news` comes from it; None is its end."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.news: asyncio.Queue[Message | None] = asyncio.Queue()

    def send(self, message: Message) -> None:
        """Keep it."""
        self.sent.append(message)

    async def receive(self) -> Message:
        """The next of the news."""
        if (word := await self.news.get()) is None:
            raise ConnectionLost("gone")
        return word

    def abort(self) -> None:
        """End it."""
        self.news.put_nowait(None)

    async def close(self) -> None:
        """Nothing is left to be sent."""


class Node:
    """The debuggers of a node with one worker. `interrupted` has the requests to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker = replace(worker(1, "actor", 1), pid=77)
        self.told: list[Message] = []
        self.interrupted: list[str] = []
        self.problem = ""
        state = replace(AgentState("n0"), workers={1: self.worker})
        monkeypatch.setattr(debugging, "send_request", self._request)
        self.held: list[str] = []
        self.debugging = Debugging("job-1", lambda: state, self.told.append, self._apply)

    def _request(self, pid: int, folder: str, text: str) -> str:
        assert (pid, folder) == (77, "/logs/actor/1/0")
        self.interrupted.append(text)
        return self.problem

    def _apply(self, said: LinkMessage) -> None:
        assert isinstance(said.message, Listening)
        self.held.append(said.message.addresses[DEBUGGER])

    async def serve(self, number: int, stream: FakeStream) -> asyncio.Task[None]:
        """A worker that has connected."""
        first = Debuggee(WHO, number, "train.py:7", 9.0)
        coroutine: Coroutine[Any, Any, None] = self.debugging.serve(self.worker, first, stream)  # type: ignore[arg-type]
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0)
        return task


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def run(steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(steps())


def test_a_worker_is_held_from_its_answer_to_the_end_of_its_stream(node: Node) -> None:
    async def steps() -> None:
        node.debugging.ask(Debug("actor", 1, 5))
        assert node.interrupted == ["debug=5"]
        stream = FakeStream()
        task = await node.serve(5, stream)
        assert node.held == ["is held by unirun debug"]
        stream.news.put_nowait(DebugOutput("(Pdb) ", asks=True))
        await asyncio.sleep(0)
        node.debugging.typed(DebugInput("p 1", number=5))
        assert stream.sent == [Debug("actor", 1, 5), DebugInput("p 1", number=5)]
        stream.abort()
        await task
        assert node.held == ["is held by unirun debug", ""]
        assert node.told == [
            Notice("actor:1", "unirun debug holds it"),
            DebugOutput("(Pdb) ", asks=True, number=5),
            DebugEnded(5, "its process has ended"),
        ]

    run(steps)


def test_a_worker_that_waits_is_announced_and_given_to_the_first_command(node: Node) -> None:
    async def steps() -> None:
        stream = FakeStream()
        task = await node.serve(0, stream)
        text = "waits at train.py:7 for unirun debug job-1 actor:1, for 9 s"
        assert node.told == [Notice("actor:1", text)]
        node.debugging.ask(Debug("actor", 1, 5))
        node.debugging.ask(Debug("actor", 1, 6))
        assert stream.sent == [Debug("actor", 1, 5)]
        holds = Notice("actor:1", "unirun debug holds it")
        assert node.told[1:] == [holds, DebugEnded(6, "another unirun debug holds it")]
        stream.news.put_nowait(DebugEnded())
        stream.abort()
        await task
        assert node.told[3:] == [DebugEnded(5)]
        assert not node.interrupted

    run(steps)


def test_a_worker_with_two_debuggers_is_held_until_the_last_one_leaves(node: Node) -> None:
    async def steps() -> None:
        node.debugging.ask(Debug("actor", 1, 5))
        attached, waiting = FakeStream(), FakeStream()
        first = await node.serve(5, attached)
        # A process that the worker has started comes to a breakpoint.
        second = await node.serve(0, waiting)
        waits = "waits at train.py:7 for unirun debug"
        assert node.held == ["is held by unirun debug", waits]
        attached.abort()
        await first
        assert node.held[2:] == []
        waiting.abort()
        await second
        assert node.held[2:] == [""]

        node.debugging.ask(Debug("actor", 1, 6))
        first, second = await node.serve(6, attached), await node.serve(0, waiting)
        waiting.abort()
        await second
        attached.abort()
        await first
        assert node.held[3:] == ["is held by unirun debug", waits, "is held by unirun debug", ""]

    run(steps)


def test_a_command_that_leaves_lets_the_worker_go_on_and_so_does_another_master(node: Node) -> None:
    async def steps() -> None:
        def detach() -> None:
            node.debugging.typed(DebugInput(control="detach", number=5))

        for number, leave in ((5, detach), (6, node.debugging.led)):
            node.debugging.ask(Debug("actor", 1, number))
            task = await node.serve(number, FakeStream())
            leave()
            await task
            # It may be at a prompt, or run with breakpoints.
            assert node.interrupted[-2:] == [f"debug={number}"] * 2
        assert not [each for each in node.told if isinstance(each, DebugEnded)]
        # It answers too late, and is let go at once.
        node.debugging.ask(Debug("actor", 1, 7))
        node.debugging.typed(DebugInput(control="detach", number=7))
        late = FakeStream()
        await (await node.serve(7, late))
        assert late.sent == []

    run(steps)


def test_a_breakpoint_that_was_passed_is_waited_at_no_more(node: Node) -> None:
    """The worker comes to others, of which a command is given the one that waits now, once."""

    async def steps() -> None:
        for number in (5, 6):
            passed, there, second = FakeStream(), FakeStream(), FakeStream()
            task = await node.serve(0, passed)
            passed.abort()
            await task
            assert node.held[-1] == ""
            node.debugging.ask(Debug("actor", 1, 10 * number))
            assert (passed.sent, node.interrupted.pop()) == ([], f"debug={10 * number}")
            node.debugging.typed(DebugInput(control="detach", number=10 * number))
            task = await node.serve(0, there)
            # Another thread of it has come to a breakpoint, too.
            await (await node.serve(0, second))
            node.debugging.ask(Debug("actor", 1, number))
            assert (there.sent, second.sent) == ([Debug("actor", 1, number)], [])
            there.news.put_nowait(DebugEnded())
            there.abort()
            await task
        assert not node.interrupted

    run(steps)


def test_a_rank_without_a_process_or_without_python_is_not_debugged(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps() -> None:
        node.debugging.ask(Debug("actor", 0, 5))
        node.problem = "it does not run unirun's code, or not yet"
        node.debugging.ask(Debug("actor", 1, 6))
        node.problem = ""
        monkeypatch.setattr(debugging, "ATTACH_TIMEOUT", 0.01)
        node.debugging.ask(Debug("actor", 1, 7))
        await asyncio.sleep(0.05)
        problems = [each.problem for each in node.told if isinstance(each, DebugEnded)]
        assert problems[:2] == [
            "it has no process now, or is told to end",
            "it does not run unirun's code, or not yet",
        ]
        assert problems[2].startswith("it has executed no Python code for")

    run(steps)


def test_a_rank_that_has_ended_before_it_was_debugged_is_told_as_such(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps() -> None:
        monkeypatch.setattr(debugging, "ATTACH_TIMEOUT", 0.0)
        node.debugging.ask(Debug("actor", 1, 7))
        node.debugging._state = lambda: AgentState("n0")
        await eventually_async(lambda: bool(node.told))
        assert node.told == [DebugEnded(7, "it has ended meanwhile")]

    run(steps)


def test_a_breakpoint_of_another_thread_is_passed_and_the_console_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNIRUN_SOCKET", "unused")
    ignored = SimpleNamespace(here=False, interrupt=lambda frame: None)
    monkeypatch.setattr(debugger, "_debugger", ignored)
    debugger.breakpoint()
    assert "is passed: another thread of this rank is debugged" in capfd.readouterr().err
    with debugger._turn:
        debugger.breakpoint(timeout=0.01)
    assert "is passed: another thread has waited at one" in capfd.readouterr().err


def test_a_worker_is_held_as_long_as_its_address_says_so() -> None:
    assert is_held(replace(worker(1, "actor", 1), addresses={DEBUGGER: "is held by unirun debug"}))
    assert not is_held(replace(worker(1, "actor", 1), addresses={DEBUGGER: ""}))
