"""The master's process: streams in, `step`, streams out. It knows how to do things, never whether to."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

from unirun.collocation import Placement
from unirun.errors import IllegalTransition, WireError
from unirun.master.events import (
    After,
    AgentLost,
    Command,
    Event,
    Finish,
    JoinTimedOut,
    KeepMetrics,
    OwnerLost,
    Record,
    ToAgent,
    ToWatchers,
)
from unirun.master.state import JobState, new_job, present, status_of
from unirun.master.step import step
from unirun.observe import EventLog, MetricsLog
from unirun.rendezvous import JobDir, ProcessWatch
from unirun.spec import JobSpec
from unirun.wire import BACKLOG, Stream, accept, load_token
from unirun.wire.messages import Attach, Ended, Join, Notice, Sample, Shutdown, Stop

PERSIST_DELAY = 0.02
"""Seconds in which changes of the state are gathered into one write."""

GOODBYE = 5.0
"""Seconds that agents and watchers have to close their streams at the end."""


class Master:
    """One master of one job. `run` returns when the job is over and everything is written."""

    def __init__(self, job: JobDir, spec: JobSpec, placement: Placement, listener: socket.socket) -> None:
        self._job = job
        self._listener = listener
        self._token = load_token(job.token)
        self._log = EventLog(job.events)
        self._metrics = MetricsLog(job.metrics)
        logs = str(job.logs.resolve())
        self._state: JobState = new_job(spec, placement, started=time.time(), logs=logs)
        self._agents: dict[str, Stream] = {}
        self._watchers: set[Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: Finish | None = None
        self._over = asyncio.Event()
        self._memory: dict[str, int] = {}
        self._cpu: dict[str, float] = {}
        self._dirty = False

    async def run(self, owner_pid: int | None, agent_pid: int) -> int:
        """Lead the job to its end. Returns the exit code.

        `owner_pid` is the CLI that the job must not outlive; `agent_pid` the agent of this host, whose end is
        noticed by its stream once it has joined, and by its process before.
        """
        loop = asyncio.get_running_loop()
        watches = [ProcessWatch(agent_pid, self._agent_gone)]
        if owner_pid is not None:
            watches.append(ProcessWatch(owner_pid, lambda: self._apply(OwnerLost())))
        loop.add_signal_handler(
            signal.SIGTERM, lambda: self._apply(Stop(signal.SIGTERM, "the master got SIGTERM"))
        )
        loop.call_later(self._state.spec.join_timeout, lambda: self._apply(JoinTimedOut()))
        self._persist()
        server = await asyncio.start_unix_server(self._serve, sock=self._listener, backlog=BACKLOG)
        try:
            await self._over.wait()
            await self._say_goodbye()
        finally:
            server.close()
            self._persist()
            self._log.close()
            self._metrics.close()
            for watch in watches:
                watch.close()
        return self._ended.code if self._ended else 1

    def _agent_gone(self) -> None:
        node = self._state.placement.nodes[0]
        if node not in self._agents:
            self._apply(AgentLost(node, f"it died before it joined; see {self._job.path / 'agent.log'}"))

    def _apply(self, event: Event) -> None:
        if isinstance(event, Sample):
            self._memory.update(event.memory)
            self._cpu.update(event.cpu)
        try:
            self._state, commands = step(self._state, event, time.time())
        except IllegalTransition as error:
            self._log.write("error", f"refused {event}: {error}")
            return
        for command in commands:
            self._carry_out(command)
        if not self._dirty:
            self._dirty = True
            asyncio.get_running_loop().call_later(PERSIST_DELAY, self._persist)

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
                self._ended = command
                self._over.set()

    def _persist(self) -> None:
        self._dirty = False
        status = status_of(self._state, self._memory, self._cpu)
        try:
            self._job.write_json(self._job.state.name, status.to_json())
        except OSError as error:
            # A full disk must not end a job that can go on; the next change tries again.
            self._log.write("error", f"the state cannot be written: {error}")

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
        if join.node in self._agents:
            self._log.write("refused", f"a second agent says that it is {join.node}")
            return
        self._agents[join.node] = stream
        reason = "its stream ended"
        try:
            self._apply(join)
            while True:
                message = await stream.receive()
                if isinstance(message, Event):
                    self._apply(message)
        except WireError as error:
            reason = str(error)
        finally:
            del self._agents[join.node]
            self._apply(AgentLost(join.node, reason))

    async def _follow_watcher(self, stream: Stream) -> None:
        self._watchers.add(stream)
        try:
            for message in present(self._state):
                stream.send(message)
            if self._ended is not None:
                stream.send(self._farewell(self._ended))
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

    def _farewell(self, finish: Finish) -> Ended:
        return Ended(finish.code, self._state.phase.value, finish.report, finish.error_file)

    async def _say_goodbye(self) -> None:
        """Tell everybody; leave when all streams are closed from the other side, or after `GOODBYE`."""
        self._persist()
        for agent in self._agents.values():
            agent.send(Shutdown())
        if self._ended is not None:
            for watcher in self._watchers:
                watcher.send(self._farewell(self._ended))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=GOODBYE)
