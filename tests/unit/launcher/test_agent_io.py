"""The I/O of an agent around its core: spawners, links, masters and probes come and go, as a reference counts them.

The agent's own code runs with real sockets in simulated time. The other ends are the test's: spawners, borrowed ones too,
that end at any time; workers with several links and strangers; masters that lead one after another, and times without
one.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import field
from msgspec.structs import replace

from tests.unit.conftest import descriptors
from tests.unit.launcher.agent import spawn
from tests.unit.launcher.nvml import LOST, Nvml, NVMLError
from tests.unit.simulated_loop import SimulatedLoop
from unirun.errors import WireError
from unirun.failover.draft import addresses_of
from unirun.launcher import agent as agent_module
from unirun.launcher import notes
from unirun.launcher.agent import Agent, EarlySpawners
from unirun.launcher.core import UNLINKED_TIMEOUT
from unirun.launcher.environment import SpawnerKey
from unirun.launcher.events import Launch, Order, Worker
from unirun.launcher.monitoring import Devices, NodeHealth
from unirun.launcher.notes import PERHAPS, Kills
from unirun.launcher.orders import PortBook
from unirun.launcher.warm.borrowing import Borrowed
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import create_job
from unirun.spec.job import Entry, JobSpec, Probe, RoleSpec
from unirun.values import RankAddress, WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.aio import Stream, StreamServer, connect
from unirun.wire.credentials import load_credentials
from unirun.wire.handshake import new_token
from unirun.wire.messages import AgentTask, Hello, Reserve, RoleView, View, WorkerView
from unirun.wire.reports import (
    Borrow,
    Forked,
    FromWorker,
    Message,
    Metrics,
    Notice,
    Reaped,
    Sick,
    Spawn,
    SpawnerReady,
)
from unirun.wire.sockets import listen

NO_PID = 1 << 23
"""More than the number of any process."""

SPEC = JobSpec(
    "job",
    "run-1",
    (RoleSpec("web", 3, Entry("program", "/bin/true"), ports=("http",)),),
    ("web",),
)


RANKS = st.integers(0, 1)


class Received:
    """The test's end of a stream, and all that has come on it and was not taken yet."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.ended = False
        self._news: list[Message] = []
        self.task = asyncio.ensure_future(self._receive())

    async def _receive(self) -> None:
        try:
            while True:
                message = await self.stream.receive()
                self._news.append(message)
        except WireError:
            self.ended = True
            self.stream.abort()

    def take(self) -> list[Message]:
        """The news, once."""
        news, self._news = self._news, []
        return news


async def pair() -> tuple[socket.socket, Received]:
    """A socket for the agent, and the test's end."""
    theirs, ours = socket.socketpair()
    return theirs, Received(Stream(*await asyncio.open_unix_connection(sock=ours)))


class FakeChild:
    """The process of a spawner, as a `Popen`: it has ended when its stream has."""

    pid = NO_PID

    def send_signal(self, signum: int) -> None:
        """It runs, or has ended."""

    def kill(self) -> None:
        """It has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code."""
        return 1


class FakeSpawners(EarlySpawners):
    """Gives the agent all of its spawners."""

    def __init__(self, start: Callable[[], socket.socket]) -> None:
        super().__init__()
        self._start_one = start

    def take(self, key: SpawnerKey, want: Borrow) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Start one more."""
        return self._start_one(), cast("subprocess.Popen[bytes]", FakeChild())


class FakeMasters:
    """Masters that the test appoints, see `Following`."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.appointed: asyncio.Queue[tuple[int, Stream]] = asyncio.Queue()
        self.latest = 0
        self.coming = asyncio.Event()

    async def next(self, known: int, patience: float) -> tuple[int, Stream]:
        """The next one that is appointed."""
        return await self.appointed.get()

    async def again(self, epoch: int, timeout: float) -> tuple[int, Stream]:
        """Masters are on this host, where streams do not fall silent."""
        raise AssertionError

    async def another(self, epoch: int) -> None:
        """Wait for the next one."""
        while self.latest <= epoch:
            self.coming.clear()
            await self.coming.wait()

    def close(self) -> None:
        """Nothing is watched."""


class FullDisk(JobDir):
    """The directory of a job on a disk that is full while something is in `full`."""

    full: list[str] = field(default_factory=list)

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        """Replace a file, if there is room."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_json(name, value)


def out_of_processes(_: Borrow) -> NoReturn:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def out_of_threads(*_: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


class AgentIo(RuleBasedStateMachine):
    """An agent with a role of programs on one spawner."""

    KEY: SpawnerKey = (("OMP_NUM_THREADS", "1"),)

    @initialize(borrowed=st.booleans())
    def begins(self, borrowed: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.folder = tempfile.TemporaryDirectory()
        self.patch.setenv("UNIRUN_HOME", self.folder.name)
        self.patch.setenv("UNIRUN_WARM", "0")
        self.killed: Counter[int] = Counter()
        self.patch.setattr(os, "killpg", lambda pid, signum: self.killed.update((pid,)))
        # It would kill what other tests of this process have started.
        self.patch.setattr(agent_module, "kill_children", lambda keep: None)
        # Processes that the kernel has killed for lack of memory, on this host.
        self.oom = 0
        for module in (agent_module, notes):
            self.patch.setattr(module, "kills_so_far", lambda: Kills(None, self.oom))
        self.patch.setattr(notes, "_log", lambda: None)
        self.loop = SimulatedLoop()
        job, self.lock = create_job("run-1", new_token())
        self.job = FullDisk(job.path)
        self.spawner: Received | None = None
        self.tells = -1
        self.master: Received | None = None
        self.epoch = 0
        self.numbers, self.incarnations = 0, [0, 0, 0]
        self.workers: dict[int, Worker] = {}
        """Those that were launched and have not ended."""
        self.pids: dict[int, int] = {}
        self.links: dict[int, list[Received]] = {}
        self.said: deque[Message] = deque()
        """Reports of workers that this master, or the next one, has to hear."""
        self.views = 0
        self.written: View | None = None
        self.loop.do(self._begin(borrowed))
        self.loop.passes()
        self.idle = len(descriptors()) - self._open()

    async def _begin(self, borrowed: bool) -> None:
        task = AgentTask(SPEC, "n0", ("n0",), "/", "")
        self.agent = Agent(self.job, task, {}, self.lock, early=FakeSpawners(self._started))
        self.agent._masters.close()
        self.masters = FakeMasters()
        self.agent._masters = self.masters
        self.server = StreamServer(
            listen(self.job.agent_socket("n0")),
            load_credentials(self.job.path),
            self.agent._serve_worker,
            self.agent._refused,
        )
        self.agent._background(self.agent._follow_masters())
        self.agent._background(self.agent._sample())
        if borrowed:
            told, self.tells = os.pipe()
            sock, self.spawner = await pair()
            lent = Borrowed(sock, os.pidfd_open(os.getpid()), told)
            self.agent._background(self.agent._follow_spawner(self.KEY, sock, lent))
        else:
            self.agent._start_spawner(self.KEY)
        self.agent._state = replace(self.agent._state, spawners={self.KEY: False})

    def _started(self) -> socket.socket:
        theirs, ours = socket.socketpair()

        async def follow() -> None:
            self.spawner = Received(Stream(*await asyncio.open_unix_connection(sock=ours)))

        self.loop.create_task(follow())
        return theirs

    # What happens.

    @rule(rank=RANKS, probed=st.booleans(), forked=st.sampled_from((True, True, False)))
    def a_worker_is_launched(self, rank: int, probed: bool, forked: bool) -> None:
        if all(worker.who.rank != rank for worker in self.workers.values()):
            self.numbers += 1
            who = WorkerId("web", rank, self.incarnations[rank])
            self.incarnations[rank] += 1
            request = spawn(self.numbers, "web", rank, "program")
            ready = Probe("file", (f"{self.folder.name}/ready-{self.numbers}",)) if probed else None
            worker = Worker(self.numbers, who, self.KEY, request, ready=ready, ready_timeout=1e6)
            self.workers[self.numbers] = worker
            self.loop.call_soon(self.agent._apply, Order(self.epoch, Launch((worker,))))
            self.loop.passes()
        if forked:
            self.workers_are_forked()

    @rule()
    def workers_are_forked(self) -> None:
        assert self.spawner is not None
        self.spawner.stream.send(SpawnerReady(0.0))
        self.loop.passes()
        for message in self.spawner.take():
            if isinstance(message, Spawn) and message.id in self.workers:
                self.pids[message.id] = NO_PID + message.id
                self.spawner.stream.send(Forked(message.id, NO_PID + message.id))
        self.loop.passes()

    @rule(rank=RANKS)
    def a_worker_ends(self, rank: int) -> None:
        number = self._alive(rank)
        if number is not None and self.spawner is not None:
            del self.workers[number], self.pids[number]
            self.spawner.stream.send(Reaped(number, 0.0, 1, None))
            self.loop.passes()

    @rule(rank=RANKS, late=st.booleans())
    def the_kernel_kills_a_worker_for_lack_of_memory(self, rank: int, late: bool) -> None:
        """A sample may be taken between the kill and the news of it."""
        number = self._alive(rank)
        if number is not None and self.spawner is not None:
            self.oom += 1
            if late:
                self.loop.passes(SPEC.sample_interval)
            who = self.workers.pop(number).who
            del self.pids[number]
            self.spawner.stream.send(Reaped(number, 0.0, None, 9))
            self.loop.passes()
            end = self.agent._state.ended[who].exit
            assert end is not None
            assert end.note == PERHAPS
            # It is no reason for the end of another one after some samples.
            self.loop.passes(3 * SPEC.sample_interval)

    @rule(rank=RANKS, ready=st.booleans(), taken=st.booleans())
    def a_worker_ends_and_its_port_may_be_taken(self, rank: int, ready: bool, taken: bool) -> None:
        """Then it gets another port, if it was to be asked whether it is ready, and was not yet."""
        self.a_worker_is_launched(rank, probed=True, forked=True)
        if ready:
            self.time_passes(rank, 0.1)
        number = self._alive(rank)
        if number is None or self.spawner is None:
            return
        worker = self.agent._state.workers[number]
        self.agent._reserve(Reserve("web", (rank,)))
        (port,) = self.agent._ports.place("web", rank, 1).ports
        with socket.create_server(("127.0.0.1", port)) if taken else nullcontext():
            del self.workers[number], self.pids[number]
            self.spawner.stream.send(Reaped(number, 0.0, None, 9))
            self.loop.passes()
        end = self.agent._state.ended[worker.who].exit
        assert end is not None
        assert end.taken == (taken and worker.ready is not None and not worker.was_ready)
        assert not end.note
        self.agent._ports.close()
        self.agent._ports = PortBook("127.0.0.1", *SPEC.port_range)

    @rule()
    def a_spawner_ends(self) -> None:
        """Its workers are killed with it. The next launch starts another one."""
        assert self.spawner is not None
        self._lets_go()
        killed, self.killed = set(self.pids.values()), Counter()
        self.workers, self.pids = {}, {}
        self.spawner.stream.abort()
        self.spawner = None
        self.loop.passes()
        assert set(self.killed) == killed, "workers outlive their spawner"
        self.a_worker_is_launched(0, probed=False, forked=False)
        assert self.spawner is not None, "no other spawner was started"

    @rule()
    def no_spawner_can_be_started_for_a_while(self) -> None:
        """There are too many processes, for example. The worker has not started, and the next one does."""
        assert self.spawner is not None
        self._lets_go()
        self.workers, self.pids = {}, {}
        self.spawner.stream.abort()
        self.loop.passes()
        self.spawner, self.killed = None, Counter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeSpawners, "take", lambda *_: None)
            patch.setattr(agent_module, "start_spawner", out_of_processes)
            self.a_worker_is_launched(0, probed=False, forked=False)
        assert not self.agent._state.leaving
        assert [each.exit.code for each in self.agent._state.ended.values() if each.exit][-1] == 1
        self.workers = {}
        self.a_worker_is_launched(0, probed=False, forked=False)

    @rule()
    def no_thread_can_be_started_for_a_while(self) -> None:
        """A worker has used up all processes of its user, for example. Samples are left out."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.loop, "run_in_executor", out_of_threads)
            self.loop.passes(SPEC.sample_interval)
        assert not self.agent._state.leaving

    def _lets_go(self) -> None:
        """The guard of a borrowed spawner tells its exit code."""
        if self.tells >= 0:
            os.write(self.tells, b"1")
            os.close(self.tells)
            self.tells = -1

    @rule(rank=RANKS, count=st.integers(1, 2))
    def a_worker_opens_links(self, rank: int, count: int) -> None:
        self.a_worker_is_launched(rank, probed=False, forked=True)
        number = self._alive(rank)
        assert number is not None
        for _ in range(count):
            link = self.loop.do(self._link(self.workers[number].who))
            self.links.setdefault(number, []).append(link)
            self.loop.passes()
            link.take()  # the welcome

    @rule(rank=RANKS, speaks=st.booleans())
    def a_stranger_opens_a_link(self, rank: int, speaks: bool) -> None:
        """It has the token, and was a worker, or will be one; or it goes without a word."""
        who = WorkerId("web", rank, self.incarnations[rank] + 1) if speaks else None
        if speaks and self.incarnations[rank] > 1:
            who = WorkerId("web", rank, self.incarnations[rank] - 2)
        link = self.loop.do(self._link(who))
        if not speaks:
            link.stream.abort()
        self.loop.passes()
        assert link.ended, "a process that is no worker is served"
        self.loop.do(link.stream.close())

    async def _link(self, who: WorkerId | None) -> Received:
        address = UnixAddress.here(self.job.agent_socket("n0"))
        link = Received(await connect(address, load_credentials(self.job.path)))
        if who is not None:
            link.stream.send(Hello(who))
        return link

    @rule(rank=RANKS, which=st.integers(0, 3))
    def a_link_ends(self, rank: int, which: int) -> None:
        """Also of a worker that has ended."""
        for number in sorted(self.links)[rank : rank + 1]:
            links = self.links[number]
            links.pop(which % len(links)).stream.abort()
            if not links:
                del self.links[number]
            self.loop.passes()

    @precondition(lambda self: self.master is not None)
    @rule(rank=RANKS)
    def one_of_several_links_ends(self, rank: int) -> None:
        """That of a fork of the worker, for example. The worker has not closed its own."""
        assert self.master is not None
        self.a_worker_opens_links(rank, 2)
        number = self._alive(rank)
        assert number is not None
        self.loop.passes(2 * UNLINKED_TIMEOUT)
        self._hear()
        self.links[number].pop().stream.abort()
        self.loop.passes(2 * UNLINKED_TIMEOUT)
        who = str(self.workers[number].who)
        assert not [each for each in self.master.take() if isinstance(each, Notice) and each.source == who]

    @rule(rank=RANKS, which=st.integers(0, 3))
    def a_worker_reports(self, rank: int, which: int) -> None:
        number = self._alive(rank)
        if number is not None and (links := self.links.get(number)):
            told = Metrics({"step": float(len(self.said))}, float(self.numbers))
            links[which % len(links)].stream.send(told)
            self.said.append(FromWorker(self.workers[number].who, told))
            self.loop.passes()

    @rule()
    def a_master_leads(self) -> None:
        """Another one, or the first."""
        self.epoch += 1
        before = self.master
        self.master = self.loop.do(self._appoint())
        self.loop.passes()
        assert before is None or before.ended, "the stream to the master before stays open"

    async def _appoint(self) -> Received:
        theirs, ours = await pair()
        stream = Stream(*await asyncio.open_unix_connection(sock=theirs))
        self.masters.appointed.put_nowait((self.epoch, stream))
        self.masters.latest = self.epoch
        self.masters.coming.set()
        return ours

    @precondition(lambda self: self.master is not None)
    @rule(rank=RANKS, which=st.integers(0, 3))
    def a_master_dies(self, rank: int, which: int) -> None:
        """The report of a worker at that time is for the next one."""
        assert self.master is not None
        self._hear()
        self.master.stream.abort()
        self.master = None
        self.loop.passes()
        self.a_worker_reports(rank, which)

    @rule(port=st.integers(1, 2), full=st.booleans())
    def a_view_comes(self, port: int, full: bool) -> None:
        """Each link gets it once, and programs find its addresses, unless the disk is full."""
        if self.master is None:
            self.a_master_leads()
        assert self.master is not None
        self.job.full[:] = ["yes"] if full else []
        self.views += 1
        place = RankAddress("127.0.0.1", (port,))
        worker = WorkerView(0, 0, "running", {}, place)
        view = View((RoleView("web", 1, 0, "", "running", (worker,)),), self.views)
        self.master.stream.send(view)
        for links in self.links.values():
            for link in links:
                link.take()
        self.loop.passes()
        for links in self.links.values():
            assert all(link.take() == [view] for link in links), "a view did not come once to each link"
        if not full:
            self.written = view

    @rule(rank=RANKS, seconds=st.sampled_from((0.1, 40.0)))
    def time_passes(self, rank: int, seconds: float) -> None:
        """Also until a program is ready."""
        number = self._alive(rank)
        if number is not None:
            Path(self.folder.name, f"ready-{number}").touch()
        self.loop.passes(seconds)

    # What holds.

    def _open(self) -> int:
        """The number of descriptors: both ends of each stream, and of a borrowed spawner two handles and our end."""
        streams = sum(map(len, self.links.values())) + (self.spawner is not None) + (self.master is not None)
        return 2 * streams + (3 if self.tells >= 0 else 0)

    def _alive(self, rank: int) -> int | None:
        return next((n for n in self.pids if self.workers[n].who.rank == rank), None)

    def _hear(self) -> None:
        """All that workers have reported comes to a master, once and in order."""
        assert self.master is not None
        heard = [each for each in self.master.take() if isinstance(each, FromWorker)]
        heard = [each for each in heard if isinstance(each.message, Metrics)]
        assert heard == [*self.said]
        self.said.clear()

    @invariant()
    def what_is_open_is_known(self) -> None:
        if not hasattr(self, "idle"):
            return
        agent = self.agent
        assert agent._state.workers.keys() == self.workers.keys()
        assert {number: len(links) for number, links in agent._links.items()} == {
            number: len(links) for number, links in self.links.items()
        }
        asked = [task for task in asyncio.all_tasks(self.loop) if "_ask" in str(task.get_coro())]
        assert len(asked) <= sum(self.workers[n].ready is not None for n in self.pids), (
            "a program that has ended is asked whether it is ready"
        )
        if self.master is not None:
            self._hear()
        left = len(descriptors()) - self.idle - self._open()
        assert left == 0, f"{left} descriptors are left open"
        if self.written is not None:
            assert self.job.read_json(self.job.addresses("n0").name) == addresses_of(self.written, SPEC)

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.loop.call_soon(self.server.close)
            self._lets_go()
            ends = [self.spawner, self.master, *(link for links in self.links.values() for link in links)]
            for end in filter(None, ends):
                end.stream.abort()
            self.loop.passes()
            self.loop.end()
            os.close(self.lock)
        if hasattr(self, "patch"):
            self.patch.undo()
            self.folder.cleanup()


@pytest.fixture(scope="module", autouse=True)
def without_garbage() -> None:
    """Garbage of other tests would close descriptors while they are counted."""
    gc.collect()


TestAgentIo = AgentIo.TestCase
TestAgentIo.settings = settings(stateful_step_count=40)


def test_a_sign_that_a_node_is_sick_is_told_to_the_next_master_too() -> None:
    """The one before may have died with it unread."""
    io, nvml = AgentIo(), Nvml(0)
    io.begins(borrowed=False)
    io.agent._health = NodeHealth("n0", io.job.path, Devices(nvml))
    io.loop.passes(SPEC.sample_interval)
    nvml.cards[0] = NVMLError(LOST)
    found = []
    for seconds in (SPEC.sample_interval, 0.0):
        io.a_master_leads()
        io.loop.passes(seconds)
        assert io.master is not None
        found.append([each for each in io.master.take() if isinstance(each, Sick)])
    assert found == [[Sick("n0", "device", "GPU 0 is lost")]] * 2
    io.teardown()
