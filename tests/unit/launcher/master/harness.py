"""The harness of a master: the real one with its sockets and store, and the streams of those that speak with it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.unit.failover.context.faulty_store import FaultyStore
from tests.unit.failover.job import Job
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import ConnectionLost
from unirun.failover.context import ContextStore
from unirun.failover.crashes import Crash
from unirun.failover.step import step
from unirun.failover.takeover import resume
from unirun.launcher.master.shell import Core, Master
from unirun.observe.events import read_events
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import campaign
from unirun.values import WorkerId
from unirun.wire.address import TcpAddress, UnixAddress
from unirun.wire.aio import Stream, connect
from unirun.wire.certificates import make_tls
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import Token, new_token
from unirun.wire.messages import Appointed, Shutdown, StartRole
from unirun.wire.reports import (
    Message,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)
from unirun.wire.sockets import listen, listen_tcp, tcp_address

ELECTION_PREFIX = "jobs/job-1/"


class MasterHarness:
    """A master in this process, with its job's directory and store."""

    def __init__(self, folder: Path, model: Job | None = None, *, tcp: bool = False) -> None:
        self.store = FaultyStore()
        self.model = model or Job({"actor": 2})
        self.core = Core(resume, step)
        self.crashes: list[Crash] = []
        self.record_crash: Callable[[Crash], None] = self.crashes.append
        self.job = JobDir(folder / "job-1")
        self.job.path.mkdir()
        token = new_token()
        self.token: Token = token
        self.job.token.write_text(token.hex())
        self.job.token.chmod(0o600)
        self.tcp: TcpAddress | None = None
        self.listeners: list[socket.socket] = []
        if tcp:
            make_tls(self.job.path, token, "head")
            self.listeners.append(listen_tcp("127.0.0.1"))
            self.tcp = tcp_address(self.listeners[0], "head")
        term = campaign(self.store, ELECTION_PREFIX, UnixAddress("/x", "host"), 7, ttl=60)
        assert term is not None
        contexts = ContextStore(self.store, "job-1", term)
        contexts.create(self.model.state)
        self.path = folder / "master.sock"
        self.term = term
        self._parts = self.model.state, term, contexts

    def run(self, others: Callable[[], Awaitable[None]]) -> list[Crash]:
        """Run the master, and `others` beside it, until both are done. Returns errors of the master's own."""

        async def main() -> None:
            state, term, contexts = self._parts
            listeners = [listen(self.path), *self.listeners]
            master = Master(self.job, state, term, contexts, listeners, self.core, self.record_crash)
            self.master = master
            async with asyncio.timeout(WAIT_TIMEOUT), asyncio.TaskGroup() as group:
                group.create_task(self._lead(master))
                await others()

        asyncio.run(main())
        return self.crashes

    async def _lead(self, master: Master) -> None:
        await master.run({})
        # The process ends, and with it what is open.
        for task in list(master._tasks):
            task.cancel()

    async def greet(self, first: Message, elsewhere: Credentials | None = None) -> Stream:
        """A stream to the master, which has said which term it is in; by TCP from `elsewhere`."""
        if elsewhere is None:
            stream = await connect(UnixAddress.here(self.path), Credentials(self.token))
        else:
            assert self.tcp is not None
            stream = await connect(self.tcp, elsewhere)
        assert await stream.receive() == Appointed(1)
        stream.send(first)
        return stream

    async def agent(self, elsewhere: Credentials | None = None, *, followed: bool = False) -> Stream:
        """The agent of the job, whose workers run."""
        stream = await self.greet(replace(self.model.join("n0"), followed=followed), elsewhere)
        await receive_until(stream, StartRole)
        for rank in (0, 1):
            stream.send(WorkerStarted(WorkerId("actor", rank, 0), 100 + rank))
            stream.send(WorkerRunning(WorkerId("actor", rank, 0), 0))
        return stream

    def status(self) -> dict[str, Any]:
        """The status of the job, for a reader."""
        found: dict[str, Any] = json.loads(self.job.state.read_text())
        return found

    def events(self, kind: str) -> list[str]:
        """The lines of the log of events."""
        return [event.text for event in read_events(self.job.events) if event.kind == kind]


async def receive_until(stream: Stream, kind: type[Message]) -> list[Message]:
    """The messages that come, up to the first of a kind."""
    found = [await stream.receive()]
    while not isinstance(found[-1], kind):
        found.append(await stream.receive())
    return found


async def receive_all(stream: Stream) -> list[Message]:
    """The messages that come until the stream ends."""
    found: list[Message] = []
    try:
        while True:
            found.append(await stream.receive())
    except ConnectionLost:
        await stream.close()
    return found


def worker_exited(
    rank: int, code: int | None = 0, by: int | None = None, sent: int | None = None
) -> WorkerExited:
    return WorkerExited(WorkerId("actor", rank, 0), 1.0, code, by, "own" if sent is None else "order", sent)


async def end_well(agent: Stream) -> None:
    for rank in (0, 1):
        agent.send(worker_exited(rank))
    await receive_until(agent, Shutdown)
    await agent.close()
