"""Questions of commands about ranks, and the answers, through a master."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_until
from unirun.launcher.master.visitors import Questions
from unirun.wire.messages import AskStacks, Attach, Debug, DebugInput, Profile, StacksAsked
from unirun.wire.reports import DebugEnded, DebugOutput, Profiled, Stacks


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


class FakeStream:
    """A stream: what was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        """Keep it."""
        self.sent.append(message)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.booleans()), unique_by=lambda x: x[:2]),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([-1, 0, 1]),
)
def test_the_agents_of_all_live_ranks_that_are_meant_are_asked_for_stacks_under_one_number(
    ranks: list[tuple[str, int, bool]], role: str, rank: int
) -> None:
    """Rank 2 is on a node whose agent is away."""
    state: Any = SimpleNamespace(
        roles={
            name: SimpleNamespace(
                workers=[
                    SimpleNamespace(rank=r, node=f"n{r}", live=live) for of, r, live in ranks if of == name
                ]
            )
            for name in "ab"
        }
    )
    agents: Any = {"n0": FakeStream(), "n1": FakeStream()}
    meant = {r for name, r, live in ranks if live and r < 2 and role in ("", name) and rank in (-1, r)}
    questions, first, second = Questions(agents, lambda: state, 1), FakeStream(), FakeStream()
    for command in (first, second):
        questions.ask(AskStacks(role, rank), command)  # type: ignore[arg-type]
        assert command.sent == [StacksAsked(tuple(f"n{r}" for r in sorted(meant)))]
    numbers = {each.number for agent in agents.values() for each in agent.sent}
    assert len(numbers) == 2 * bool(meant)
    assert all(number > 1 << 32 for number in numbers), "the next master would use it, too"
    for r in (0, 1):
        assert agents[f"n{r}"].sent == [AskStacks(role, rank, n) for n in sorted(numbers) if r in meant]
    for number, command in zip(sorted(numbers), (first, second), strict=False):
        questions.answered(Stacks("n0", number, ()))
        assert command.sent[1:] == [Stacks("n0", number, ())]
    questions.leave(first)  # type: ignore[arg-type]
    questions.leave(second)  # type: ignore[arg-type]
    assert (questions._asked, questions._of_ranks) == ({}, {})


MOVES = ("ask", "ask", "ask", "next", "answer", "late", "lost", "leave")


@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 9)), min_size=10, max_size=30))
def test_each_command_hears_the_answers_to_its_question_whichever_master_asked(
    moves: list[tuple[str, int]],
) -> None:
    """Ranks answer late, also the next master, whose commands have asked other questions."""
    worker = SimpleNamespace(live=True, node="n0")
    state: Any = SimpleNamespace(roles={"actor": SimpleNamespace(workers=[worker])})
    agent, epoch = FakeStream(), 1
    agents: Any = {"n0": agent}
    questions = Questions(agents, lambda: state, epoch)
    # The questions of the present commands by their numbers, and the numbers of all questions.
    open_: dict[int, Any] = {}
    numbers: list[int] = []
    for move, which in moves:
        command: Any = FakeStream()
        if move == "ask":
            debugs = bool(which % 2)
            questions.ask_rank(Debug("actor", 0) if debugs else Profile("actor", 0, 1.0), command)
            number = agent.sent[-1].number
            assert number not in numbers
            numbers.append(number)
            open_[number] = command
        elif move == "next":
            epoch += 1
            questions = Questions(agents, lambda: state, epoch)
            open_.clear()
        elif move == "answer" and open_:
            number = [*open_][which % len(open_)]
            asked = open_.pop(number)
            questions.answered(DebugEnded(number, "over"))
            assert asked.sent == [DebugEnded(number, "over")]
        elif move == "late" and numbers:
            late = numbers[which % len(numbers)]
            if late not in open_:
                questions.answered(DebugEnded(late, "late"))
        elif move == "lost":
            questions.lost("n0")
            assert all(len(each.sent) == 1 for each in open_.values())
            open_.clear()
        elif move == "leave" and open_:
            number = [*open_][which % len(open_)]
            questions.leave(open_.pop(number))
        assert all(each.sent == [] for each in open_.values())
    questions.lost("n0")
    assert (questions._asked, questions._of_ranks) == ({}, {})
