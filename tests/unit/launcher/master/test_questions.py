"""Questions of commands about ranks, and the answers, through a master."""

from __future__ import annotations

from pathlib import Path

from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_until
from unirun.wire.messages import Attach, Debug, DebugInput
from unirun.wire.reports import DebugEnded, DebugOutput


async def _debugged(master: MasterHarness) -> None:
    """A debugger's lines are passed on in both directions; that a command has gone is told to the agent."""
    agent, command, other = await master.agent(), await master.greet(Attach()), await master.greet(Attach())
    command.send(Debug("actor", 1))
    other.send(Debug("actor", 7))
    assert (await receive_until(other, DebugEnded))[-1] == DebugEnded(problem="it has no process now")
    assert (await receive_until(agent, Debug))[-1] == Debug("actor", 1, 1)
    agent.send(DebugOutput("(Pdb) ", asks=True, number=1))
    assert (await receive_until(command, DebugOutput))[-1] == DebugOutput("(Pdb) ", asks=True, number=1)
    other.send(DebugInput("not from here"))
    command.send(DebugInput("p 1"))
    assert (await receive_until(agent, DebugInput))[-1] == DebugInput("p 1", number=1)
    await command.close()
    gone = DebugInput(control="detach", number=1)
    assert (await receive_until(agent, DebugInput))[-1] == gone
    agent.send(DebugEnded(1))
    await other.close()
    await end_well(agent)


def test_lines_of_a_debugger_go_between_its_command_and_the_agent_of_the_rank(tmp_path: Path) -> None:
    master = MasterHarness(tmp_path)
    assert master.run(lambda: _debugged(master)) == []
