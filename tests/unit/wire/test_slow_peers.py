"""Streams whose peers trickle, stall, never read, and half-close, against a reference, in simulated time.

No wait of a stream lasts longer than its time-out, whatever the peer does; what has come whole is received, once and in
order; and in the end nothing is left open.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.effort import examples
from tests.sim.fake_clock import FakeClock
from tests.unit.conftest import descriptors
from tests.unit.simulated_loop import SimulatedLoop
from tests.unit.wire.endpoints import Endpoint, encoded
from tests.unit.wire.slow_peers import SlowClient
from unirun.errors import ConnectionLost, RendezvousError, UnirunError
from unirun.wire import blocking, sockets
from unirun.wire.address import Address, TcpAddress, UnixAddress
from unirun.wire.aio import Stream, StreamServer, connect
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import (
    CONNECTION_QUEUE_TIMEOUT,
    HANDSHAKE_TIMEOUT,
    HELLO_SIZE,
    KNOWN,
    PROOF_SIZE,
    Handshake,
    new_token,
)
from unirun.wire.reports import Message, Notice

LARGE = 1 << 22
"""Bytes that no socket holds."""


LATEST = st.integers(0, 2)
"""A client or a stream, from the latest backwards."""


class Served:
    """The server's end of one stream, and what it has received."""

    def __init__(self, stream: Stream, loop: SimulatedLoop) -> None:
        self.stream, self._loop = stream, loop
        self.received: list[Message] = []
        self.ended = False
        self.closing: asyncio.Task[None] | None = None
        self.since = 0.0

    async def serve(self) -> None:
        """Receive until the peer is gone."""
        try:
            while True:
                self.received.append(await self.stream.receive())
        except ConnectionLost:
            self.ended = True

    def close(self) -> None:
        """Begin to close."""
        if self.closing is None:
            self.since = self._loop.time()
            self.closing = self._loop.create_task(self.stream.close())


class SlowClients(RuleBasedStateMachine):
    """A server, and clients of all kinds."""

    kind = "unix"

    @initialize()
    def begins(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.loop = SimulatedLoop()
        self.before = descriptors()
        self.clients: list[tuple[SlowClient, float]] = []
        self.crowd: list[SlowClient] = []
        self.served: list[Served] = []
        self.number = 0
        self.endpoint = Endpoint(self.kind, Path(self.folder.name))
        self.server = self.loop.do(self._server())

    async def _server(self) -> StreamServer:
        async def serve(stream: Stream) -> None:
            self.served.append(Served(stream, asyncio.get_running_loop()))  # type: ignore[arg-type]
            await self.served[-1].serve()

        return StreamServer(
            self.endpoint.listen(), self.endpoint.credentials, serve, lambda text, count: None
        )

    def _client(self, number: int) -> SlowClient | None:
        return self.clients[-1 - number % len(self.clients)][0] if self.clients else None

    def _stream(self, number: int) -> Served | None:
        return self.served[-1 - number % len(self.served)] if self.served else None

    @rule(honest=st.sampled_from((True, True, False)), steps=st.sampled_from((3, 0, 1)))
    def connects(self, honest: bool, steps: int) -> None:
        """Another client; it goes on with the handshake, maybe to its end."""
        self.clients.append((SlowClient(self.endpoint, honest=honest), self.loop.time()))
        self.loop.passes()
        for _ in range(steps):
            self.goes_on(0)

    @rule(number=LATEST)
    def goes_on(self, number: int) -> None:
        """A client reads, and sends all that it can."""
        if (client := self._client(number)) is not None:
            client.listen()
            client.trickle(1 << 16)
            self.loop.passes()

    @rule(number=LATEST, size=st.sampled_from((1, 3, 40, 400)))
    def trickles(self, number: int, size: int) -> None:
        if (client := self._client(number)) is not None:
            client.trickle(size)
            self.loop.passes()

    @rule(number=LATEST, count=st.integers(1, 3), size=st.sampled_from((1 << 16, 1, 50)))
    def writes(self, number: int, count: int, size: int) -> None:
        """A client begins messages, and sends so much of them."""
        if (client := self._client(number)) is not None:
            for _ in range(count):
                self.number += 1
                client.write(Notice("client", str(self.number)))
            client.trickle(size)
            self.loop.passes()

    @rule(number=LATEST)
    def reads(self, number: int) -> None:
        if (client := self._client(number)) is not None:
            client.listen()
            self.loop.passes()

    @rule(number=LATEST, half=st.booleans())
    def leaves(self, number: int, half: bool) -> None:
        if (client := self._client(number)) is not None:
            client.half_close() if half else client.close()
            self.loop.passes()

    @rule(number=LATEST, size=st.sampled_from((LARGE, 10)), closes=st.booleans())
    def talks(self, number: int, size: int, closes: bool) -> None:
        """The server sends a message, which may be its last one."""
        if (served := self._stream(number)) is not None and served.closing is None:
            served.stream.send(Notice("server", "x" * size))
            if closes:
                served.close()
            self.loop.passes()

    @rule(really=st.sampled_from((False, False, False, True)))
    def comes_in_a_crowd(self, really: bool) -> None:
        """More connections than may begin at once, and none says anything."""
        if really and not self.crowd:
            self.crowd = [SlowClient(self.endpoint) for _ in range(KNOWN + 2)]
            self.loop.passes()

    @rule(seconds=st.sampled_from((0.3, 3.0, HANDSHAKE_TIMEOUT + 0.1)))
    def time_passes(self, seconds: float) -> None:
        self.loop.passes(seconds)

    @invariant()
    def no_wait_is_longer_than_its_time_out(self) -> None:
        for client, since in getattr(self, "clients", ()):
            limit = HANDSHAKE_TIMEOUT + (CONNECTION_QUEUE_TIMEOUT if self.crowd else 0.0)
            if not client.proved and not client.closed and self.loop.time() - since > limit + 0.05:
                client.listen()
                assert client.ended, "a connection may take any time to prove the token"
        for served in getattr(self, "served", ()):
            if served.closing is not None and self.loop.time() - served.since > HANDSHAKE_TIMEOUT + 0.05:
                assert served.closing.done(), "a peer that does not read keeps a stream from being closed"

    @invariant()
    def what_came_whole_was_received(self) -> None:
        if not hasattr(self, "clients"):
            return
        # Whose text a stream has received is known by the numbers.
        sent = {message: client for client, _ in self.clients for message in client.whole()}
        of: dict[int, SlowClient] = {}
        for served in self.served:
            for message in served.received:
                assert of.setdefault(id(served), sent[message]) is sent[message]
            if (client := of.get(id(served))) is not None:
                there = client.whole()
                assert served.received == there[: len(served.received)]
                assert served.closing is not None or client.ended or len(served.received) == len(there)
        proved = [client for client, _ in self.clients if client.proved]
        assert len(self.served) == len(proved) or self.crowd

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        # Some are in their handshakes then, and others wait for theirs.
        self.comes_in_a_crowd(True)
        self.loop.call_soon(self.server.close)
        self.loop.passes()
        for served in self.served:
            served.close()
        self.loop.passes(HANDSHAKE_TIMEOUT + 0.1)
        left = [*asyncio.all_tasks(self.loop), *self.server._known, *self.server._entering]
        for client in (*self.crowd, *(client for client, _ in self.clients)):
            client.close()
        open_still = descriptors().items() - self.before.items()
        self.loop.end()
        self.folder.cleanup()
        del self.server, self.served
        assert not self.loop.errors, "the event loop logged an error that is handled"
        assert not left, "a task goes on, or is kept, after its server and its streams were closed"
        assert not open_still, "descriptors are left open"


# Over unix sockets only: what is sent over TCP may take the kernel of a busy machine a moment.
TestSlowClients = SlowClients.TestCase
TestSlowClients.settings = settings(stateful_step_count=40)


# Those that connect, to a server that is slow.

Pieces = list[tuple[float, int]]
"""Pauses, and how many bytes come after each of them; the last one is repeated. No sum of them is a deadline."""

PIECES = st.lists(
    st.tuples(st.sampled_from((0.0, 0.047, 0.41, 3.1)), st.sampled_from((1, 7, 40, 1000))),
    min_size=1,
    max_size=4,
)
MESSAGES = tuple(Notice("server", str(number)) for number in range(3))
TIMEOUT, PATIENCE = 2.0, 1.0
"""Seconds for a connection, and for each message."""


class SlowServer:
    """The bytes that a server sends, each with its time after the connection was made. It `ends` after so many bytes, or
    goes on to be silent."""

    def __init__(self, pieces: Pieces, ends: int | None) -> None:
        self.handshake = Handshake(TOKEN)
        self.pieces, self.ends = pieces, ends
        self.hello = self.handshake.hello()
        self.rest = b"".join(map(encoded, MESSAGES))
        size = HELLO_SIZE + PROOF_SIZE + len(self.rest)
        self.total = size if ends is None else min(ends, size)

    def chunks(self) -> Iterator[tuple[float, int, int]]:
        """The pauses, and what comes after each of them, by its first and its last byte."""
        at, pieces = 0, iter(self.pieces)
        pause, size = 0.0, 1
        while at < self.total:
            pause, size = next(pieces, (pause, size))
            # What is said before the answer has come is the hello alone.
            end = min(at + size, self.total, HELLO_SIZE if at < HELLO_SIZE else self.total)
            yield pause, at, end
            at = end

    def comes(self, count: int) -> float | None:
        """The time of the `count`-th byte; None if it never comes."""
        now = 0.0
        for pause, _, end in self.chunks():
            now += pause
            if end >= count:
                return now
        return None

    def over(self) -> float | None:
        """The time of the end of the stream; None if it goes on."""
        return None if self.ends is None else (self.comes(self.total) or 0.0)

    def expected(self) -> list[tuple[str, float]]:
        """The outcome of a connection and of each receive, and the time of it since the connection was begun."""
        met, over = self.comes(HELLO_SIZE + PROOF_SIZE), self.over()
        if met is None or met > TIMEOUT:
            ended = over is not None and over <= TIMEOUT
            return [("lost" if ended else "late", over if over is not None and ended else TIMEOUT)]
        found, now, size = [("ok", met)], met, HELLO_SIZE + PROOF_SIZE
        for message in MESSAGES:
            size += len(encoded(message))
            here = self.comes(size)
            if here is not None and here <= now + PATIENCE:
                now = max(now, here)
                found.append(("ok", now))
            elif here is None and over is not None and over <= now + PATIENCE:
                return [*found, ("lost", max(now, over))]
            else:
                return [*found, ("late", now + PATIENCE)]
        return found


TOKEN = new_token()
HOST, INSECURE = TcpAddress("10.0.0.1", 1, "n0"), Credentials(TOKEN, "n1", Path("/run/tls"), insecure=True)


def outcome(error: BaseException) -> str:
    """The word of `expected` for what was raised."""
    return "lost" if isinstance(error, ConnectionLost) else "late"


class World:
    """A host on which nothing happens but what a server sends: its clock, and its sockets."""

    def __init__(self, server: SlowServer, full_for: float = 0.0, *, tls: bool = False) -> None:
        self.clock, self.server, self.full_for = FakeClock(), server, full_for
        self._kind = SlowTlsSocket if tls else SlowSocket
        self.began = self.clock.now
        self.open: set[SlowSocket] = set()

    def until(self, ready: Callable[[], Any], deadline: float | None) -> bool:
        """Let time pass until something is ready, or the deadline is there."""
        due = [deadline is not None]
        if deadline is not None:
            self.clock.after(max(deadline - self.clock.now, 0.0), due.clear)
        while not ready():
            if deadline is not None and not due:
                return False
            assert self.clock.run_next(), "a wait has no deadline"
        return True

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`."""
        self.until(lambda: False, self.clock.now + seconds)

    def create_connection(self, place: tuple[str, int], timeout: float) -> SlowSocket:
        """As `socket.create_connection`: packets to a host that is away are lost."""
        self.sleep(min(self.full_for, timeout))
        if self.full_for > timeout:
            raise TimeoutError("timed out")
        sock = self._kind(self)
        sock.connect("")
        return sock

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Let the code under test use this host's sockets and its time."""
        clock = SimpleNamespace(monotonic=lambda: self.clock.now, sleep=self.sleep)
        made = SimpleNamespace(
            socket=lambda *_: self._kind(self),
            AF_UNIX=socket.AF_UNIX,
            create_connection=self.create_connection,
        )
        patch.setattr(blocking, "socket", made)
        patch.setattr(blocking, "select", SimpleNamespace(POLLIN=1, poll=lambda: SlowPoll(self)))
        patch.setattr(blocking, "time", clock)
        patch.setattr(sockets, "time", clock)


class SlowSocket:
    """The client's end, as `socket.socket`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._timeout: float | None = None
        self._coming: tuple[float, int, int] | None = None
        self.inbox = bytearray()
        self.over = False
        world.open.add(self)

    def setblocking(self, flag: bool) -> None:
        """Only `connect` does not block."""
        assert not flag

    def setsockopt(self, *option: int) -> None:
        """Options are for the kernel."""

    def settimeout(self, seconds: float | None) -> None:
        """The most that a call may wait."""
        assert seconds is None or seconds > 0, "it would not wait at all"
        self._timeout = seconds

    def _deadline(self) -> float | None:
        return None if self._timeout is None else self._world.clock.now + self._timeout

    def connect(self, place: str) -> None:
        """Be connected, unless the listener's queue is full."""
        if self._world.clock.now < self._world.began + self._world.full_for:
            raise BlockingIOError("the queue is full")
        self._data, self._chunks = self._world.server.hello, self._world.server.chunks()
        self._plan_next()

    def _plan_next(self) -> None:
        """The server's next piece comes after its pause; it may have to wait for the answer before."""
        self._coming = next(self._chunks, None)
        if self._coming is None:
            self.over = self._world.server.ends is not None
        elif self._coming[1] < len(self._data):
            self._world.clock.after(self._coming[0], self._arrives)

    def _arrives(self) -> None:
        assert self._coming is not None
        self.inbox += self._data[self._coming[1] : self._coming[2]]
        self._plan_next()

    def sendall(self, data: bytes) -> None:
        """Take it at once; it is the answer."""
        server = self._world.server
        self._data += server.handshake.proof(data) + server.rest
        if self._coming is not None:
            self._world.clock.after(self._coming[0], self._arrives)

    def recv(self, size: int) -> bytes:
        """Return what has come."""
        if not self._world.until(lambda: self.inbox or self.over, self._deadline()):
            raise TimeoutError("timed out")
        data = bytes(self.inbox[:size])
        del self.inbox[:size]
        return data

    def close(self) -> None:
        """Be gone."""
        self._world.open.discard(self)


class SlowTlsSocket(SlowSocket):
    """The same over TLS: bytes come in records, which are read as a whole; no poll sees what is left of one."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._record = bytearray()

    def recv(self, size: int) -> bytes:
        """Return what is left of a record, or else of the next one."""
        self._record += b"" if self._record else super().recv(1 << 14)
        data = bytes(self._record[:size])
        del self._record[:size]
        return data

    def pending(self) -> int:
        """The bytes that are left of the record."""
        return len(self._record)


class SlowPoll:
    """As `select.poll`, of one socket."""

    def __init__(self, world: World) -> None:
        self._world = world

    def register(self, sock: SlowSocket, events: int) -> None:
        """The socket."""
        self._sock = sock

    def poll(self, milliseconds: float | None) -> list[Any]:
        """Wait until it can be read."""
        deadline = None if milliseconds is None else self._world.clock.now + milliseconds / 1000
        return [1] if self._world.until(lambda: self._sock.inbox or self._sock.over, deadline) else []


def check(found: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [word for word, _ in found] == [word for word, _ in expected]
    for (_, at), (_, due) in zip(found, expected, strict=True):
        assert at == pytest.approx(due, abs=0.01)


SCRIPTS = given(PIECES, st.none() | st.integers(0, HELLO_SIZE + PROOF_SIZE + 120))


@pytest.mark.parametrize("kind", ["unix", "tls", "insecure"])
@SCRIPTS
@examples(200)
def test_a_blocking_stream_keeps_its_deadlines_with_a_slow_server(
    kind: str, pieces: Pieces, ends: int | None
) -> None:
    server = SlowServer(pieces, ends)
    world = World(server, tls=kind == "tls")
    address = HOST if kind == "insecure" else UnixAddress.here("/run/s")
    with pytest.MonkeyPatch.context() as patch:
        world.replace(patch)
        found: list[tuple[str, float]] = []

        def note(word: str) -> None:
            found.append((word, world.clock.now - world.began))

        try:
            stream = BlockingStream.connect(address, INSECURE, timeout=TIMEOUT)
            note("ok")
            for message in MESSAGES:
                assert stream.receive(PATIENCE) == message
                note("ok")
        except UnirunError as error:
            note(outcome(error))
            if len(found) == 1:
                assert not world.open, "the socket of a handshake that has failed stays open"
    check(found, server.expected())


@SCRIPTS
@examples(200)
def test_a_stream_keeps_its_deadlines_with_a_slow_server(pieces: Pieces, ends: int | None) -> None:
    server = SlowServer(pieces, ends)
    loop = SimulatedLoop()
    before = descriptors()
    found: list[tuple[str, float]] = []
    began = loop.time()

    def note(word: str) -> None:
        found.append((word, loop.time() - began))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = server.hello
        try:
            for pause, begin, end in server.chunks():
                if begin == HELLO_SIZE:
                    data += server.handshake.proof(await reader.readexactly(HELLO_SIZE + 32)) + server.rest
                await asyncio.sleep(pause)
                writer.write(data[begin:end])
            if server.ends is None:
                await reader.read()
        except (OSError, EOFError):
            pass
        writer.close()

    async def play(path: str) -> None:
        listening = await asyncio.start_unix_server(serve, path)
        stream = None
        try:
            stream = await connect(UnixAddress.here(path), Credentials(TOKEN), timeout=TIMEOUT)
            note("ok")
            for message in MESSAGES:
                async with asyncio.timeout(PATIENCE):
                    assert await stream.receive() == message
                note("ok")
        except (UnirunError, TimeoutError) as error:
            note(outcome(error))
        if stream is not None:
            await stream.close()
        listening.close()

    with tempfile.TemporaryDirectory() as folder:
        loop.do(play(os.path.join(folder, "s")))
    loop.passes(100.0)
    left = descriptors().items() - before.items()
    loop.end()
    assert not left, "descriptors are left open"
    check(found, server.expected())


@given(st.floats(0.0, 5.0), st.sampled_from((UnixAddress.here("/run/s"), HOST)))
@examples(40)
def test_a_listener_that_is_full_is_asked_until_the_deadline(full_for: float, address: Address) -> None:
    world = World(SlowServer([(0.0, 1000)], None), full_for)
    with pytest.MonkeyPatch.context() as patch:
        world.replace(patch)
        try:
            BlockingStream.connect(address, INSECURE, timeout=TIMEOUT)
            assert full_for <= TIMEOUT + 0.01
        except RendezvousError:
            assert full_for >= TIMEOUT
            assert not world.open
        assert world.clock.now - world.began == pytest.approx(min(full_for, TIMEOUT), abs=0.01)


@pytest.mark.parametrize("full_for", [0.0, 1.0, 5.0])
def test_a_loop_asks_a_listener_that_is_full_until_the_deadline(tmp_path: Path, full_for: float) -> None:
    """It goes on with its other work meanwhile."""
    loop, path = SimulatedLoop(), str(tmp_path / "s")
    listener, first = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)

    async def make_room() -> None:
        await asyncio.sleep(full_for)
        accepted, _ = await loop.sock_accept(listener)
        accepted.close()

    async def play() -> None:
        began, room = loop.time(), asyncio.ensure_future(make_room())
        with pytest.raises(UnirunError) as caught:
            await connect(UnixAddress.here(path), Credentials(TOKEN), timeout=TIMEOUT)
        assert loop.time() - began == pytest.approx(TIMEOUT, abs=0.01)
        # Where there was room, the listener was reached, and has said nothing.
        assert isinstance(caught.value, RendezvousError) == (full_for > TIMEOUT)
        room.cancel()

    listener.setblocking(False)
    listener.bind(path)
    listener.listen(0)
    first.connect(path)
    loop.do(play())
    loop.end()
    listener.close()
    first.close()
