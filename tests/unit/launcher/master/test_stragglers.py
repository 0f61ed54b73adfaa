"""A master tells of a rank that the others wait for, in the log, on the console, and in the status."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_until, worker_exited
from unirun.failover.draft import Straggles
from unirun.launcher.master import hangs
from unirun.spec.job import Stragglers
from unirun.values import WorkerId
from unirun.wire.messages import Attach
from unirun.wire.reports import Arrivals, FromWorker, Notice


def arrivals_of(rank: int, window: int) -> Arrivals:
    """Those of a rank in ten steps of a second. Rank 1 is half a second late."""
    times = tuple((number, window * 10.0 + number + 0.5 * (rank == 1)) for number in range(10))
    return Arrivals("0", "", window, times)


def arrivals(rank: int, window: int) -> FromWorker:
    return FromWorker(WorkerId("actor", rank, 0), arrivals_of(rank, window))


def test_nothing_is_kept_of_a_straggler_that_has_ended() -> None:
    """An incarnation that is over comes in no later window."""
    job = Job({"actor": 3})
    job.on(job.join("n0"))
    watch = hangs.StragglerWatch(lambda: job.state, lambda *about: None, lambda straggles: None)
    for window, incarnation in enumerate((5, 6, 7)):
        group = "actor", "0", "", window
        late, *rest = (
            (WorkerId("actor", rank, incarnation), arrivals_of(rank, window).times) for rank in (1, 0, 2)
        )
        watch._arrived[group] = {who: dict(times) for who, times in (late, *rest)}
        watch._judge(group)
    assert [who.incarnation for who in watch._late] == [7]
    assert {who.incarnation for who in watch._windows.late} == {7}


@pytest.mark.parametrize("wish", ["tell", "replace"])
def test_a_rank_that_becomes_a_straggler_again_is_told_again_and_moved_once(wish: Stragglers) -> None:
    """Of a rank that is late elsewhere, too, the node is not the reason."""
    job = Job({"actor": 3}).running()
    roles = tuple(replace(each, stragglers=wish) for each in job.state.spec.roles)
    job.state = replace(job.state, spec=replace(job.state.spec, roles=roles))
    said: list[tuple[WorkerId, str, str]] = []
    moved: list[Straggles] = []
    watch = hangs.StragglerWatch(lambda: job.state, lambda *about: said.append(about), moved.append)
    slow = WorkerId("actor", 1, 0)
    for window in range(8):
        # It is on time in the fifth window.
        late = 0.5 * (window != 4)
        times = {number: float(number) for number in range(10)}
        watch._arrived["actor", "0", "", window] = {
            WorkerId("actor", rank, 0): {n: at + late * (rank == 1) for n, at in times.items()}
            for rank in range(3)
        }
        watch._judge(("actor", "0", "", window))
        assert bool(watch.stragglers()) == (window in (2, 3, 7))
    assert [(who, node) for who, node, _ in said] == [(slow, "n0")] * 2
    assert watch.stragglers() == (said[0][2],)
    assert moved == [Straggles(slow, said[0][2])] * (wish == "replace")


def test_a_rank_that_is_late_in_three_windows_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "GATHER_SECONDS", 0.01)
    harness = MasterHarness(tmp_path, Job({"actor": 3}))
    text = "actor:1 on n0 is a straggler: the other ranks wait for it in collectives 50% of the time (z-score 25)"
    said: list[str] = []

    async def others() -> None:
        watcher, agent = await harness.greet(Attach()), await harness.agent()
        for window in range(4):
            for rank in range(3):
                agent.send(arrivals(rank, window))
        message = (await receive_until(watcher, Notice))[-1]
        assert isinstance(message, Notice)
        said.append(message.text)
        agent.send(worker_exited(2, 0))
        await end_well(agent)

    assert harness.run(others) == []
    assert said == [text]
    assert harness.events("straggler") == [text]
