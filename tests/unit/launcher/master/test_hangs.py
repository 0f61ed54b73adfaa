"""The questions of a master about a role with a late rank, and the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_until
from unirun.launcher.master import hangs
from unirun.values import WorkerId
from unirun.wire.messages import AskProgress, Attach, EndHung
from unirun.wire.reports import Late, Notice, Progress, RankProgress, StepsAgain, Wait

REDUCE = Wait("default_pg", 7, "all_reduce")


def progress(*quiet: float, evidence: bool = False) -> Progress:
    """The ranks of the role: the last one is in no collective, and the others wait in one."""
    last = len(quiet) - 1
    return Progress(
        "n0",
        "actor",
        tuple(
            RankProgress(
                WorkerId("actor", rank, 0),
                count=3,
                quiet=each,
                age=900.0,
                waits=() if rank == last else (REDUCE,),
            )
            for rank, each in enumerate(quiet)
        ),
        evidence,
    )


@pytest.fixture
def watched(tmp_path: Path) -> MasterHarness:
    """The master of a role with a time-out."""
    model = Job({"actor": 2})
    spec = model.state.spec
    roles = tuple(replace(role, hang_timeout=5.0) for role in spec.roles)
    model.state = replace(model.state, spec=replace(spec, roles=roles))
    return MasterHarness(tmp_path, model)


async def asked(master: MasterHarness, *, late: bool = True) -> None:
    """A master asks for evidence only when a rank hangs, and orders its end if it still does."""
    agent = await master.agent()
    agent.send(Late("n0", "actor"))
    assert (await receive_until(agent, AskProgress))[-1] == AskProgress("actor", evidence=False)
    agent.send(progress(6.0, 6.0))
    assert (await receive_until(agent, AskProgress))[-1] == AskProgress("actor", evidence=True)
    agent.send(progress(6.1, 6.1 if late else 0.1, evidence=True))
    if late:
        order = (await receive_until(agent, EndHung))[-1]
        assert isinstance(order, EndHung)
        assert order.worker == WorkerId("actor", 1, 0)
        assert order.why == "hangs: no progress for 6.1 s: actor:0 waits for it in all_reduce 7 of default_pg"
    else:
        # It is asked about again, and no rank is killed.
        agent.send(Late("n0", "actor"))
        assert not any(isinstance(each, EndHung) for each in await receive_until(agent, AskProgress))
    await end_well(agent)


def test_the_rank_that_hangs_is_ended_after_it_has_left_evidence(watched: MasterHarness) -> None:
    assert watched.run(lambda: asked(watched)) == []


def test_a_rank_that_goes_on_meanwhile_is_spared(watched: MasterHarness) -> None:
    assert watched.run(lambda: asked(watched, late=False)) == []


def test_without_a_time_out_the_console_says_it_once_and_again_after_twice_as_long(
    harness: MasterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "QUESTION_INTERVAL", 0.0)
    said: list[str] = []

    async def others() -> None:
        watcher, agent = await harness.greet(Attach()), await harness.agent()
        for quiet in (61.0, 71.0, 123.0):
            agent.send(Late("n0", "actor"))
            await receive_until(agent, AskProgress)
            agent.send(progress(quiet, quiet))
        while len(said) < 2:
            message = (await receive_until(watcher, Notice))[-1]
            assert isinstance(message, Notice)
            said.extend([message.text] if "progress" in message.text else [])
        await end_well(agent)

    assert harness.run(others) == []
    assert said == [
        f"actor:0-1: no progress for {quiet} s; actor:0 in all_reduce 7 of default_pg, not there: actor:1"
        for quiet in (61, 123)
    ]
    assert harness.events("late") == said


def test_the_steps_of_a_role_that_runs_again_are_events_once(harness: MasterHarness) -> None:
    def again(node: str, generation: int, *, past: bool) -> StepsAgain:
        return StepsAgain(node, "actor", generation, 50 + generation, 57, past)

    async def others() -> None:
        agent = await harness.agent()
        for past in (False, True):
            for node in ("n0", "n1"):
                agent.send(again(node, 1, past=past))
        agent.send(again("n0", 2, past=True))
        agent.send(again("n1", 1, past=True))
        await end_well(agent)

    assert harness.run(others) == []
    assert harness.events("resumed") == [
        f"role actor goes on at step {step}; it had come to step 57 before the failure" for step in (51, 52)
    ]
    assert harness.events("caught_up") == ["role actor has come further than step 57"] * 2
