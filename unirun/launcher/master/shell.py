"""The master's asyncio shell: it feeds events from streams to `step`, carries out the commands, and decides nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from unirun.errors import IllegalTransition, JobError, Refused, StoreError, WireError
from unirun.failover.context import ContextStore
from unirun.failover.crashes import STORY, Crash, crash_of
from unirun.failover.draft import (
    After,
    AgentLost,
    Arrived,
    Command,
    CutOff,
    Event,
    Finish,
    KeepMetrics,
    OwnerLost,
    Record,
    ToAgent,
    ToAgents,
    ToGuest,
    ToVisitors,
    ToWatchers,
    order_text,
)
from unirun.failover.nodes import made_up, next_life, trouble
from unirun.failover.offers import false_name, versions
from unirun.failover.restart_or_end import shutdown_order
from unirun.failover.state import JOB_ENDS, JobPhase, JobState, Verdict
from unirun.failover.status_views import farewell, present, status_of
from unirun.launcher.environment import carried, for_workers
from unirun.launcher.master.beats import OWNER_TIMEOUT, HeartbeatMonitor, unheard, wake_stopped
from unirun.launcher.master.hangs import HangWatch, StepsWatch, StragglerWatch
from unirun.launcher.master.notifying import Notifier
from unirun.launcher.master.visitors import Answer, Questions, Visitors, tell_all
from unirun.launcher.master.writer import StateWriter
from unirun.observe.events import EventLog, EventReader, LineLog, led_to
from unirun.observe.jobdir import JobDir, ProcessWatch
from unirun.observe.status import JobStatus, read_status, write_status
from unirun.rendezvous.election import Term
from unirun.rendezvous.endpoints import BIND_TIMEOUT
from unirun.values import Value, WorkerId
from unirun.wire.address import Address, TcpAddress
from unirun.wire.aio import Stream, StreamServer, frame_of
from unirun.wire.credentials import load_credentials
from unirun.wire.messages import (
    AgentTask,
    Appointed,
    AskStacks,
    Attach,
    Debug,
    DebugInput,
    Dismissed,
    Drain,
    Heartbeat,
    Inject,
    Offer,
    PassOn,
    Profile,
    Ready,
    Shutdown,
    Stop,
    Visit,
)
from unirun.wire.reporting import gave_up, report, report_error
from unirun.wire.reports import (
    Arrivals,
    FromWorker,
    Join,
    Knock,
    Late,
    MasterRequest,
    Message,
    Notice,
    Progress,
    Sample,
    StepsAgain,
    Unanswered,
)

# The file with the status of a job: written at most every so often, and by a thread, so that no event waits for it.

DELAY, MAX_DELAY = 0.02, 1.0
"""Seconds in which changes are gathered into one writing: ten times the processor time that it takes, within these."""


class StatusFile:
    """The status file of one master. `snapshot` returns a function that makes the current status, None when nothing is
    to be written any more; `failed` is called with the reason when a write fails."""

    def __init__(
        self,
        job: JobDir,
        snapshot: Callable[[], Callable[[], JobStatus] | None],
        failed: Callable[[str], object],
    ) -> None:
        self._job, self._snapshot, self._failed = job, snapshot, failed
        self._one_by_one = asyncio.Lock()
        self._news = asyncio.Event()
        self._took = 0.0
        self._written = 0

    def write_soon(self) -> None:
        """Write it in a moment: more may change until then."""
        self._news.set()

    async def write(self) -> None:
        """Write it now."""
        async with self._one_by_one:
            self._news.clear()
            status = self._snapshot()
            if status is not None and (problem := await asyncio.to_thread(self._replace, status)):
                # A full disk must not end a job that can go on; the next change tries again.
                self._failed(problem)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write it after each change, and for the last time at the end: an event that comes later, such as the end of a
        stream, writes nothing."""
        task = asyncio.ensure_future(self._keep())
        try:
            yield
        finally:
            async with self._one_by_one:
                # A thread that writes cannot be cancelled.
                task.cancel()
            await self.write()

    async def _keep(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(min(max(DELAY, 10 * self._took), MAX_DELAY))
            try:
                await self.write()
            except Exception as error:  # noqa: BLE001 - a status that cannot be made must not end a job
                report_error(error)

    def _replace(self, status: Callable[[], JobStatus]) -> str:
        """Replace the file, and return the reason why it could not be written; empty when it was, or was not to be."""
        began = time.thread_time()
        made, problem = status(), ""
        if self._another_writes(made.epoch):
            return ""
        try:
            write_status(self._job, made)
        except OSError as error:
            problem = f"the state cannot be written: {error}"
        # One of its files may have been replaced even so.
        self._written = _written_at(self._job.state)
        self._took = time.thread_time() - began
        return problem

    def _another_writes(self, epoch: int) -> bool:
        """Return True if another master has written the status since this one did: then the term `epoch` of this one
        is over, though it has not been told yet."""
        if self._written in (0, _written_at(self._job.state)):
            return False
        # Users touch files, for example where old ones are deleted.
        with suppress(JobError):
            return read_status(self._job).epoch > epoch
        return False


def _written_at(path: Path) -> int:
    """The time at which a file was written, in nanoseconds; 0 when it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# The admission of nodes to the running job: the master's side of their streams.


class NodeAdmission:
    """Answers nodes that make an offer, as the lobby does before the job has begun.

    `address` is where the master listens, by TCP in a job of several hosts. In a job on one host, made-up nodes may
    come. `state` gives the present state, and `apply` takes a step.
    """

    def __init__(
        self,
        job: JobDir,
        address: Address,
        state: Callable[[], JobState],
        apply: Callable[[Event], bool],
    ) -> None:
        self._job, self._address, self._state, self._apply = job, address, state, apply
        self._guests: dict[str, Stream] = {}

    async def hear(self, offer: Offer, stream: Stream) -> None:
        """Give a node its task. When it has bound its endpoints, it is a part of the job."""
        here = not isinstance(self._address, TcpAddress)
        if here and len(self._state().inventory.nodes) < 2:
            refusal: Dismissed | None = Dismissed(
                "the job runs on one host", "start it with --hosts, --nnodes or --inventory fake:nodes=2"
            )
        elif (refusal := false_name(offer, stream.peer)) is None:
            offer = made_up(self._state(), offer) if here else offer
            offer = replace(offer, node=next_life(self._state(), offer.node))
            refusal = trouble(self._state(), offer, versions(), self._guests)
        if refusal is not None:
            stream.send(refusal)
            return
        self._guests[offer.node] = stream
        try:
            # A node that goes away before it is ready has changed nothing.
            with suppress(WireError, TimeoutError):
                stream.send(self._task(offer.node))
                async with asyncio.timeout(BIND_TIMEOUT):
                    word = await stream.receive()
                if isinstance(word, Ready):
                    self._apply(Arrived(offer))
                    # The answer is sent when that is in the store; then the node ends the stream.
                    await stream.receive()
        finally:
            del self._guests[offer.node]

    def answer(self, node: str, message: Message) -> None:
        """Tell a node what was decided."""
        if node in self._guests:
            self._guests[node].send(message)

    def _task(self, node: str) -> AgentTask:
        state, job = self._state(), self._job
        head = self._address if isinstance(self._address, TcpAddress) else None
        # The environment of a master is that of the job, also when an agent has started it.
        env = carried(for_workers(os.environ))
        return AgentTask(
            state.spec,
            node,
            (*state.nodes, node),
            os.getcwd(),
            addr="" if head else state.spec.master_addr,
            uid=job.uid,
            head=head,
            store=job.shared_store,
            env=env,
        )


STREAM_CLOSE_TIMEOUT = 5.0
"""Seconds that agents and watchers have to close their streams at the end."""


class Core(Value, gc=True):
    """The functions that decide: how a job is taken over, and what follows from an event.

    `writes_first`: what is decided is in the store before it is done.
    """

    begin: Callable[[JobState, float], tuple[JobState, list[Command]]]
    step: Callable[[JobState, Event, float], tuple[JobState, list[Command]]]
    writes_first: bool = True


class Master:
    """One master in one term. `run` returns when the job is over and everything is written, or the term is.

    An error of its own ends the term too: what was not written is dropped, and agents tell the next master again.
    `record_crash` is called first; it writes the error to the store and may raise `StoreError`.
    """

    def __init__(
        self,
        job: JobDir,
        state: JobState,
        term: Term,
        contexts: ContextStore,
        listeners: Sequence[socket.socket],
        core: Core,
        record_crash: Callable[[Crash], None],
    ) -> None:
        self._job, self._listeners = job, listeners
        self._core, self._record_crash = core, record_crash
        self._credentials = load_credentials(job.path)
        before = EventReader(job.events).read() if state.spec.notify_command else []
        self._notifier = Notifier(state.spec.notify_command, state.spec.run_id, before)
        self._log = EventLog(job.events, term.epoch)
        self._metrics = LineLog(job.metrics)
        self._state = replace(state, epoch=term.epoch, recorded=0)
        self._unaware = set(state.agents) if state.phase in JOB_ENDS else set()
        self._writer = StateWriter(
            state, term, contexts, self._carry_out_all, self._store_changed, self._end_unwritten
        )
        self._writer.unwritten = not core.writes_first
        self._term = term
        self._agents: dict[str, Stream] = {}
        self._beats = HeartbeatMonitor(term, self._writer, self._agents, self._say, self._apply)
        self.hangs = HangWatch(
            self._agents, self._nodes_of, lambda role: self._state.role_spec(role), self._late
        )
        self.steps = StepsWatch(self._log)
        self._questions = Questions(self._agents, lambda: self._state, term.epoch)
        self._stragglers = StragglerWatch(lambda: self._state, self._straggles, self._apply)
        self._admission = NodeAdmission(job, term.address, lambda: self._state, self._apply)
        self._watchers: set[Stream] = set()
        self._visitors = Visitors(lambda: self._writer.certain, self._apply)
        self._owner: Stream | None = None
        self._owner_comes = state.owned
        """The owner has not attached yet."""
        self._attached: set[str] = set()
        """The nodes whose commands have attached."""
        self._owner_due: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waking: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._began = time.monotonic()
        self._error: Exception | None = None
        self._story: deque[Event] = deque(maxlen=STORY)
        self._shutdown: Shutdown | None = None
        self._told_trouble = False
        # The agents, and the addresses of their hosts.
        self._hosts: tuple[Mapping[str, Join], frozenset[str]] = ({}, frozenset())
        self._memory: dict[str, int] = {}
        self._cpu: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._gpus: dict[str, tuple[float, int]] = {}
        self._status_file = StatusFile(job, self._status, lambda problem: self._log.write("error", problem))

    async def run(self, agents: Mapping[str, int]) -> None:
        """Lead the job to its end, or until another master does.

        `agents` are the pids of those on this host that have not joined yet, by node: until then it is by its process
        that the end of one is noticed.
        """
        watches = [ProcessWatch(pid, partial(self._agent_gone, node)) for node, pid in agents.items()]
        loop = asyncio.get_running_loop()
        if self._state.owned:
            self._owner_due = loop.call_later(OWNER_TIMEOUT, self._owner_left, None)
        # A signal to all processes of a job is one request, although the command and agents on other hosts got it too.
        stop = Stop(signal.SIGTERM, "the master got SIGTERM", urgent=False)
        loop.add_signal_handler(signal.SIGTERM, self._apply, stop)
        if self._credentials.tls is not None:
            self._beats.begin()
        self._take(lambda: self._core.begin(self._state, time.time()))
        if self._state.phase in JOB_ENDS:
            self._over.set()
        await self._status_file.write()
        servers = [
            StreamServer(
                listener,
                self._credentials,
                self._serve,
                self._refused,
                known=self._is_host,
                proved=self._knocked,
            )
            for listener in self._listeners
        ]
        try:
            async with self._status_file.kept(), self._writer.working(self._over):
                await self._over.wait()
                if (error := self._error or self._writer.error) is not None:
                    await self._crash(error)
                elif not self._writer.deposed:
                    # While it still leads, so that peers that do not know of the end can find it.
                    await self._say_goodbye()
        finally:
            for server in servers:
                server.close()
            self._beats.close()
            if self._waking is not None:
                self._waking.cancel()
            await self._notifier.close()
            self._log.close()
            self._metrics.close()
            for watch in watches:
                watch.close()

    def _owner_left(self, stream: Stream | None) -> None:
        """The stream of the owner has ended, or (None) it should have attached by now. It may have attached again."""
        if self._owner is stream and self._state.phase not in JOB_ENDS:
            self._owner, self._owner_comes = None, False
            self._apply(OwnerLost())

    def _agent_gone(self, node: str) -> None:
        if node not in self._state.agents and node not in self._agents:
            self._apply(AgentLost(node, f"it died before it joined; see {self._job.agent_log(node)}"))

    def _apply(self, event: Event) -> bool:
        """Take a step for `event`. False when it was refused."""
        if self._error is not None:
            # The term is over. The recorded events end with the one that could not be handled.
            return True
        self._story.append(event)
        try:
            self._take(lambda: self._core.step(self._state, event, time.time()))
        except Refused as error:
            self._log.write("refused", f"{event}: {error}")
            kind = type(event.message if isinstance(event, FromWorker) else event).__name__
            self._tell_watchers(Notice("master", f"refused {kind}: {error}"))
            return False
        return True

    def _take(self, decide: Callable[[], tuple[JobState, list[Command]]]) -> None:
        """Take a step. Raises `Refused`; any other error ends the term: the event must not be lost."""
        try:
            self._state, commands = decide()
            self._writer.add(self._state, commands)
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - reported in `_crash`
            self._error = error
            self._writer.deposed = True
            self._over.set()
            return
        self._status_file.write_soon()
        if self._state.phase is JobPhase.STOPPING and self._waking is None:
            self._waking = asyncio.ensure_future(wake_stopped(self._agents_here, self._say))

    def _agents_here(self) -> dict[str, int]:
        """The pids of the agents on this host, by node."""
        here = (node for node, stream in self._agents.items() if not stream.remote)
        return {node: self._state.agents[node].pid for node in here if node in self._state.agents}

    async def _crash(self, error: Exception) -> None:
        """This master ends by an error of its own. Written before its streams end and the next one comes."""
        causes = led_to(self._job.events, error.cause) if isinstance(error, IllegalTransition) else ()
        crash = crash_of(error, self._term.epoch, time.monotonic() - self._began, self._story, causes)
        text = f"an error in the master of term {crash.epoch}: {crash.cause}: {crash.message}"
        report(f"unirun-master: {text}\n{crash.traceback}")
        self._log.write("master", text, traceback=crash.traceback, story=crash.story)
        self._tell_watchers(Notice("master", f"{text}; another master goes on"))
        try:
            await asyncio.to_thread(self._record_crash, crash)
        except StoreError as away:
            report(f"unirun-master: the error is not in the store: {away}")

    def _carry_out_all(self, commands: list[Command]) -> None:
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case ToAgent(node, message, cause):
                if node in self._agents:
                    self._agents[node].send(message)
                    if (told := order_text(node, message)) is not None:
                        text, *about = told
                        self._log.write("order", text, cause=cause, about=(*about, node))
            case ToAgents(nodes, message):
                frame = frame_of(message)
                for node in nodes:
                    if node in self._agents:
                        self._agents[node].send_frame(frame)
            case ToWatchers(message):
                self._tell_watchers(message)
            case ToVisitors(view):
                self._visitors.tell(view)
            case ToGuest(node, message):
                self._admission.answer(node, message)
            case Record(kind, text, number, cause, about, details):
                event = self._log.write(kind, text, id=number, cause=cause, about=about, **details)
                self._notifier.tell(event)
            case KeepMetrics(role, rank, when, values):
                self._metrics.append({"time": when, "role": role, "rank": rank, "values": values})
            case After(delay, event):
                self._beats.after(delay, event, self._apply)
            case Finish():
                self._over.set()

    def _say(self, node: str, text: str) -> None:
        """Report that a node is silent, or is not any more."""
        self._log.write("silence", text, about=(node,))
        self._tell_watchers(Notice(node, text))

    def _nodes_of(self, role: str) -> set[str]:
        """The nodes that have live ranks of `role`."""
        found = self._state.roles.get(role)
        return {worker.node for worker in found.workers if worker.live} if found is not None else set()

    def _late(self, role: str, text: str) -> None:
        """Report that ranks of a role make no progress."""
        self._log.write("late", text, about=(role,))
        self._tell_watchers(Notice(role, text))

    def _unanswered(self, report: Unanswered) -> None:
        """Hosts do not answer a node. Those that are silent for this master, too, are given up as a whole."""
        for node, join in self._state.agents.items():
            if join.addr in report.addresses and node != report.node and self._beats.hears(node):
                self._apply(CutOff(report.node, node))

    def _straggles(self, who: WorkerId, node: str, text: str) -> None:
        """Report a rank for which the others wait."""
        self._log.write("straggler", text, about=(f"{who.role}:{who.rank}", node))
        self._tell_watchers(Notice(f"{who.role}:{who.rank}", text))

    def _tell_watchers(self, message: Message) -> None:
        tell_all(self._watchers, message)

    def _end_unwritten(self, verdict: Verdict) -> None:
        """The end of the job cannot be written: agents end what they have, and tell the next master."""
        self._shutdown = shutdown_order(self._state, verdict)
        for agent in self._agents.values():
            agent.send(self._shutdown)

    def _store_changed(self) -> None:
        trouble = self._writer.trouble
        if bool(trouble) != self._told_trouble:
            self._told_trouble = bool(trouble)
            self._tell_watchers(Notice("store", trouble or "it is back"))
        self._status_file.write_soon()

    def _status(self) -> Callable[[], JobStatus] | None:
        """A function that makes the status as it is now, for another thread."""
        if self._writer.deposed:
            return None
        memory, cpu = dict(self._memory), dict(self._cpu)
        return partial(
            status_of,
            self._writer.certain,
            memory,
            cpu,
            epoch=self._term.epoch,
            trouble=self._writer.trouble,
            stragglers=self._stragglers.stragglers(),
            steps=dict(self._steps),
            gpus=dict(self._gpus),
        )

    def _is_host(self, addr: str) -> bool:
        """Return True if an agent of the job is at `addr`."""
        if self._hosts[0] is not self._state.agents:
            found = (join.addr for join in self._state.agents.values())
            self._hosts = self._state.agents, frozenset(found)
        return addr in self._hosts[1]

    def _knocked(self, stream: Stream) -> None:
        if stream.remote:
            self._beats.token_proved(stream.peer, stream.origin)

    def _refused(self, text: str, count: int) -> None:
        self._log.write("refused", text, count=count)

    async def _serve(self, stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
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
                case Attach(owner, node):
                    self._attached.add(node)
                    if owner:
                        self._owner, self._owner_comes = stream, False
                        if self._owner_due is not None:
                            self._owner_due.cancel()
                    await self._follow_watcher(stream)
                case Visit():
                    await self._visitors.follow(stream)
                case Stop():
                    self._apply(first)
                    await self._follow_watcher(stream)
                case Offer():
                    await self._admission.hear(first, stream)
                case _:
                    self._log.write("refused", f"a connection began with {type(first).__name__}")
        except WireError as error:
            self._log.write("refused", f"a connection ended early: {error}")

    async def _follow_agent(self, join: Join, stream: Stream) -> None:
        if stream.peer not in ("", join.node):
            self._log.write("refused", f"an agent on node {stream.peer} says that it is {join.node}")
            stream.send(Shutdown())
            return
        known = self._state.agents.get(join.node)
        if join.node in self._agents and (known is None or known.pid != join.pid):
            self._log.write("refused", f"a second agent says that it is {join.node}")
            stream.send(Shutdown())
            return
        if join.node in self._agents:
            # Its agent has heard nothing on the old stream, and gets on this one what it has missed.
            self._agents[join.node].abort()
            self._questions.lost(join.node)
        self._agents[join.node] = stream
        self._unaware.discard(join.node)
        reason, silent = "its stream ended", False
        # The node was given up, or the agent does not know yet that the job is over.
        too_late = self._state.phase in JOB_ENDS or self._state.given_up(join.node)
        try:
            if not too_late and not self._apply(join):
                # The node has another agent. If only the stream were closed, this one would connect again.
                del self._agents[join.node]
                too_late = True
            if not too_late:
                self._beats.joined()
            if too_late:
                stream.send(Shutdown())
            elif self._shutdown is not None:
                stream.send(self._shutdown)
            while True:
                message = await stream.receive()
                if self._agents.get(join.node) is not stream or too_late:
                    continue
                if isinstance(message, Heartbeat):
                    self._beats.answer(join.node, stream, message)
                elif isinstance(message, Sample):
                    self._memory.update(message.memory)
                    self._cpu.update(message.cpu)
                    self._steps.update(message.steps)
                    self._gpus.update(message.gpus)
                    self._status_file.write_soon()
                elif isinstance(message, Late):
                    self.hangs.late(message)
                elif isinstance(message, Progress):
                    self.hangs.answered(message)
                elif isinstance(message, Answer):
                    self._questions.answered(message)
                elif isinstance(message, StepsAgain):
                    self.steps.again(message)
                elif isinstance(message, Unanswered):
                    self._unanswered(message)
                elif isinstance(message, Knock):
                    self._beats.token_proved(message.node, message.origin)
                elif isinstance(message, FromWorker) and isinstance(message.message, Arrivals):
                    self._stragglers.arrived(message.worker, message.message)
                elif isinstance(message, FromWorker) and isinstance(message.message, MasterRequest):
                    self._writer.ask(message.worker, message.message, stream.send)
                elif isinstance(message, Event):
                    self._apply(message)
        except WireError as error:
            reason, silent = str(error), self._beats.watches(join.node) and unheard(error)
        finally:
            # The agent may have connected again before the end of this stream was seen.
            if self._agents.get(join.node) is stream:
                del self._agents[join.node]
                self._questions.lost(join.node)
                if not silent:
                    self._beats.forget(join.node)
                    self._apply(AgentLost(join.node, reason))

    async def _follow_watcher(self, stream: Stream) -> None:
        self._watchers.add(stream)
        try:
            for message in present(self._state):
                stream.send(message)
            if self._over.is_set() and (end := farewell(self._state)) is not None:
                stream.send(end)
            while True:
                message = await stream.receive()
                if isinstance(message, Stop | PassOn | Inject | Drain):
                    self._apply(message)
                elif isinstance(message, AskStacks):
                    self._questions.ask(message, stream)
                elif isinstance(message, Debug | Profile):
                    self._questions.ask_rank(message, stream)
                elif isinstance(message, DebugInput):
                    self._questions.typed(message, stream)
                elif isinstance(message, Notice):
                    self._log.write("notice", message.text)
                elif isinstance(message, Heartbeat):
                    self._beats.follow(stream)
        except WireError:
            return
        finally:
            self._watchers.discard(stream)
            self._questions.leave(stream)
            if self._state.owned:
                self._owner_left(stream)

    async def _say_goodbye(self) -> None:
        """Tell everybody; leave when all streams are closed from the other side, or after `STREAM_CLOSE_TIMEOUT`.

        A master that took over an ended job waits for agents that have not been told of the end. Each master waits for
        the command that owns the job, and for those of other nodes: a short job may end before they have attached.
        """
        await self._status_file.write()
        remote = {node for node, stream in self._agents.items() if stream.remote}
        followed = {node for node, join in self._state.agents.items() if node in remote and join.followed}
        for agent in self._agents.values():
            agent.send(Shutdown())
        if (end := farewell(self._state)) is not None:
            self._tell_watchers(end)
            self._visitors.tell(end)
        deadline = time.monotonic() + STREAM_CLOSE_TIMEOUT
        while (left := deadline - time.monotonic()) > 0 and (
            self._tasks or self._unaware or self._owner_comes or followed - self._attached
        ):
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=left)
            else:
                await asyncio.sleep(0.01)
        if self._tasks or self._unaware:
            gave_up("the ends of its streams", STREAM_CLOSE_TIMEOUT)
