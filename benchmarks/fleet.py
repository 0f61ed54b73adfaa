"""Agents with simulated workers, in one process: ``python -m benchmarks.fleet JOB_DIR FILE``.

Each node has a stream of its own to the master. Its workers start, serve and form their group as soon as they are told,
with the messages that agents send for real workers. `FILE` is JSON: the nodes, the job's one role, and how many ranks
it has.

It takes one command a line: ``start``, ``worker RANK`` (that worker ends with code 1) or ``node NAME`` (that agent's
stream ends). When all ranks are up again it prints how many are; at ``bytes``, how many the master has sent to one
agent since the command before, at most.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import sys
import time
from pathlib import Path

from unirun.errors import RendezvousError
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.masters import Masters
from unirun.values import WorkerId
from unirun.wire.address import Address
from unirun.wire.aio import Stream, connect, frame_of
from unirun.wire.certificates import temporary
from unirun.wire.credentials import Credentials, load_credentials
from unirun.wire.frames import decode
from unirun.wire.messages import StartRole
from unirun.wire.reports import (
    FromWorker,
    GroupFormed,
    Join,
    Message,
    OpenStore,
    Serving,
    StoreOpened,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

QUIET = 1.0
"""Seconds without a byte after which all messages have arrived."""

PATIENCE = 600.0
"""Seconds until all ranks are up."""

RETRY_INTERVAL = 0.1
"""Seconds between two attempts to reach the master."""

_GENERATION = re.compile(rb'"generation":(\d+)')
_HEAD = 400
"""Bytes at the beginning of a view that hold the generation of its first role."""


async def _reach(address: Address, credentials: Credentials) -> Stream:
    """A stream to the master. As agents do, try again while it is refused: a master takes few handshakes at a time from
    an address that has not proved the token yet, and all agents here have one address."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return await connect(address, credentials, timeout=PATIENCE)
        except RendezvousError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(RETRY_INTERVAL)


class Agent:
    """One agent; `ranks` are the incarnations of its workers by rank."""

    def __init__(self, fleet: Fleet, node: str) -> None:
        self.fleet, self.node = fleet, node
        self.ranks: dict[int, int] = {}
        self.formed: dict[int, int] = {}
        self.received = 0
        self._writer: asyncio.StreamWriter | None = None
        self._buffer = bytearray()

    async def follow(self, address: Address, credentials: Credentials) -> None:
        """Join, and carry out the master's orders until the stream ends."""
        if credentials.tls is None:
            stream = await _reach(address, credentials)
        else:
            with temporary(credentials.token, self.node) as own:
                stream = await _reach(address, own)
        # Bytes are read as they come: to decode all messages would cost more than the master does.
        reader, self._writer = stream._bytes, stream._writer
        self.say(Join(self.node, 1, self.node, {self.fleet.role: f"{self.node}:29500"}))
        while data := await reader.read(1 << 20):
            self.received += len(data)
            self.fleet.last = time.monotonic()
            self._buffer += data
            self._take()

    def say(self, *messages: Message) -> None:
        """Send a message to the master."""
        assert self._writer is not None
        self._writer.write(b"".join(map(frame_of, messages)))

    def end(self) -> None:
        """End the agent and its workers."""
        assert self._writer is not None
        self.fleet.up.difference_update(self.ranks)
        self.ranks.clear()
        self._writer.close()

    def fail(self, rank: int) -> None:
        """Let a worker end by itself."""
        incarnation = self.ranks.pop(rank)
        self.fleet.up.discard(rank)
        self.say(WorkerExited(WorkerId(self.fleet.role, rank, incarnation), time.time(), 1, None))

    def _take(self) -> None:
        """Every complete frame that has arrived."""
        at = 0
        while len(self._buffer) >= at + 4:
            (length,) = struct.unpack_from(">I", self._buffer, at)
            if len(self._buffer) < at + 4 + length:
                break
            body = self._buffer[at + 4 : at + 4 + length]
            at += 4 + length
            if body.startswith(b'{"type":"View"'):
                # Workers read it; here only the generation counts that they shall form.
                self._form(body)
            else:
                self._obey(decode(json.loads(body)))
        del self._buffer[:at]

    def _form(self, view: bytearray) -> None:
        found = _GENERATION.search(view, 0, _HEAD)
        generation = int(found[1]) if found else 0
        behind = [rank for rank in self.ranks if self.formed[rank] < generation]
        for rank in behind:
            self.formed[rank] = generation
            self.say(FromWorker(WorkerId(self.fleet.role, rank, self.ranks[rank]), GroupFormed(generation)))

    def _obey(self, message: Message) -> None:
        match message:
            case StartRole(role, generation):
                for member in message.members:
                    who = role, member.rank, member.incarnation
                    address = {"socket": f"unix:/run/{self.node}/{role}.{member.rank}.{member.incarnation}"}
                    self.ranks[member.rank], self.formed[member.rank] = member.incarnation, generation
                    self.fleet.up.add(member.rank)
                    self.say(
                        WorkerStarted(WorkerId(*who), 1000 + member.rank),
                        WorkerRunning(WorkerId(*who), generation),
                        FromWorker(WorkerId(*who), GroupFormed(generation)),
                        FromWorker(WorkerId(*who), Serving(address, True)),
                    )
            case OpenStore(role, generation):
                self.say(StoreOpened(role, generation))


class Fleet:
    """All agents."""

    def __init__(self, nodes: list[str], role: str) -> None:
        self.role = role
        self.agents = {node: Agent(self, node) for node in nodes}
        self.up: set[int] = set()
        self.last = 0.0

    def command(self, line: str, address: Address, credentials: Credentials) -> None:
        """Carry out one command."""
        for agent in self.agents.values():
            agent.received = 0
        match line.split():
            case ["start"]:
                following = (agent.follow(address, credentials) for agent in self.agents.values())
                self._tasks = [asyncio.ensure_future(each) for each in following]
            case ["worker", rank]:
                next(a for a in self.agents.values() if int(rank) in a.ranks).fail(int(rank))
            case ["node", name]:
                self.agents.pop(name).end()

    async def quiet(self) -> None:
        """Wait until no message has arrived for a while."""
        while time.monotonic() < self.last + QUIET:
            await asyncio.sleep(0.05)

    async def settled(self, ranks: int) -> None:
        """Wait until all ranks are up, or until the deadline."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and len(self.up) < ranks:
            await asyncio.sleep(0.01)


async def main(folder: str, file: str) -> None:
    """Carry out the commands one after the other."""
    job, plan = JobDir(Path(folder)), json.loads(Path(file).read_text())
    credentials = load_credentials(job.path)
    masters = Masters(job)
    while (leader := masters.seat.leader) is None:
        await masters.news(1.0)
    masters.close()
    fleet = Fleet(plan["nodes"], plan["role"])
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "bytes":
            await fleet.quiet()
            answer = {"received": max(agent.received for agent in fleet.agents.values())}
        else:
            fleet.command(line, leader.address, credentials)
            await fleet.settled(plan["ranks"])
            answer = {"up": len(fleet.up)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
