"""The master's side of what commands ask ranks: it passes questions on to agents, and the answers back.

None of it is an event of the master's state machine, and nothing is stored: a command asks the next master again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from unirun.failover.state import JobState
from unirun.wire.aio import Stream
from unirun.wire.messages import AskStacks, StacksAsked
from unirun.wire.reports import Stacks


class Questions:
    """The questions of commands that are not answered yet. `agents` are the streams of the nodes."""

    def __init__(self, agents: Mapping[str, Stream], state: Callable[[], JobState]) -> None:
        self._agents, self._state = agents, state
        self._asked: dict[int, Stream] = {}
        self._number = 0

    def ask(self, question: AskStacks, stream: Stream) -> None:
        """Ask the agents of the ranks for their stacks. The command waits for those that answer."""
        self._number += 1
        self._asked[self._number] = stream
        nodes = tuple(
            sorted(
                {
                    worker.node
                    for name, role in self._state().roles.items()
                    for worker in role.workers
                    if worker.live and question.role in ("", name) and question.rank in (-1, worker.rank)
                }
                & self._agents.keys()
            )
        )
        stream.send(StacksAsked(nodes))
        for node in nodes:
            self._agents[node].send(replace(question, number=self._number))

    def answered(self, answer: Stacks) -> None:
        """Pass an answer on, if the command is still there."""
        if (stream := self._asked.get(answer.number)) is not None:
            stream.send(answer)

    def leave(self, stream: Stream) -> None:
        """A command has gone."""
        for number in [number for number, each in self._asked.items() if each is stream]:
            del self._asked[number]
