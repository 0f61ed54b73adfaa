"""Processes outside the job are told what workers are told of each other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.failover.job import Job
from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_until
from unirun.errors import ConnectionLost
from unirun.launcher.master.visitors import Visitors
from unirun.values import WorkerId
from unirun.wire.messages import Ended, View, Visit, Welcome, updated
from unirun.wire.reports import FromWorker, Message, Serving, ViewWanted

SERVES = FromWorker(WorkerId("actor", 1, 0), Serving({"socket": "here"}, recoverable=True))


def test_a_visitor_gets_the_whole_view_then_changes_then_the_end(tmp_path: Path) -> None:
    harness = MasterHarness(tmp_path, Job({"actor": 2}))

    async def others() -> None:
        agent = await harness.agent()
        visitor = await harness.greet(Visit())
        welcome = (await receive_until(visitor, Welcome))[-1]
        assert isinstance(welcome, Welcome)
        assert [role.name for role in welcome.view.roles] == ["actor"]
        view = updated(None, welcome.view)
        agent.send(SERVES)
        while view is not None and view.roles[0].workers[1].addresses != {"socket": "here"}:
            news = (await receive_until(visitor, View))[-1]
            assert isinstance(news, View)
            view = updated(view, news)
        assert view is not None, "no change is missing"
        await end_well(agent)
        await receive_until(visitor, Ended)
        await visitor.close()

    assert harness.run(others) == []


def test_a_visitor_that_has_missed_a_view_asks_for_a_whole_one(tmp_path: Path) -> None:
    harness = MasterHarness(tmp_path, Job({"actor": 2}))

    async def others() -> None:
        agent, visitor = await harness.agent(), await harness.greet(Visit())
        await receive_until(visitor, Welcome)
        visitor.send(ViewWanted())
        while True:
            view = (await receive_until(visitor, View))[-1]
            assert isinstance(view, View)
            if view.since is None:
                break
        await visitor.close()
        await end_well(agent)

    assert harness.run(others) == []


def test_a_visitor_that_leaves_changes_nothing(tmp_path: Path) -> None:
    harness = MasterHarness(tmp_path, Job({"actor": 2}))

    async def others() -> None:
        visitor, agent = await harness.greet(Visit()), await harness.agent()
        await visitor.close()
        await end_well(agent)

    assert harness.run(others) == []
    assert harness.status()["phase"] == "succeeded"


class FakeStream:
    """The stream of a visitor that says some words, and leaves."""

    def __init__(self, *words: Message) -> None:
        self.words, self.heard = [*words], list[Message]()

    def send(self, message: Message) -> None:
        self.heard.append(message)

    def send_frame(self, frame: bytes) -> None:
        raise AssertionError("it has left")

    async def receive(self) -> Message:
        if not self.words:
            raise ConnectionLost("the visitor has left")
        return self.words.pop(0)


@pytest.mark.parametrize("over", [False, True])
def test_a_visitor_that_comes_after_the_end_hears_of_it(over: bool) -> None:
    """Nothing more would happen for which it could wait. One that has left is told nothing."""
    job = Job({"actor": 1}).running()
    if over:
        job.exits("actor", 0)
    visitors, stream = Visitors(lambda: job.state, lambda _: True), FakeStream(ViewWanted())
    visitor: Any = stream
    asyncio.run(visitors.follow(visitor))
    expected = [Welcome, Ended, View] if over else [Welcome, View]
    assert [type(each) for each in stream.heard] == expected
    visitors.tell(Ended(0, "succeeded", ""))
