"""A job that must not outlive the command that has started it: the command attaches to each master as its owner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import TERM, Job
from tests.unit.launcher.master.court import Court, eventually, until
from tests.unit.launcher.master.streams import ends_well
from unirun.launcher.master import shell
from unirun.wire.messages import Attach, Ended, RoleChanged, StopWorkers


def owned_job(folder: Path) -> Court:
    job = Job({"actor": 2})
    job.state = replace(job.state, owned=True)
    return Court(folder, job)


def test_the_end_of_the_owners_stream_stops_the_job(tmp_path: Path) -> None:
    court = owned_job(tmp_path)

    async def play() -> None:
        owner, agent = await court.greet(Attach(owner=True)), await court.agent()
        await owner.close()
        stop = (await until(agent, StopWorkers))[-1]
        assert isinstance(stop, StopWorkers)
        assert stop.signal == TERM
        await agent.close()

    assert court.run(play) == []
    assert court.status()["reason"] == "the unirun command was killed"


def test_an_owner_that_attaches_again_before_its_first_stream_ends_keeps_the_job(tmp_path: Path) -> None:
    court = owned_job(tmp_path)

    async def play() -> None:
        first, agent = await court.greet(Attach(owner=True)), await court.agent()
        second = await court.greet(Attach(owner=True))
        await until(second, RoleChanged)
        await first.close()
        await ends_well(agent)
        await until(second, Ended)
        await second.close()

    assert court.run(play) == []
    assert court.status()["phase"] == "succeeded"


def test_the_end_of_another_followers_stream_changes_nothing(tmp_path: Path) -> None:
    court = owned_job(tmp_path)

    async def play() -> None:
        owner, agent = await court.greet(Attach(owner=True)), await court.agent()
        await (await court.greet(Attach())).close()
        await ends_well(agent)
        await until(owner, Ended)
        await owner.close()

    assert court.run(play) == []
    assert court.status()["phase"] == "succeeded"


def test_a_job_whose_owner_does_not_attach_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    court = owned_job(tmp_path)
    monkeypatch.setattr(shell, "OWNER_TIMEOUT", 0.01)

    async def play() -> None:
        await eventually(lambda: court.job.state.exists() and court.status()["phase"] == "stopped")

    assert court.run(play) == []
    assert court.status()["reason"] == "the unirun command was killed"


def test_the_end_of_the_owners_stream_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    court = owned_job(tmp_path)
    monkeypatch.setattr(shell, "OWNER_TIMEOUT", 0.1)

    async def play() -> None:
        owner, agent = await court.greet(Attach(owner=True)), await court.agent()
        await owner.close()
        await until(agent, StopWorkers)
        await asyncio.sleep(0.2)
        await agent.close()

    assert court.run(play) == []
    assert len(court.events("stop")) == 1
