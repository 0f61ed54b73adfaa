"""The processes outside the job that the master serves: commands, which ask ranks, and visitors, which call workers.

None of it is an event of the master's state machine but the wish of a visitor for more ranks, and nothing is stored: a
command asks the next master again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from unirun.errors import WireError
from unirun.failover.draft import Event, welcome, whole_view
from unirun.failover.state import JobState
from unirun.failover.status_views import farewell
from unirun.wire.aio import Stream, frame_of
from unirun.wire.messages import AskStacks, Debug, DebugInput, Ended, Grow, Profile, StacksAsked, View
from unirun.wire.reports import DebugEnded, DebugOutput, Message, Profiled, Stacks, TracePart, ViewWanted

# Questions to ranks: the master passes them on to agents, and the answers back.

Answer = Stacks | DebugOutput | DebugEnded | TracePart | Profiled
"""The messages of agents for commands."""


class Questions:
    """The questions of commands that are not answered yet. `agents` are the streams of the nodes.

    Agents may still answer questions of the master before, which had other numbers: they begin with its `epoch`.
    """

    def __init__(self, agents: Mapping[str, Stream], state: Callable[[], JobState], epoch: int) -> None:
        self._agents, self._state = agents, state
        self._asked: dict[int, Stream] = {}
        # The requests to one rank by their numbers: its node, and whether it is for a debugger.
        self._of_ranks: dict[int, tuple[str, bool]] = {}
        self._number = epoch << 32

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

    def ask_rank(self, request: Debug | Profile, stream: Stream) -> None:
        """Ask the agent of a rank for a debugger, or for a profile."""
        role = self._state().roles.get(request.role)
        worker = role.workers[request.rank] if role and 0 <= request.rank < len(role.workers) else None
        if worker is None or not worker.live or worker.node not in self._agents:
            stream.send(_refused(0, isinstance(request, Debug), "it has no process now"))
            return
        self._number += 1
        self._asked[self._number] = stream
        self._of_ranks[self._number] = worker.node, isinstance(request, Debug)
        self._agents[worker.node].send(replace(request, number=self._number))

    def typed(self, word: DebugInput, stream: Stream) -> None:
        """Pass on what the user of a debugger has typed."""
        for number, (node, debugs) in self._of_ranks.items():
            if debugs and self._asked[number] is stream and node in self._agents:
                self._agents[node].send(replace(word, number=number))

    def answered(self, answer: Answer) -> None:
        """Pass an answer on, if the command is still there."""
        if (stream := self._asked.get(answer.number)) is not None:
            stream.send(answer)
        if isinstance(answer, DebugEnded | Profiled):
            self._asked.pop(answer.number, None)
            self._of_ranks.pop(answer.number, None)

    def lost(self, node: str) -> None:
        """The stream of an agent has ended. It lets debugged ranks go on, and no answer of it would come any more."""
        for number, (at, debugs) in list(self._of_ranks.items()):
            if at == node:
                self.answered(
                    _refused(number, debugs, f"the agent of {node} is gone, or has connected again")
                )

    def leave(self, stream: Stream) -> None:
        """A command has gone; what it has debugged goes on."""
        self.typed(DebugInput(control="detach"), stream)
        for number in [number for number, each in self._asked.items() if each is stream]:
            del self._asked[number]
            self._of_ranks.pop(number, None)


def _refused(number: int, debugs: bool, problem: str) -> DebugEnded | Profiled:
    return DebugEnded(number, problem) if debugs else Profiled(number, problem=problem)


# Processes outside the job that call its workers: they are told what workers are told of each other.


class Visitors:
    """The streams of all visitors. `state` gives the present state, as far as it is stored; `apply` takes a step."""

    def __init__(self, state: Callable[[], JobState], apply: Callable[[Event], bool]) -> None:
        self._state, self._apply = state, apply
        self._streams: set[Stream] = set()

    async def follow(self, stream: Stream) -> None:
        """Serve a visitor until it leaves."""
        self._streams.add(stream)
        try:
            stream.send(welcome(self._view(), self._state().spec))
            if (end := farewell(self._state())) is not None:
                stream.send(end)
            while True:
                message = await stream.receive()
                if isinstance(message, ViewWanted):
                    stream.send(self._view())
                elif isinstance(message, Grow):
                    self._apply(message)
        except WireError:
            return
        finally:
            self._streams.discard(stream)

    def tell(self, message: View | Ended) -> None:
        """Send `message` to all of them."""
        tell_all(self._streams, message)

    def _view(self) -> View:
        state = self._state()
        return whole_view(state, state.told.number if state.told else 0)


def tell_all(streams: Collection[Stream], message: Message) -> None:
    """Send `message`, which is encoded once."""
    if streams:
        frame = frame_of(message)
        for stream in streams:
            stream.send_frame(frame)
