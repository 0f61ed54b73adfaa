"""Streams over unix sockets and TCP, with TLS and without: authentication, delivery and the end of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import stat
import time
from asyncio import sslproto
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.simulated_loop import SimulatedLoop
from tests.unit.wire.endpoints import NODE, Endpoint, encoded, fail_on_refusal, serve_once
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import AuthError, ConnectionLost, RendezvousError, UsageError, WireError
from unirun.wire import frames, handshake
from unirun.wire.address import TcpAddress, UnixAddress
from unirun.wire.aio import Stream, StreamServer, connect
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import HELLO_SIZE, Handshake, new_token
from unirun.wire.messages import Shutdown, Stop
from unirun.wire.reports import Notice
from unirun.wire.sockets import listen, listen_tcp


def over_asyncio(endpoint: Endpoint, talk: Callable[[Stream, Stream], Awaitable[None]]) -> None:
    """Run `talk` with both ends of one stream."""

    async def main() -> None:
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

        async def serve(stream: Stream) -> None:
            accepted.set_result(stream)

        server = StreamServer(endpoint.listen(), endpoint.credentials, serve, fail_on_refusal)
        client = await connect(endpoint.address, endpoint.on("another"))
        async with asyncio.timeout(WAIT_TIMEOUT):
            await talk(client, await accepted)
        await client.close()
        await (await accepted).close()
        server.close()

    asyncio.run(main())


def test_a_stream_carries_messages_both_ways_in_order(endpoint: Endpoint) -> None:
    async def talk(client: Stream, server: Stream) -> None:
        sent = [Notice("actor:0", f"{n}") for n in range(100)]
        for message in sent:
            client.send(message)
        assert [await server.receive() for _ in sent] == sent
        server.send(Shutdown())
        assert await client.receive() == Shutdown()

    over_asyncio(endpoint, talk)


def test_a_stream_carries_a_message_of_8_mib(endpoint: Endpoint) -> None:
    async def talk(client: Stream, server: Stream) -> None:
        message = Notice("x", "y" * (8 << 20))
        client.send(message)
        assert await server.receive() == message

    over_asyncio(endpoint, talk)


def test_the_end_of_a_stream_is_raised_after_all_messages_sent_before(endpoint: Endpoint) -> None:
    async def talk(client: Stream, server: Stream) -> None:
        client.send(Notice("a", "last words"))
        await client.close()
        assert await server.receive() == Notice("a", "last words")
        with pytest.raises(ConnectionLost):
            await server.receive()
        server.send(Shutdown())  # to a peer that is gone: no error here, receive tells

    over_asyncio(endpoint, talk)


class Refusing:
    """A server whose refusals can be waited for."""

    def __init__(self, endpoint: Endpoint, *, timeout: float = WAIT_TIMEOUT) -> None:
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()
        self._server = StreamServer(
            endpoint.listen(), endpoint.credentials, self.accepted.put, self._note, timeout=timeout
        )

    def _note(self, text: str, count: int) -> None:
        self.refused.put_nowait(text)

    async def reason(self) -> str:
        """The reason why the next connection was refused."""
        return await asyncio.wait_for(self.refused.get(), WAIT_TIMEOUT)

    def close(self) -> None:
        self._server.close()


class TestStreamAuthentication:
    def test_a_client_with_another_token_is_refused(self, endpoint: Endpoint) -> None:
        async def main() -> None:
            server = Refusing(endpoint)
            # With TLS it is the certificate that is wrong already.
            expected = AuthError if endpoint.kind == "tls" else ConnectionLost
            with pytest.raises(expected):
                await connect(endpoint.address, endpoint.stranger)
            whence = " from 127.0.0.1" if endpoint.tcp else ""
            assert (await server.reason()).startswith(f"a connection{whence} was refused")
            assert server.accepted.empty()
            server.close()

        asyncio.run(main())

    def test_a_client_without_the_token_is_refused_before_its_payload_is_parsed(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsed: list[Any] = []
        parse = frames.parse_object

        def noted(body: Any) -> Any:
            parsed.append(body)
            return parse(body)

        monkeypatch.setattr(frames, "parse_object", noted)

        async def main() -> None:
            server = Refusing(endpoint)
            reader, writer = await endpoint.open()
            hello = await reader.readexactly(HELLO_SIZE)
            writer.write(Handshake(new_token()).answer(hello) + encoded(Stop(9, "let me in")))
            with contextlib.suppress(OSError):
                assert await asyncio.wait_for(reader.read(), WAIT_TIMEOUT) == b"", (
                    "not even a proof comes back"
                )
            assert "does not know this job's token" in await server.reason()
            writer.close()
            server.close()

        asyncio.run(main())
        assert parsed == []

    def test_both_kinds_of_stream_refuse_a_server_with_another_token(self, endpoint: Endpoint) -> None:
        def lie(connection: socket.socket) -> None:
            connection.sendall(Handshake(new_token()).hello())
            connection.recv(4096)
            connection.sendall(b"\0" * 32)

        with serve_once(endpoint, lie), pytest.raises(AuthError, match="the server does not know"):
            BlockingStream.connect(endpoint.address, endpoint.credentials)
        with serve_once(endpoint, lie), pytest.raises(AuthError, match="the server does not know"):
            asyncio.run(connect(endpoint.address, endpoint.credentials))

    def test_a_silent_client_is_dropped_at_the_deadline(self, endpoint: Endpoint) -> None:
        async def main() -> None:
            server = Refusing(endpoint, timeout=0.1)
            reader, writer = await endpoint.open()
            assert "did not finish the handshake in time" in await server.reason()
            with contextlib.suppress(OSError):
                await asyncio.wait_for(reader.read(), WAIT_TIMEOUT)
            writer.close()
            server.close()

        asyncio.run(main())

    def test_a_silent_server_is_given_up_at_the_deadline(self, endpoint: Endpoint) -> None:
        listener = endpoint.listen()
        began = time.monotonic()
        # With TLS it has not even presented its certificate.
        silent = "did not finish the handshake in time|nobody answers"
        with pytest.raises((WireError, RendezvousError), match=silent):
            BlockingStream.connect(endpoint.address, endpoint.credentials, timeout=0.05)
        with pytest.raises((WireError, RendezvousError), match=silent):
            asyncio.run(connect(endpoint.address, endpoint.credentials, timeout=0.05))
        assert time.monotonic() - began < WAIT_TIMEOUT
        listener.close()

    def test_a_server_that_hangs_up_is_named_in_the_error(self, endpoint: Endpoint) -> None:
        for hang_up in (lambda c: None, lambda c: c.sendall(Handshake(endpoint.token).hello())):
            with serve_once(endpoint, hang_up), pytest.raises(ConnectionLost):
                BlockingStream.connect(endpoint.address, endpoint.credentials)
            with serve_once(endpoint, hang_up), pytest.raises(ConnectionLost):
                asyncio.run(connect(endpoint.address, endpoint.credentials))

    def test_an_address_that_nobody_listens_at_is_named_in_the_error(self, endpoint: Endpoint) -> None:
        endpoint.listen().close()
        for attempt in (
            lambda: BlockingStream.connect(endpoint.address, endpoint.credentials),
            lambda: asyncio.run(connect(endpoint.address, endpoint.credentials)),
        ):
            with pytest.raises(RendezvousError, match="nobody answers at .*; has the job ended") as caught:
                attempt()
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    def test_with_tls_only_a_named_node_has_to_be_the_one_that_listens(self, tmp_path: Path) -> None:
        endpoint = Endpoint("tls", tmp_path)

        async def main() -> None:
            server = Refusing(endpoint)
            assert isinstance(endpoint.address, TcpAddress)
            nameless, elsewhere = (replace(endpoint.address, node=node) for node in ("", "elsewhere"))
            await (await connect(nameless, endpoint.credentials)).close()
            (await asyncio.to_thread(BlockingStream.connect, nameless, endpoint.credentials)).close()
            with pytest.raises(AuthError, match="is not node elsewhere of this job"):
                await connect(elsewhere, endpoint.credentials)
            with pytest.raises(AuthError, match="is not node elsewhere of this job"):
                await asyncio.to_thread(BlockingStream.connect, elsewhere, endpoint.credentials)
            server.close()

        asyncio.run(main())


class TestAServer:
    def test_connections_of_a_unix_socket_are_of_a_known_address(self, tmp_path: Path) -> None:
        """They are this user's own, so they do not share the limits of strangers."""
        endpoint = Endpoint("unix", tmp_path)

        async def main() -> None:
            server = Refusing(endpoint)
            waiting = [await endpoint.open() for _ in range(handshake.KNOWN)]
            for reader, _ in waiting:
                await asyncio.wait_for(reader.readexactly(HELLO_SIZE), WAIT_TIMEOUT)
            for _, writer in waiting:
                writer.close()
            server.close()

        asyncio.run(main())

    def test_a_server_that_is_closed_does_not_listen_and_keeps_its_streams(self, endpoint: Endpoint) -> None:
        async def main() -> None:
            server = Refusing(endpoint)
            client = await connect(endpoint.address, endpoint.credentials)
            stream = await server.accepted.get()
            server.close()
            await asyncio.sleep(0)
            with pytest.raises(RendezvousError):
                await connect(endpoint.address, endpoint.credentials)
            client.send(Shutdown())
            assert await stream.receive() == Shutdown()
            await client.close()
            await stream.close()

        asyncio.run(main())

    def test_the_node_of_a_peer_is_known_by_its_certificate(self, endpoint: Endpoint) -> None:
        async def talk(client: Stream, server: Stream) -> None:
            assert client.peer == (NODE if endpoint.kind == "tls" else "")
            assert server.peer == ("another" if endpoint.kind == "tls" else "")

        over_asyncio(endpoint, talk)

    def test_silent_connections_make_room_for_others(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for limit in ("KNOWN", "EACH"):
            monkeypatch.setattr(handshake, limit, 3)
        monkeypatch.setattr(handshake, "MIN_HANDSHAKE_SECONDS", 0.05)

        async def main() -> None:
            server = Refusing(endpoint)
            silent = [await endpoint.open() for _ in range(5)]
            client = await asyncio.wait_for(connect(endpoint.address, endpoint.credentials), WAIT_TIMEOUT)
            assert "others wait" in await server.reason()
            await client.close()
            for _, writer in silent:
                writer.transport.abort()
            server.close()

        asyncio.run(main())

    def test_a_connection_for_which_there_is_no_room_is_closed_at_once(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for limit in ("KNOWN", "EACH", "QUEUE", "QUEUE_KNOWN"):
            monkeypatch.setattr(handshake, limit, 1)
        monkeypatch.setattr(handshake, "MIN_HANDSHAKE_SECONDS", WAIT_TIMEOUT)

        async def knock() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            if isinstance(endpoint.address, UnixAddress):
                return await endpoint.open()
            return await asyncio.open_connection(endpoint.address.addr, endpoint.address.port)

        async def main() -> None:
            server = Refusing(endpoint)
            # One may prove the token now, and one waits.
            silent = [await knock() for _ in range(3)]
            assert "too many" in await server.reason()
            assert await asyncio.wait_for(silent[-1][0].read(), WAIT_TIMEOUT) == b""
            for _, writer in silent:
                writer.transport.abort()
            server.close()

        asyncio.run(main())

    def test_connections_that_came_to_nothing_leave_no_tls_in_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each has a buffer of 256 KiB. The collector of cycles may come late for them."""
        monkeypatch.setattr(handshake, "EACH", 40)
        endpoint = Endpoint("tls", tmp_path)

        def left() -> int:
            return sum(type(each).__name__ == "SSLProtocol" for each in gc.get_objects())

        async def main() -> None:
            server = Refusing(endpoint)
            assert isinstance(endpoint.address, TcpAddress)
            before = left()
            for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01", b""):
                for _ in range(6):
                    with socket.create_connection((endpoint.address.addr, endpoint.address.port)) as sock:
                        await asyncio.sleep(0.005)
                        sock.sendall(said)
                    await server.reason()
            await asyncio.sleep(0)
            assert left() - before <= 1
            server.close()

        gc.disable()
        try:
            asyncio.run(main())
        finally:
            gc.enable()

    def test_a_server_goes_on_when_connections_are_gone_or_descriptors_are_spent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endpoint = Endpoint("unix", tmp_path)
        loop = SimulatedLoop()
        errors: list[OSError] = [ConnectionAbortedError(), OSError(errno.EMFILE, "too many open files")]
        accept = loop.sock_accept

        async def fails_first(sock: socket.socket) -> tuple[socket.socket, Any]:
            if errors:
                raise errors.pop(0)
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", fails_first)

        async def main() -> None:
            server = Refusing(endpoint)
            began = loop.time()
            await (await connect(endpoint.address, endpoint.credentials)).close()
            assert loop.time() - began == pytest.approx(handshake.ACCEPT_RETRY_INTERVAL)
            assert "a connection was refused: [Errno 24]" in server.refused.get_nowait()
            assert server.refused.empty(), "nothing is said of a peer that has gone"
            await (await server.accepted.get()).close()
            server.close()

        loop.do(main())
        loop.end()

    def test_a_server_that_is_closed_leaves_no_task(self, endpoint: Endpoint) -> None:
        async def main() -> None:
            server = StreamServer(endpoint.listen(), endpoint.credentials, serve, fail_on_refusal)
            _, writer = await endpoint.open()
            server.close()
            await server.closed()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            writer.transport.abort()

        async def serve(stream: Stream) -> None:
            raise AssertionError(stream)

        asyncio.run(main())

    def test_many_honest_connections_at_once_are_all_accepted(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for limit in ("KNOWN", "EACH"):
            monkeypatch.setattr(handshake, limit, 4)
        # The handshakes of a busy machine take longer than those that have to make room.
        monkeypatch.setattr(handshake, "MIN_HANDSHAKE_SECONDS", WAIT_TIMEOUT)

        async def main() -> None:
            server = Refusing(endpoint)
            clients = await asyncio.gather(
                *(connect(endpoint.address, endpoint.credentials, timeout=WAIT_TIMEOUT) for _ in range(32))
            )
            assert server.refused.empty()
            for client in clients:
                await client.close()
            server.close()

        asyncio.run(main())


def test_a_listening_unix_socket_is_private(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    previous = os.umask(0)
    try:
        listener = listen(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not listener.get_inheritable()
    listener.close()


def test_listening_on_a_taken_address_is_an_error_and_leaks_no_descriptor(tmp_path: Path) -> None:
    listener, other = listen(tmp_path / "x.sock"), listen_tcp("127.0.0.1")
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match="in use"):
        listen(tmp_path / "x.sock")
    with pytest.raises(RendezvousError, match="in use"):
        listen_tcp("127.0.0.1", other.getsockname()[1])
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    listener.close()
    other.close()


@pytest.mark.parametrize("addr", ["", "0.0.0.0", "::", "::ffff:0.0.0.0", "0", "localhost", "*", "10.0.0.1/8"])
def test_a_listener_is_bound_to_one_numeric_address(addr: str) -> None:
    with pytest.raises(UsageError, match="no numeric address|is not one address"):
        listen_tcp(addr)


def test_an_address_of_another_host_cannot_be_listened_at() -> None:
    with pytest.raises(RendezvousError, match="cannot listen at 192.0.2.1"):
        listen_tcp("192.0.2.1")


def test_tcp_streams_send_small_frames_at_once_and_notice_a_dead_peer(tmp_path: Path) -> None:
    endpoint = Endpoint("insecure", tmp_path)

    async def main() -> None:
        server = Refusing(endpoint)
        client = await connect(endpoint.address, endpoint.credentials)
        stream = await server.accepted.get()
        for end in (client, stream):
            sock = end._writer.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        await client.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("side", ["client", "server"])
def test_an_end_that_is_cancelled_when_tls_has_just_been_established_leaves_no_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """The next socket with the number of its own could not be used, and an agent ended by that."""
    endpoint = Endpoint("tls", tmp_path)
    ends: dict[str, Callable[[], object]] = {}
    established = sslproto.SSLProtocol._wakeup_waiter

    def cancel(protocol: Any, error: BaseException | None = None) -> None:
        established(protocol, error)
        if protocol._server_side == (side == "server") and side in ends:
            ends.pop(side)()

    monkeypatch.setattr(sslproto.SSLProtocol, "_wakeup_waiter", cancel)

    async def main() -> None:
        server = StreamServer(
            endpoint.listen(), endpoint.credentials, lambda stream: stream.close(), lambda *_: None
        )
        connecting = asyncio.ensure_future(connect(endpoint.address, endpoint.on("another")))
        ends.update(client=connecting.cancel, server=server.close)
        async with asyncio.timeout(WAIT_TIMEOUT):
            await asyncio.wait({connecting})
            assert side not in ends
            server.close()
            await server.closed()
        with socket.create_server(("127.0.0.1", 0)) as other, contextlib.ExitStack() as stack:
            for _ in range(4):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, other.getsockname())

    asyncio.run(main())
