"""The agent's process: I/O with the master, the spawners and the workers, around the pure core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from unirun.errors import Refused, RendezvousError, WireError
from unirun.failover.draft import addresses_of, welcome
from unirun.failover.silence import FENCE_TIMEOUT
from unirun.launcher import core, events
from unirun.launcher.contact import Contact, Witness, looked
from unirun.launcher.debugging import Debugging
from unirun.launcher.environment import FRESH, SpawnerKey, for_workers, mask_of
from unirun.launcher.events import AgentState, end_of, holdings, masked
from unirun.launcher.hangs import ProgressWatch
from unirun.launcher.logs import LogFollower
from unirun.launcher.monitoring import Devices, NodeHealth, sample_of, unanswered
from unirun.launcher.notes import kill_note, kills_so_far, remove_draft, tail
from unirun.launcher.orders import Orders, PortBook
from unirun.launcher.probes import Probing
from unirun.launcher.process import (
    BOOT,
    adopt_orphans,
    kill_children,
    kill_group,
    spare_descriptors,
    takes_signal,
)
from unirun.launcher.profiling import Profiling
from unirun.launcher.requests import send_request
from unirun.launcher.standby import following
from unirun.launcher.timers import TimerPipe, session_of
from unirun.launcher.warm.borrowing import Borrowed, Warm, borrow, choose
from unirun.observe.jobdir import JobDir, ProcessWatch, open_log
from unirun.rendezvous.endpoints import Endpoint
from unirun.rendezvous.store.protocol import SqliteAddress, parse_address
from unirun.spec.job import LogSpec
from unirun.values import WorkerId
from unirun.wire.aio import Stream, StreamServer, frame_of
from unirun.wire.credentials import load_credentials
from unirun.wire.messages import (
    AgentTask,
    AskProgress,
    AskStacks,
    Debug,
    DebugInput,
    EndHung,
    ExitAck,
    FollowSteps,
    Heartbeat,
    Hello,
    Inject,
    PassOn,
    Profile,
    Reserve,
    Shutdown,
    StartRole,
    StopWorkers,
    View,
)
from unirun.wire.reporting import gave_up, report, report_error
from unirun.wire.reports import (
    Borrow,
    Debuggee,
    Forked,
    FromWorker,
    Join,
    Knock,
    MasterReply,
    Message,
    Metrics,
    Notice,
    OpenStore,
    Placed,
    ProgressPage,
    Reaped,
    SpawnFailed,
    Unanswered,
    WorkerStarted,
)
from unirun.wire.sockets import listen

if TYPE_CHECKING:
    from unirun.launcher.forked import ForkedSpawner


# A bounded buffer of messages for the next master while there is none.

BYTES = 4 << 20
"""Maximum size of a backlog. The oldest frames are dropped first."""


class Backlog:
    """A FIFO of encoded messages that drops the oldest when it exceeds `limit` bytes."""

    def __init__(self, limit: int = BYTES) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._size = 0

    def add(self, frame: bytes) -> None:
        """Append a frame; one that exceeds the limit by itself is dropped."""
        self._frames.append(frame)
        self._size += len(frame)
        while self._size > self._limit:
            self._size -= len(self._frames.popleft())

    def take(self) -> Iterator[bytes]:
        """Remove and yield all frames in order."""
        while self._frames:
            frame = self._frames.popleft()
            self._size -= len(frame)
            yield frame


# ``--duplicate-stdout-filters`` and ``--duplicate-stderr-filters``: copy lines with one of the words to a file.


class LineFilters:
    """Copies matching lines of every worker, with their prefix, to ``<logs>/filtered_{stdout,stderr}.log``."""

    def __init__(self, job: JobDir, log: LogSpec) -> None:
        self._job = job
        words = {"stdout": log.duplicate_stdout_filters, "stderr": log.duplicate_stderr_filters}
        self._words = {name: tuple(w.encode() for w in found if w) for name, found in words.items()}
        self._files = {
            name: open_log(job.logs, Path(f"filtered_{name}.log"))
            for name, found in self._words.items()
            if found
        }
        self._follower = LogFollower() if self._files else None

    def follow(self, worker: WorkerId) -> None:
        """Follow the output of one worker, whose log files exist."""
        if self._follower is None:
            return
        logs = self._job.worker_logs(worker)
        for name, handle in self._files.items():
            if (before := worker.before) is not None:
                self._follower.release(self._job.worker_logs(before) / f"{name}.log")
            sink = _sink(handle, f"[{worker}] ".encode(), self._words[name])
            self._follower.follow(logs / f"{name}.log", sink)

    def finish(self) -> None:
        """Copy the remaining lines and close."""
        if self._follower is not None:
            self._follower.finish()
        for handle in self._files.values():
            os.close(handle)
        self._files = {}


def _sink(handle: int, prefix: bytes, words: tuple[bytes, ...]) -> Callable[[bytes], None]:
    def put(data: bytes) -> None:
        lines = [prefix + line for line in data.splitlines(keepends=True) if any(w in line for w in words)]
        # A full disk loses only copies of lines; the originals are in the worker's log.
        with contextlib.suppress(OSError):
            os.write(handle, b"".join(lines))

    return put


# The start of spawners, before the agent has begun, and also before it has a task.


def start_spawner(want: Borrow) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a spawner that is a child of this process. Returns the stream to it, and the process. Raises OSError."""
    ours, theirs = socket.socketpair()
    about = map(str, (theirs.fileno(), os.getpid(), want.descriptors, ",".join(map(str, want.inherited))))
    command = [sys.executable, "-u", BOOT, "spawner", *about, *want.modules]
    handles = [theirs.fileno(), *want.inherited]
    popen = subprocess.Popen(command, pass_fds=handles, env=want.env, stdin=subprocess.DEVNULL)
    theirs.close()
    return ours, popen


class EarlySpawners:
    """The spawners of an agent that has not begun: they import what its workers need, or most likely need.

    `sockets` will be those of the endpoints: a spawner can only serve a store on a socket that it has inherited.
    """

    def __init__(self, task: AgentTask | None = None) -> None:
        """`task` is what is known of the agent's task; None for nothing."""
        self.descriptors = spare_descriptors()
        self.sockets: dict[str, socket.socket] = {}
        self._started: dict[SpawnerKey, tuple[Borrow, socket.socket, subprocess.Popen[bytes]]] = {}
        if task is None:
            return
        family = socket.AF_INET6 if ":" in task.addr else socket.AF_INET
        self.sockets = {role.name: socket.socket(family) for role in task.spec.roles if not role.is_program}
        self.start(task, self.sockets.values())

    def start(self, task: AgentTask, sockets: Iterable[socket.socket], stdin: int | None = None) -> None:
        """Start the spawners that `task` needs and that are not there yet; `sockets` are those of its endpoints,
        `stdin` is as for `Agent`."""
        handles = handles_of(sockets)
        # An env file may be missing here, or no process be left: an agent that has begun tries again, and tells.
        with contextlib.suppress(RendezvousError, OSError):
            orders = Orders(JobDir(Path()), task, for_workers(os.environ), stdin)
            for key in orders.spawners:
                want = orders.spawner_request(key, self.descriptors, handles)
                there = key in self._started and self._started[key][0] == want
                if key != FRESH and not there and choose(want).warm is None:
                    self._end(key)
                    self._started[key] = (want, *start_spawner(want))

    def take(self, key: SpawnerKey, want: Borrow) -> tuple[socket.socket, subprocess.Popen[bytes]] | None:
        """The spawner with this key, if there is one that is as the task wants it."""
        if key not in self._started or self._started[key][0] != want:
            return None
        _, stream, popen = self._started.pop(key)
        return stream, popen

    def close(self) -> None:
        """End the spawners that the task has no use for."""
        for key in [*self._started]:
            self._end(key)

    def _end(self, key: SpawnerKey) -> None:
        if key in self._started:
            _, stream, popen = self._started.pop(key)
            popen.kill()
            popen.wait()
            stream.close()


def handles_of(sockets: Iterable[socket.socket]) -> list[int]:
    """The descriptors of `sockets`."""
    return [each.fileno() for each in sockets]


SPAWNER_EXIT_TIMEOUT = 2.0
"""Seconds for a spawner to exit after its stream was closed."""


class Agent:
    """The agent of one node. `run` returns when it was told to leave and all workers have ended."""

    def __init__(
        self,
        job: JobDir,
        task: AgentTask,
        endpoints: Mapping[str, Endpoint],
        lock: int,
        stdin: int | None = None,
        tcp: socket.socket | None = None,
        kept: frozenset[int] = frozenset(),
        early: EarlySpawners | None = None,
    ) -> None:
        """`endpoints` are the bound endpoints of the roles' rendezvous stores; `stdin` is a descriptor for the job's
        reader (`JobSpec.reader`); `tcp` is as for `Standby`; the processes `kept` are no workers'."""
        self._early = early or EarlySpawners()
        self._job, self._spec, self._kept = job, task.spec, kept
        self._orders = Orders(job, task, for_workers(os.environ), stdin)
        self._endpoints = endpoints
        self._state = AgentState(task.node, self._orders.in_place, self._orders.companions)
        self._master: Stream | None = None
        self._masters = following(job, lock, task, tcp)
        self._witness: Witness | None = None
        if tcp is not None and isinstance(parse_address(job.store_url), SqliteAddress):
            credentials = load_credentials(job.path)
            self._witness = Witness(
                tcp, credentials, self._tell, lambda: self._master is not None, self._refused
            )
        self._contact = Contact(job, task.node, self._masters.again, self._fenced)
        self._silent: list[Stream] = []
        self._unsent = Backlog()
        self._spawners: dict[
            SpawnerKey, tuple[Stream, subprocess.Popen[bytes] | Borrowed | ForkedSpawner]
        ] = {}
        self._links: dict[int, set[Stream]] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._children: set[subprocess.Popen[bytes] | ForkedSpawner] = set()
        self._left = asyncio.Event()
        # At the last sample and at the one before: a process may be killed just before a sample, and end after it.
        self._kills = (kills_so_far(),) * 2
        self._filters = LineFilters(job, task.spec.log)
        self._addr = task.addr
        self._followed = False
        self._mask = mask_of(task.spec, for_workers(os.environ))
        self._addresses: dict[str, Any] = {}
        self._ports = PortBook(task.addr, *task.spec.port_range)
        self._probing = Probing(self._probed, self._fail)
        self._forked: ForkedSpawner | None = None
        # Ranks of one host need no network.
        self._several = task.head is not None
        self._devices = Devices()
        self._health = NodeHealth(task.node, job.path, self._devices)
        self._progress = ProgressWatch(job, task.spec, lambda: self._state, self._tell, self._apply)
        self._profiling = Profiling(lambda: self._state, self._tell)
        self._debugging = Debugging(job.run_id, lambda: self._state, self._tell, self._apply)

    def fork_spawner(self) -> None:
        """Fork the spawner of programs if the job has some. Call it before the event loop runs."""
        if FRESH in self._orders.spawners:
            from unirun.launcher.forked import fork_spawner

            self._forked = fork_spawner(
                self._orders.spawner_request(FRESH, inherited=self._handles()).inherited
            )

    def _handles(self) -> list[int]:
        """The sockets of the endpoints, for stores."""
        return handles_of(endpoint.socket for endpoint in self._endpoints.values())

    async def run(self, owner_pid: int | None) -> None:
        """Serve one master after another, until `Shutdown` or the end of the process `owner_pid`."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            told = events.Abandon("the agent got a signal", self._spec.shutdown_timeout, signum)
            loop.add_signal_handler(signum, self._apply, told)
        self._warm_up()
        listener = listen(self._job.agent_socket(self._state.node))
        server = StreamServer(listener, load_credentials(self._job.path), self._serve_worker, self._refused)
        owner = None
        if owner_pid is not None:
            self._followed = True
            lost = events.Abandon("the unirun command is gone")
            owner = ProcessWatch(owner_pid, lambda: self._apply(lost))
        timers = (
            TimerPipe(self._job.timer_pipe(self._state.node), self._late) if self._orders.timers else None
        )
        try:
            self._background(self._follow_masters())
            self._background(self._sample())
            self._background(self._progress.watch())
            if self._witness is not None:
                self._background(self._witness.watch())
            await self._left.wait()
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            if owner is not None:
                owner.close()
            if timers is not None:
                timers.close()
            self._contact.close()
            self._probing.close()
            self._progress.close()
            self._devices.close()
            await self._end_spawners()
            self._ports.close()
            if self._master is not None:
                await self._master.close()
            kill_children(keep=self._masters.pids | self._kept)
            self._masters.close()
            self._filters.finish()

    def _background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Future[None]) -> None:
        """End the agent when one of its tasks fails."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop the workers and leave; leave at once when that fails too."""
        report_error(error)
        if self._state.leaving:
            self._left.set()
        else:
            self._apply(events.Abandon(f"the agent cannot go on: {error!r}"))

    def _fenced(self) -> None:
        """The node may have been given up: kill the workers now, and leave."""
        for worker in self._state.workers.values():
            if worker.pid is not None:
                kill_group(worker.pid, signal.SIGKILL)
        reason = f"no master has answered for {FENCE_TIMEOUT:g} s, and the job may go on without this node"
        report(f"unirun-agent: {reason}")
        if self._master is not None:
            self._master.abort()
        self._apply(events.Abandon(reason, grace=0.0))

    def _warm_up(self) -> None:
        """Start the spawners before the master connects, as importing torch dominates the start of a job."""
        self._state, commands = core.start_spawners(self._state, self._orders.spawners)
        for command in commands:
            self._carry_out(command)
        self._early.close()

    def _apply(self, event: events.Event) -> None:
        try:
            self._state, commands = core.step(self._state, event)
            for command in commands:
                self._carry_out(command)
        except Refused as error:
            self._tell(Notice(self._state.node, f"refused {type(event).__name__}: {error}"))
        except Exception as error:  # noqa: BLE001 - the event is lost, so the agent cannot continue
            if isinstance(event, events.Abandon):
                self._state = replace(self._state, leaving=True)
            self._fail(error)

    def _carry_out(self, command: events.Command) -> None:
        match command:
            case events.ToMaster(message):
                self._tell(message)
            case events.ToSpawner(key, message):
                if key in self._spawners:
                    self._wake(key)
                    self._spawners[key][0].send(message)
            case events.StartSpawner(key):
                self._start_spawner(key)
            case events.SignalSpawner(key, signum):
                if key in self._spawners:
                    self._spawners[key][1].send_signal(signum)
            case events.ToLink(number, message):
                for link in self._links.get(number, ()):
                    link.send(message)
            case events.StartProbing(number):
                self._probing.watch(self._state.workers[number])
            case events.StopProbing(number):
                self._probing.forget(number)
            case events.ToLinks(message):
                frame = frame_of(message)
                for link in (link for links in self._links.values() for link in links):
                    link.send_frame(frame)
                self._write_addresses()
            case events.CallLater(delay, event):
                asyncio.get_running_loop().call_later(delay, self._apply, event)
            case events.KillGroups(pids):
                for pid in pids:
                    kill_group(pid, signal.SIGKILL)
                kill_children(
                    keep=self._kept.union((each.pid for each in self._children), self._masters.pids)
                )
            case events.Signal(pid, signum, handled):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if not handled or takes_signal(pid, signum):
                        os.kill(pid, signum)
            case events.SendFault():
                self._send_fault(command)
            case events.Leave():
                self._left.set()

    def _send_fault(self, fault: events.SendFault) -> None:
        """Let a worker inject a fault into itself, if it is a Python worker that has come so far."""
        if problem := send_request(fault.pid, fault.folder, fault.text):
            self._tell(Notice(str(fault.worker), f"the fault {fault.text} cannot be injected: {problem}"))

    def _tell(self, message: Message) -> None:
        if isinstance(message, WorkerStarted):
            self._filters.follow(message.worker)
        if self._master is not None:
            self._master.send(message)
        elif isinstance(message, Notice | Knock) or (
            isinstance(message, FromWorker) and isinstance(message.message, Metrics)
        ):
            # A new master gets everything else with `Join`.
            self._unsent.add(frame_of(message))

    async def _follow_masters(self) -> None:
        """Follow one master after another; workers are not affected."""
        again: tuple[int, Stream] | None = None
        while True:
            epoch, stream = again or await self._masters.next(self._state.epoch, self._spec.join_timeout)
            for work in self._contact.begin(stream):
                self._background(work)
            self._apply(events.Led(epoch))
            before, self._master = self._master, stream
            workers, stores = holdings(self._state)
            endpoints = {role: str(endpoint) for role, endpoint in self._endpoints.items()}
            about = (self._state.node, os.getpid(), socket.gethostname(), endpoints)
            self._progress.led()
            self._debugging.led()
            stream.send(Join(*about, workers, stores, self._state.ending, self._addr, self._followed))
            # What the master before was told last it may never have read.
            for message in (*self._state.asks.values(), *self._health.told):
                stream.send(message)
            for frame in self._unsent.take():
                stream.send_frame(frame)
            if before is not None:
                self._background(before.close())
            again = await self._until_another_leads(epoch, stream)

    async def _until_another_leads(self, epoch: int, stream: Stream) -> tuple[int, Stream] | None:
        """Obey this master until its stream ends, or another one leads; or until it was silent on this stream and
        answers on another one, which is returned."""
        handling = asyncio.ensure_future(self._handle_messages(epoch, stream))
        looking = asyncio.ensure_future(self._masters.another(epoch))
        keeping = asyncio.ensure_future(self._contact.keep(epoch, stream))
        tasks = {handling, looking, keeping}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if handling.done() and not handling.cancelled():
            handling.result()
            self._master = None
            await stream.close()
        if keeping.done() and not keeping.cancelled():
            self._silent.append(stream)
            self._master = None
            return keeping.result()
        return None

    async def _handle_messages(self, epoch: int, master: Stream) -> None:
        try:
            while True:
                message = await master.receive()
                self._contact.heard()
                while self._silent:
                    # Not before: if it saw the end of that one first, it would give the node up.
                    self._silent.pop().abort()
                match message:
                    case Heartbeat():
                        self._contact.answered(message)
                    case StartRole() | OpenStore() if not (master.remote or await self._contact.leads(epoch)):
                        return
                    case StartRole():
                        self._apply(events.Order(epoch, self._orders.launch(message)))
                    case Reserve():
                        self._reserve(message)
                    case AskProgress():
                        self._background(self._progress.answer(message))
                    case AskStacks():
                        self._background(self._progress.stacks(message))
                    case Debug():
                        self._debugging.ask(message)
                    case DebugInput():
                        self._debugging.typed(message)
                    case Profile():
                        self._background(self._profiling.profile(message))
                    case FollowSteps():
                        self._background(self._progress.follow(message))
                    case EndHung():
                        self._progress.end(message)
                    case OpenStore(role):
                        handle = self._endpoints[role].socket.fileno()
                        self._apply(events.Order(epoch, self._orders.store(message, handle)))
                    case (
                        StopWorkers() | PassOn() | Inject() | View() | ExitAck() | MasterReply() | Shutdown()
                    ):
                        self._apply(events.Order(epoch, message))
        except WireError:
            return

    def _start_spawner(self, key: SpawnerKey) -> None:
        """Borrow the spawner from a warm process that fits, else start it; the first one of programs was forked."""
        if key == FRESH and (forked := self._forked) is not None:
            self._forked = None
            self._follow_child(key, forked.socket, forked)
            return
        want = self._orders.spawner_request(key, self._early.descriptors, self._handles())
        if (early := self._early.take(key, want)) is not None:
            self._follow_child(key, *early)
            return
        warm = None if key == FRESH else choose(want).warm
        if warm is not None:
            self._background(self._borrow(key, warm, want))
        else:
            self._start_cold(key, want)

    async def _borrow(self, key: SpawnerKey, warm: Warm, want: Borrow) -> None:
        borrowed = await asyncio.to_thread(borrow, warm, want)
        if isinstance(borrowed, Borrowed):
            await self._follow_spawner(key, borrowed.socket, borrowed)
        else:
            self._tell(Notice(self._state.node, f"{borrowed}; a spawner starts cold"))
            self._start_cold(key, want)

    def _start_cold(self, key: SpawnerKey, want: Borrow) -> None:
        try:
            self._follow_child(key, *start_spawner(want))
        except OSError as error:
            # The next order tries again.
            down = events.SpawnerDown(key, f"no spawner can be started: {error.strerror}", time.time())
            asyncio.get_running_loop().call_soon(self._apply, down)

    def _follow_child(
        self, key: SpawnerKey, stream: socket.socket, child: subprocess.Popen[bytes] | ForkedSpawner
    ) -> None:
        self._children.add(child)
        self._background(self._follow_spawner(key, stream, child))

    async def _follow_spawner(
        self,
        key: SpawnerKey,
        sock: socket.socket,
        popen: subprocess.Popen[bytes] | Borrowed | ForkedSpawner,
    ) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        stream = Stream(reader, writer)
        self._spawners[key] = stream, popen
        why = ""
        try:
            while True:
                message = await stream.receive()
                if isinstance(message, SpawnFailed) and message.id == 0:
                    why = message.reason
                    continue
                note = kill_note(self._state, message, self._kills[0])
                last = tail(self._state, message)
                taken = isinstance(message, Reaped) and self._has_lost_its_port(message.id)
                remove_draft(self._state, message)
                step = self._progress.step_of(message.id) if isinstance(message, Reaped) else -1
                texts = self._mask(note), self._mask(last)
                self._apply(events.FromSpawner(key, message, *texts, taken, step))
                if isinstance(message, Forked):
                    self._progress.open(message.id)
        except WireError:
            code = await asyncio.to_thread(popen.wait)
            if isinstance(popen, Borrowed):
                popen.close()
            else:
                self._children.discard(popen)
            del self._spawners[key]
            reason = f"its spawner {why or end_of(code)}; see {self._job.agent_log(self._state.node)}"
            self._apply(events.SpawnerDown(key, reason, time.time()))
        finally:
            await stream.close()

    def _wake(self, key: SpawnerKey) -> None:
        """Let a spawner go on that somebody has stopped (SIGSTOP): it has something to do."""
        self._spawners[key][1].send_signal(signal.SIGCONT)

    def _reserve(self, order: Reserve) -> None:
        try:
            self._tell(self._orders.place(self._ports, order))
        except RendezvousError as error:
            self._tell(Placed(self._state.node, order.role, order.ranks, (), str(error)))

    def _has_lost_its_port(self, number: int) -> bool:
        """Return True if another process listens on a port of a worker that has ended before it was ready."""
        worker = self._state.workers.get(number)
        if worker is None or worker.ready is None or worker.was_ready or worker.cause == "order":
            return False
        return self._ports.release_taken(worker.who.role, worker.who.rank)

    def _probed(self, number: int, ok: bool, why: str) -> None:
        self._apply(events.Probed(number, ok, self._mask(why), time.time()))

    def _write_addresses(self) -> None:
        """Replace the file with the addresses of roles, for programs, when it is another than before."""
        if self._state.view is None or not any(role.ports for role in self._spec.roles):
            return
        addresses = addresses_of(self._state.view, self._spec)
        if addresses == self._addresses:
            return
        try:
            self._job.write_json(self._job.addresses(self._state.node).name, addresses)
            self._addresses = addresses
        except OSError as error:
            # The disk is full, for example. The next view tries again.
            report(f"unirun-agent: the file of addresses cannot be written: {error.strerror}")

    def _late(self, pid: int, scopes: tuple[str, ...], signum: int) -> None:
        self._apply(events.TimerExpired(pid, session_of(pid), scopes, signum))

    def _refused(self, text: str, count: int) -> None:
        self._tell(Notice(self._state.node, f"at the agent {text} ({count} so far)", "refused"))

    async def _serve_worker(self, link: Stream) -> None:
        try:
            hello = await link.receive()
        except WireError as error:
            self._tell(Notice(self._state.node, f"a connection to the agent ended early: {error}"))
            await link.close()
            return
        who = hello.worker if isinstance(hello, Hello | Debuggee) else WorkerId("", 0, 0)
        worker = self._state.find(who.role, who.rank)
        if worker is None or worker.who != who:
            self._tell(Notice(self._state.node, "a process that is no worker of this agent said hello"))
            await link.close()
            return
        if isinstance(hello, Debuggee):
            await self._debugging.serve(worker, hello, link)
            return
        self._links.setdefault(worker.id, set()).add(link)
        try:
            if self._state.view is not None:
                link.send(welcome(self._state.view, self._spec))
            self._apply(events.LinkMessage(worker.id, hello))
            while True:
                message = await link.receive()
                if isinstance(message, ProgressPage):
                    self._progress.announced(worker.id, message.number)
                else:
                    self._apply(events.LinkMessage(worker.id, masked(message, self._mask)))
        except WireError:
            if worker.spawner in self._spawners:
                # It has to report the end of the worker.
                self._wake(worker.spawner)
            if self._links[worker.id] == {link}:
                # A fork of the worker has a link of its own.
                self._apply(events.LinkClosed(worker.id))
        finally:
            self._links[worker.id].discard(link)
            if not self._links[worker.id]:
                del self._links[worker.id]
            await link.close()

    async def _sample(self) -> None:
        """Report what the workers use every `sample_interval` seconds."""
        while True:
            await asyncio.sleep(self._spec.sample_interval)
            self._kills = (self._kills[1], kills_so_far())
            gpus = await looked(self._devices.usage) or {}
            sample = sample_of(self._state, self._progress.step_of, gpus)
            if sample.memory:
                self._tell(sample)
            if self._several and (addresses := await looked(unanswered)):
                self._tell(Unanswered(self._state.node, addresses))
            for sign in await looked(self._health.look) or ():
                self._tell(sign)

    async def _end_spawners(self) -> None:
        spawners = dict(self._spawners)
        for key, (stream, popen) in spawners.items():
            if not self._state.spawners.get(key):
                # Still importing: it has nothing to clean up, and would notice the end of its stream late.
                popen.kill()
            await stream.close()
        for _, popen in spawners.values():
            try:
                await asyncio.to_thread(popen.wait, SPAWNER_EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                gave_up("the end of a spawner", SPAWNER_EXIT_TIMEOUT)
                popen.kill()
                popen.wait()
