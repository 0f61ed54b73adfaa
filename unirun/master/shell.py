"""The master's process: streams in, `step`, streams out. It knows how to do things, never whether to."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from unirun.errors import IllegalTransition, WireError
from unirun.master.events import (
    After,
    AgentLost,
    Command,
    Event,
    Finish,
    KeepMetrics,
    OwnerLost,
    Record,
    ToAgent,
    ToWatchers,
)
from unirun.master.keeper import Keeper
from unirun.master.resuming import resume
from unirun.master.state import JOB_ENDS, JobState
from unirun.master.step import step
from unirun.master.telling import farewell, present, status_of
from unirun.master.writing import Writer
from unirun.observe import EventLog, MetricsLog
from unirun.rendezvous import JobDir, ProcessWatch
from unirun.rendezvous.election import Term
from unirun.wire import load_token
from unirun.wire.aio import BACKLOG, Stream, accept, frame_of
from unirun.wire.asking import WorkerAsk
from unirun.wire.messages import Appointed, Attach, Shutdown, Stop, View
from unirun.wire.reports import Join, Notice, Sample

PERSIST_DELAY = 0.02
"""Seconds in which changes are gathered into one writing of the status; more when that takes long."""

GOODBYE = 5.0
"""Seconds that agents and watchers have to close their streams at the end."""


class Master:
    """One master in one term. `run` returns when the job is over and everything is written, or the term is."""

    def __init__(
        self, job: JobDir, state: JobState, term: Term, keeper: Keeper, listener: socket.socket
    ) -> None:
        self._job, self._listener = job, listener
        self._token = load_token(job.token)
        self._log = EventLog(job.events)
        self._metrics = MetricsLog(job.metrics)
        self._state = state
        self._unaware = set(state.agents) if state.phase in JOB_ENDS else set()
        self._writer = Writer(state, term, keeper, self._carry_out_all, self._persist_soon)
        self._term = term
        self._agents: dict[str, Stream] = {}
        self._watchers: set[Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._memory: dict[str, int] = {}
        self._cpu: dict[str, float] = {}
        self._dirty = False
        self._persist_took = 0.0
        self._persisted = 0

    async def run(self, agents: Mapping[str, int]) -> None:
        """Lead the job to its end, or until another master does.

        `agents` are the pids of those on this host that have not joined yet, by node: until then it is by its process
        that the end of one is noticed.
        """
        watches = self._watches(agents)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGTERM, lambda: self._apply(Stop(signal.SIGTERM, "the master got SIGTERM"))
        )
        self._state, commands = resume(self._state, time.time())
        self._writer.add(self._state, commands)
        if self._state.phase in JOB_ENDS:
            self._over.set()
        self._persist()
        server = await asyncio.start_unix_server(self._serve, sock=self._listener, backlog=BACKLOG)
        try:
            async with self._writer.working(self._over):
                await self._over.wait()
                if not self._writer.deposed:
                    # As long as it leads: who does not know of the end has to find it.
                    await self._say_goodbye()
        finally:
            server.close()
            if not self._writer.deposed:
                self._persist()
            self._log.close()
            self._metrics.close()
            for watch in watches:
                watch.close()

    def _watches(self, agents: Mapping[str, int]) -> list[ProcessWatch]:
        watches = []
        owner = self._state.owner
        if owner is not None and owner.host == socket.gethostname():
            watches.append(ProcessWatch(owner.pid, lambda: self._apply(OwnerLost()), owner.started))
        watches += [ProcessWatch(pid, partial(self._agent_gone, node)) for node, pid in agents.items()]
        return watches

    def _agent_gone(self, node: str) -> None:
        if node not in self._state.agents and node not in self._agents:
            self._apply(AgentLost(node, f"it died before it joined; see {self._job.agent_log(node)}"))

    def _apply(self, event: Event) -> None:
        if isinstance(event, Sample):
            self._memory.update(event.memory)
            self._cpu.update(event.cpu)
        try:
            self._state, commands = step(self._state, event, time.time())
        except IllegalTransition as error:
            self._log.write("error", f"refused {event}: {error}")
            return
        except Exception:  # noqa: BLE001 - whatever it is, an event that is lost here nobody would make up for
            traceback.print_exc()
            self._writer.deposed = True
            self._over.set()
            return
        self._writer.add(self._state, commands)
        self._persist_soon()

    def _carry_out_all(self, commands: list[Command]) -> None:
        told: View | None = None
        frame = b""
        for command in commands:
            if isinstance(command, ToAgent) and isinstance(command.message, View):
                # Every agent gets it, and it is the longest there is.
                if command.message is not told:
                    told, frame = command.message, frame_of(command.message)
                if command.node in self._agents:
                    self._agents[command.node].send_frame(frame)
            else:
                self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case ToAgent(node, message):
                if node in self._agents:
                    self._agents[node].send(message)
            case ToWatchers(message):
                for watcher in self._watchers:
                    watcher.send(message)
            case Record(kind, text):
                self._log.write(kind, text)
            case KeepMetrics(role, rank, when, values):
                self._metrics.write(role, rank, when, values)
            case After(delay, event):
                asyncio.get_running_loop().call_later(delay, self._apply, event)
            case Finish():
                self._over.set()

    def _persist_soon(self) -> None:
        if not self._dirty:
            self._dirty = True
            delay = max(PERSIST_DELAY, 10 * self._persist_took)
            asyncio.get_running_loop().call_later(delay, self._persist)

    def _persist(self) -> None:
        self._dirty = False
        if self._writer.deposed or self._another_writes():
            return
        began = time.monotonic()
        status = status_of(
            self._writer.certain,
            self._memory,
            self._cpu,
            epoch=self._term.epoch,
            trouble=self._writer.trouble,
        )
        try:
            self._job.write_json(self._job.state.name, status.to_json())
        except OSError as error:
            # A full disk must not end a job that can go on; the next change tries again.
            self._log.write("error", f"the state cannot be written: {error}")
        self._persisted = _written_at(self._job.state)
        self._persist_took = time.monotonic() - began

    def _another_writes(self) -> bool:
        """Whether another master has told how the job stands since this one did: it does not know yet, but its own
        term is over."""
        return self._persisted != 0 and _written_at(self._job.state) != self._persisted

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            stream = await accept(reader, writer, self._token)
        except WireError as error:
            self._log.write("refused", f"a connection was refused: {error}")
            return
        try:
            stream.send(Appointed(self._term.epoch))
            await self._converse(stream)
        finally:
            await stream.close()

    async def _converse(self, stream: Stream) -> None:
        try:
            first = await stream.receive()
            match first:
                case Join():
                    await self._follow_agent(first, stream)
                case Attach():
                    await self._follow_watcher(stream)
                case Stop():
                    self._apply(first)
                    await self._follow_watcher(stream)
                case _:
                    self._log.write("refused", f"a connection began with {type(first).__name__}")
        except WireError as error:
            self._log.write("refused", f"a connection ended early: {error}")

    async def _follow_agent(self, join: Join, stream: Stream) -> None:
        known = self._state.agents.get(join.node)
        if join.node in self._agents and (known is None or known.pid != join.pid):
            self._log.write("refused", f"a second agent says that it is {join.node}")
            return
        self._agents[join.node] = stream
        self._unaware.discard(join.node)
        reason = "its stream ended"
        # It was given up, or does not know yet that the job is over.
        too_late = self._state.phase in JOB_ENDS or self._state.given_up(join.node)
        try:
            if too_late:
                stream.send(Shutdown())
            else:
                self._apply(join)
            while True:
                message = await stream.receive()
                if too_late:
                    continue
                if isinstance(message, Event):
                    self._apply(message)
                elif isinstance(message, WorkerAsk):
                    self._writer.ask(message, stream.send)
        except WireError as error:
            reason = str(error)
        finally:
            # It may have come back on another stream before the end of this one was seen.
            if self._agents.get(join.node) is stream:
                del self._agents[join.node]
                self._apply(AgentLost(join.node, reason))

    async def _follow_watcher(self, stream: Stream) -> None:
        self._watchers.add(stream)
        try:
            for message in present(self._state):
                stream.send(message)
            if self._over.is_set():
                self._send_farewell(stream)
            while True:
                message = await stream.receive()
                if isinstance(message, Stop):
                    self._apply(message)
                elif isinstance(message, Notice):
                    self._log.write("notice", message.text)
        except WireError:
            return
        finally:
            self._watchers.discard(stream)

    def _send_farewell(self, watcher: Stream) -> None:
        end = farewell(self._state)
        if end is not None:
            watcher.send(end)

    async def _say_goodbye(self) -> None:
        """Tell everybody; leave when all streams are closed from the other side, or after `GOODBYE`.

        A master that has found the job ended waits for those who do not know it yet.
        """
        self._persist()
        for agent in self._agents.values():
            agent.send(Shutdown())
        for watcher in self._watchers:
            self._send_farewell(watcher)
        deadline = time.monotonic() + GOODBYE
        while (left := deadline - time.monotonic()) > 0 and (self._tasks or self._unaware):
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=left)
            else:
                await asyncio.sleep(0.01)


def _written_at(path: Path) -> int:
    """When a file was written, in nanoseconds; 0 when it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
