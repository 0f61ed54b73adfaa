"""The agent's side of debuggers: between those in its workers (`unirun.launcher.debugger`) and the master, which has
the commands.

A debugger is known by the number of the request that it answers. A worker that waits at a breakpoint has none yet.
While one holds a worker, or is waited for, the address `DEBUGGER` of the worker says so to everybody, in words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from unirun.errors import WireError
from unirun.launcher.events import AgentState, LinkMessage, Worker
from unirun.launcher.requests import send_request
from unirun.wire.aio import Stream
from unirun.wire.messages import Debug, DebugInput
from unirun.wire.reports import DEBUGGER, DebugEnded, Debuggee, DebugOutput, Listening, Message, Notice

ATTACH_TIMEOUT = 60.0
"""Seconds in which a worker has to come to Python code."""

HELD = "is held by unirun debug"
"""A worker, in the words of the status."""


class _Session:
    """A command that debugs a worker, over a `stream` of the latter once it has answered."""

    def __init__(self, worker: Worker, stream: Stream | None = None) -> None:
        self.worker, self.stream = worker, stream


class Debugging:
    """The debuggers of a node's workers. `state` gives the agent's state; `tell` sends to the master; `apply` applies
    what a worker says."""

    def __init__(
        self,
        run_id: str,
        state: Callable[[], AgentState],
        tell: Callable[[Message], None],
        apply: Callable[[LinkMessage], None],
    ) -> None:
        self._run_id, self._state, self._tell, self._apply = run_id, state, tell, apply
        self._sessions: dict[int, _Session] = {}
        self._waiting: dict[int, Stream] = {}

    def ask(self, order: Debug) -> None:
        """A command wants to debug a worker: one that waits begins, any other is interrupted."""
        worker = self._state().find(order.role, order.rank)
        if worker is None or worker.pid is None or worker.sent is not None:
            self._tell(DebugEnded(order.number, "it has no process now, or is told to end"))
        elif worker.id in {each.worker.id for each in self._sessions.values()}:
            self._tell(DebugEnded(order.number, "another unirun debug holds it"))
        elif (stream := self._waiting.pop(worker.id, None)) is not None:
            self._sessions[order.number] = _Session(worker, stream)
            self._accept(worker, order, stream)
        elif problem := _interrupt(worker, order.number):
            self._tell(DebugEnded(order.number, problem))
        else:
            self._sessions[order.number] = session = _Session(worker)
            asyncio.get_running_loop().call_later(ATTACH_TIMEOUT, self._give_up, order.number, session)

    def _accept(self, worker: Worker, order: Debug, stream: Stream) -> None:
        """Begin, and say so to the job's events: whoever debugs a rank can do anything in it."""
        stream.send(order)
        self._say(worker, HELD)
        self._tell(Notice(str(worker.who), "unirun debug holds it"))

    def _give_up(self, number: int, session: _Session) -> None:
        if self._sessions.get(number) is session and session.stream is None:
            del self._sessions[number]
            text = f"it has executed no Python code for {ATTACH_TIMEOUT:g} s; unirun stacks shows where it is"
            lives = session.worker.id in self._state().workers
            self._tell(DebugEnded(number, text if lives else "it has ended meanwhile"))

    async def serve(self, worker: Worker, first: Debuggee, stream: Stream) -> None:
        """Serve a debugger of `worker`, until one of the two ends leaves."""
        session = self._sessions.get(first.number)
        if first.number and session is not None and session.worker.id == worker.id and session.stream is None:
            session.stream = stream
            self._accept(worker, Debug(worker.who.role, worker.who.rank, first.number), stream)
        elif first.number or worker.id in self._waiting:
            await stream.close()
            return
        else:
            self._waiting[worker.id] = stream
            command = f"unirun debug {self._run_id} {worker.who.role}:{worker.who.rank}"
            text = f"waits at {first.where} for {command}, for {first.patience:.0f} s"
            self._tell(Notice(str(worker.who), text))
            self._say(worker, f"waits at {first.where} for unirun debug")
        problem = "its process has ended"
        try:
            while True:
                message = await stream.receive()
                if isinstance(message, DebugOutput):
                    self._tell(replace(message, number=self._number_of(stream)))
                elif isinstance(message, DebugEnded):
                    problem = ""
        except WireError:
            pass
        finally:
            if self._waiting.get(worker.id) is stream:
                del self._waiting[worker.id]
            if number := self._number_of(stream):
                del self._sessions[number]
                self._tell(DebugEnded(number, problem))
            if worker.id not in self._waiting:
                # Processes that it has started may be debugged, too.
                others = [s for s in self._sessions.values() if s.stream and s.worker.id == worker.id]
                self._say(worker, HELD if others else "")
            await stream.close()

    def _number_of(self, stream: Stream) -> int:
        return next((number for number, each in self._sessions.items() if each.stream is stream), 0)

    def _say(self, worker: Worker, text: str) -> None:
        self._apply(LinkMessage(worker.id, Listening({DEBUGGER: text})))

    def typed(self, word: DebugInput) -> None:
        """Pass on what the user of a debugger has typed. A user who leaves lets the worker go on."""
        session = self._sessions.get(word.number)
        if session is None:
            return
        if word.control == "line":
            if session.stream is not None:
                session.stream.send(word)
            return
        if word.control == "detach":
            del self._sessions[word.number]
            if session.stream is None:
                # It answers nobody when it comes to it.
                return
            session.stream.abort()
        # A program that runs does not look at its stream.
        _interrupt(session.worker, word.number)

    def led(self) -> None:
        """There is another master, and the commands of the one before are gone."""
        for number in list(self._sessions):
            self.typed(DebugInput(control="detach", number=number))


def _interrupt(worker: Worker, number: int) -> str:
    """Interrupt a worker. Returns the problem, empty if it was."""
    folder = Path(worker.request.logs, worker.request.folder)
    return (
        send_request(worker.pid, str(folder), f"debug={number}") if worker.pid is not None else "it is gone"
    )
