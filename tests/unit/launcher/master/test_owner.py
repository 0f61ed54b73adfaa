"""A job that must not outlive the command that has started it: the command attaches to each master as its owner."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import TERM, Job
from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_until
from tests.waiting import eventually_async
from unirun.launcher.master import shell
from unirun.wire.messages import Attach, Ended, RoleChanged, StopWorkers


def owned_job(folder: Path) -> MasterHarness:
    job = Job({"actor": 2})
    job.state = replace(job.state, owned=True)
    return MasterHarness(folder, job)


def test_the_end_of_the_owners_stream_stops_the_job(tmp_path: Path) -> None:
    harness = owned_job(tmp_path)

    async def others() -> None:
        owner, agent = await harness.greet(Attach(owner=True)), await harness.agent()
        await owner.close()
        stop = (await receive_until(agent, StopWorkers))[-1]
        assert isinstance(stop, StopWorkers)
        assert stop.signal == TERM
        await agent.close()

    assert harness.run(others) == []
    assert harness.status()["reason"] == "the unirun command was killed"


def test_an_owner_that_attaches_again_before_its_first_stream_ends_keeps_the_job(tmp_path: Path) -> None:
    harness = owned_job(tmp_path)

    async def others() -> None:
        first, agent = await harness.greet(Attach(owner=True)), await harness.agent()
        second = await harness.greet(Attach(owner=True))
        await receive_until(second, RoleChanged)
        await first.close()
        await end_well(agent)
        await receive_until(second, Ended)
        await second.close()

    assert harness.run(others) == []
    assert harness.status()["phase"] == "succeeded"


def test_the_end_of_another_followers_stream_changes_nothing(tmp_path: Path) -> None:
    harness = owned_job(tmp_path)

    async def others() -> None:
        owner, agent = await harness.greet(Attach(owner=True)), await harness.agent()
        await (await harness.greet(Attach())).close()
        await end_well(agent)
        await receive_until(owner, Ended)
        await owner.close()

    assert harness.run(others) == []
    assert harness.status()["phase"] == "succeeded"


def test_a_job_whose_owner_does_not_attach_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = owned_job(tmp_path)
    monkeypatch.setattr(shell, "OWNER_TIMEOUT", 0.01)

    async def others() -> None:
        await eventually_async(lambda: harness.job.state.exists() and harness.status()["phase"] == "stopped")

    assert harness.run(others) == []
    assert harness.status()["reason"] == "the unirun command was killed"


def test_the_end_of_the_owners_stream_is_taken_once(tmp_path: Path) -> None:
    """The command has attached, so the master no longer waits for it."""
    harness = owned_job(tmp_path)

    async def others() -> None:
        owner, agent = await harness.greet(Attach(owner=True)), await harness.agent()
        await owner.close()
        await receive_until(agent, StopWorkers)
        due = harness.master._owner_due
        assert due is not None
        assert due.cancelled()
        await agent.close()

    assert harness.run(others) == []
    assert len(harness.events("stop")) == 1
