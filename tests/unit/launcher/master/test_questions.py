"""Questions of commands about ranks, and the answers, through a master."""

from __future__ import annotations

from pathlib import Path

from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_until
from unirun.wire.messages import Attach, Debug, DebugInput, Profile
from unirun.wire.reports import DebugEnded, DebugOutput, Profiled


async def _debugged(master: MasterHarness) -> None:
    """A debugger's lines are passed on in both directions; that a command has gone is told to the agent."""
    agent, command, other = await master.agent(), await master.greet(Attach()), await master.greet(Attach())
    command.send(Debug("actor", 1))
    other.send(Debug("actor", 7))
    assert (await receive_until(other, DebugEnded))[-1] == DebugEnded(problem="it has no process now")
    order = (await receive_until(agent, Debug))[-1]
    assert isinstance(order, Debug)
    assert order == Debug("actor", 1, order.number)
    number = order.number
    agent.send(DebugOutput("(Pdb) ", asks=True, number=number))
    assert (await receive_until(command, DebugOutput))[-1] == DebugOutput("(Pdb) ", asks=True, number=number)
    other.send(DebugInput("not from here"))
    command.send(DebugInput("p 1"))
    assert (await receive_until(agent, DebugInput))[-1] == DebugInput("p 1", number=number)
    await command.close()
    gone = DebugInput(control="detach", number=number)
    assert (await receive_until(agent, DebugInput))[-1] == gone
    agent.send(DebugEnded(number))
    await other.close()
    await end_well(agent)


async def _lost(master: MasterHarness) -> None:
    """Commands do not wait for an agent that has gone, or has connected again and so let its ranks go on."""
    agent, debug, profile = await master.agent(), await master.greet(Attach()), await master.greet(Attach())
    debug.send(Debug("actor", 1))
    await receive_until(agent, Debug)
    profile.send(Profile("actor", 0, 1.0))
    await receive_until(agent, Profile)
    again = await master.greet(master.model.join("n0"))
    (*_, ended) = await receive_until(debug, DebugEnded)
    (*_, profiled) = await receive_until(profile, Profiled)
    assert isinstance(ended, DebugEnded)
    assert isinstance(profiled, Profiled)
    assert ended.problem == profiled.problem == "the agent of n0 is gone, or has connected again"
    for stream in (debug, profile, agent):
        await stream.close()
    await end_well(again)


def test_a_command_hears_that_the_agent_of_the_rank_is_gone(tmp_path: Path) -> None:
    master = MasterHarness(tmp_path)
    assert master.run(lambda: _lost(master)) == []


def test_lines_of_a_debugger_go_between_its_command_and_the_agent_of_the_rank(tmp_path: Path) -> None:
    master = MasterHarness(tmp_path)
    assert master.run(lambda: _debugged(master)) == []
