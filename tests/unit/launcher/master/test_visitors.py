"""Processes outside the job are told what workers are told of each other."""

from __future__ import annotations

from pathlib import Path

from tests.unit.failover.job import Job
from tests.unit.launcher.master.court import Court, until
from tests.unit.launcher.master.streams import ends_well
from unirun.values import WorkerId
from unirun.wire.messages import Ended, View, Visit, Welcome, updated
from unirun.wire.reports import FromWorker, Serving, ViewWanted

SERVES = FromWorker(WorkerId("actor", 1, 0), Serving({"socket": "here"}, recoverable=True))


def test_a_visitor_gets_the_whole_view_then_changes_then_the_end(tmp_path: Path) -> None:
    court = Court(tmp_path, Job({"actor": 2}))

    async def play() -> None:
        agent = await court.agent()
        visitor = await court.greet(Visit())
        welcome = (await until(visitor, Welcome))[-1]
        assert isinstance(welcome, Welcome)
        assert [role.name for role in welcome.view.roles] == ["actor"]
        view = updated(None, welcome.view)
        agent.send(SERVES)
        while view is not None and view.roles[0].workers[1].addresses != {"socket": "here"}:
            news = (await until(visitor, View))[-1]
            assert isinstance(news, View)
            view = updated(view, news)
        assert view is not None, "no change is missing"
        await ends_well(agent)
        await until(visitor, Ended)
        await visitor.close()

    assert court.run(play) == []


def test_a_visitor_that_has_missed_a_view_asks_for_a_whole_one(tmp_path: Path) -> None:
    court = Court(tmp_path, Job({"actor": 2}))

    async def play() -> None:
        agent, visitor = await court.agent(), await court.greet(Visit())
        await until(visitor, Welcome)
        visitor.send(ViewWanted())
        while True:
            view = (await until(visitor, View))[-1]
            assert isinstance(view, View)
            if view.since is None:
                break
        await visitor.close()
        await ends_well(agent)

    assert court.run(play) == []


def test_a_visitor_that_leaves_changes_nothing(tmp_path: Path) -> None:
    court = Court(tmp_path, Job({"actor": 2}))

    async def play() -> None:
        visitor, agent = await court.greet(Visit()), await court.agent()
        await visitor.close()
        await ends_well(agent)

    assert court.run(play) == []
    assert court.status()["phase"] == "succeeded"
