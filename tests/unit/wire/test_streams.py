"""Streams over real unix sockets: authentication, delivery and the end of a stream."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unirun.errors import AuthError, ConnectionLost, FrameError, RendezvousError, WireError
from unirun.wire import BlockingStream, encode, encode_frame, frames, new_token
from unirun.wire.address import UnixAddress, unix_address
from unirun.wire.aio import Stream, accept, connect, listen
from unirun.wire.handshake import ANSWER_SIZE, HELLO_SIZE, ClientHandshake, ServerHandshake
from unirun.wire.messages import Message, Shutdown, Stop
from unirun.wire.reports import Notice

SOON = 20.0


@pytest.fixture(params=["short", "long"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Path of the socket; the kernel accepts at most 107 bytes."""
    folder = tmp_path
    if request.param == "long":
        for _ in range(6):
            folder /= "d" * 40
        folder.mkdir(parents=True)
        assert len(os.fsencode(folder)) > 200
    return folder / "agent.sock"


TOKEN, OTHER = new_token(), new_token()


def over_asyncio(path: Path, talk: Callable[[Stream, Stream], Awaitable[None]]) -> None:
    """Run `talk` with both ends of one stream."""

    async def main() -> None:
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(await accept(reader, writer, TOKEN))

        server = await asyncio.start_unix_server(serve, sock=listen(path))
        client = await connect(UnixAddress.here(path), TOKEN)
        async with asyncio.timeout(SOON):
            await talk(client, await accepted)
        await client.close()
        await (await accepted).close()
        server.close()

    asyncio.run(main())


def test_a_stream_carries_messages_both_ways_in_order(path: Path) -> None:
    async def talk(client: Stream, server: Stream) -> None:
        sent = [Notice("actor:0", f"{n}") for n in range(100)]
        for message in sent:
            client.send(message)
        assert [await server.receive() for _ in sent] == sent
        server.send(Shutdown())
        assert await client.receive() == Shutdown()

    over_asyncio(path, talk)


def test_a_stream_carries_a_message_of_8_mib(path: Path) -> None:
    async def talk(client: Stream, server: Stream) -> None:
        message = Notice("x", "y" * (8 << 20))
        client.send(message)
        assert await server.receive() == message

    over_asyncio(path, talk)


def test_the_end_of_a_stream_is_raised_after_all_messages_sent_before(path: Path) -> None:
    async def talk(client: Stream, server: Stream) -> None:
        client.send(Notice("a", "last words"))
        await client.close()
        assert await server.receive() == Notice("a", "last words")
        with pytest.raises(ConnectionLost):
            await server.receive()
        server.send(Shutdown())  # to a peer that is gone: no error here, receive tells

    over_asyncio(path, talk)


@contextmanager
def serving(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """A server in a thread: `serve` gets the first connection."""
    listener = listen(path)
    errors: list[BaseException] = []

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(SOON)
            try:
                serve(connection)
            except OSError as error:
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(SOON)
    listener.close()
    assert not thread.is_alive()


def raw(message: Message) -> bytes:
    return encode_frame(encode(message))


class TestBlockingStream:
    def test_a_blocking_stream_speaks_with_an_asyncio_stream(self, path: Path) -> None:
        async def main() -> None:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                stream = await accept(reader, writer, TOKEN)
                stream.send(await stream.receive())
                await stream.close()

            async with await asyncio.start_unix_server(serve, sock=listen(path)):
                await asyncio.to_thread(talk)

        def talk() -> None:
            with BlockingStream.connect(UnixAddress.here(path), TOKEN) as stream:
                stream.send(Stop(15, "please", 1.5))
                assert stream.receive(SOON) == Stop(15, "please", 1.5)
                with pytest.raises(ConnectionLost):
                    stream.receive(SOON)

        asyncio.run(main())

    def test_a_blocking_stream_returns_all_messages_of_one_read(self) -> None:
        ours, theirs = socket.socketpair()
        stream = BlockingStream(ours)
        theirs.sendall(raw(Notice("a", "1")) + raw(Notice("a", "2")) + raw(Notice("a", "3"))[:-1])
        assert list(stream.drain()) == [Notice("a", "1"), Notice("a", "2")]
        theirs.sendall(raw(Notice("a", "3"))[-1:])
        assert list(stream.drain()) == [Notice("a", "3")]
        theirs.close()
        with pytest.raises(ConnectionLost):
            list(stream.drain())
        stream.close()
        stream.close()

    def test_a_blocking_stream_stops_waiting_at_its_timeout(self) -> None:
        ours, theirs = socket.socketpair()
        with (
            BlockingStream(ours) as stream,
            theirs,
            pytest.raises(RendezvousError, match=r"sent nothing for 0\.02 s"),
        ):
            stream.receive(0.02)

    def test_a_blocking_stream_waits_until_its_timeout(self) -> None:
        ours, theirs = socket.socketpair()
        with BlockingStream(ours) as stream, theirs:
            late = threading.Timer(0.05, lambda: theirs.sendall(raw(Shutdown())))
            late.start()
            assert stream.receive(SOON) == Shutdown()
            late.join(SOON)
            theirs.sendall(raw(Shutdown()))
            assert stream.receive() == Shutdown()

    def test_a_blocking_stream_takes_a_handshake_in_pieces_and_leaves_later_bytes(self, path: Path) -> None:
        def serve(connection: socket.socket) -> None:
            handshake = ServerHandshake(TOKEN)
            hello = handshake.hello()
            for n in range(len(hello)):
                time.sleep(0.002)
                connection.sendall(hello[n : n + 1])
            proof = handshake.proof(connection.recv(ANSWER_SIZE))
            connection.sendall(proof[:10])
            connection.sendall(proof[10:] + raw(Notice("a", "1")) + raw(Notice("a", "2")))

        with serving(path, serve), BlockingStream.connect(UnixAddress.here(path), TOKEN) as stream:
            assert stream.receive(SOON) == Notice("a", "1")
            assert [*stream.buffered()] == [Notice("a", "2")]

    def test_a_blocking_stream_waits_for_a_listener_whose_queue_is_full(self, path: Path) -> None:
        listener = listen(path, backlog=0)
        first = socket.socket(socket.AF_UNIX)
        with listener, first, unix_address(path) as address:
            first.connect(address)
            with pytest.raises(RendezvousError, match="nobody answers at"):
                BlockingStream.connect(UnixAddress.here(path), TOKEN, timeout=0.05)

            def make_room() -> None:
                listener.accept()[0].close()
                with listener.accept()[0] as second:
                    handshake = ServerHandshake(TOKEN)
                    second.sendall(handshake.hello())
                    second.sendall(handshake.proof(second.recv(ANSWER_SIZE)) + raw(Shutdown()))

            room = threading.Timer(0.05, make_room)
            room.start()
            with BlockingStream.connect(UnixAddress.here(path), TOKEN, timeout=SOON) as stream:
                assert stream.receive(SOON) == Shutdown()
            room.join(SOON)

    def test_a_blocking_stream_raises_when_the_peer_is_gone(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        with BlockingStream(ours) as stream:
            with pytest.raises(ConnectionLost):
                stream.send(Shutdown())
            with pytest.raises(ConnectionLost):
                stream.receive(SOON)

    def test_a_blocking_stream_refuses_garbage_from_an_authenticated_peer(self) -> None:
        ours, theirs = socket.socketpair()
        with BlockingStream(ours) as stream, theirs:
            theirs.sendall(b"\0\0\0\2{}")
            with pytest.raises(FrameError, match="unknown message"):
                stream.receive(SOON)


class TestStreamAuthentication:
    def test_a_stream_to_a_client_with_another_token_ends_without_a_reason(self, path: Path) -> None:
        async def main() -> None:
            refused: asyncio.Future[WireError] = asyncio.get_running_loop().create_future()

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    await accept(reader, writer, TOKEN)
                except WireError as error:
                    refused.set_result(error)

            async with await asyncio.start_unix_server(serve, sock=listen(path)):
                with pytest.raises(ConnectionLost, match="is the token right"):
                    await connect(UnixAddress.here(path), OTHER)
                assert isinstance(await asyncio.wait_for(refused, SOON), AuthError)

        asyncio.run(main())

    def test_a_stream_client_without_a_token_is_refused_before_its_payload_is_parsed(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsed: list[bytes] = []
        parse = frames.parse_object
        monkeypatch.setattr(frames, "parse_object", lambda body: parsed.append(body) or parse(body))

        async def main() -> None:
            refused: asyncio.Future[WireError] = asyncio.get_running_loop().create_future()

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    stream = await accept(reader, writer, TOKEN)
                    await stream.receive()
                except WireError as error:
                    refused.set_result(error)

            async with await asyncio.start_unix_server(serve, sock=listen(path)):
                reader, writer = await connect_raw(path)
                hello = await reader.readexactly(HELLO_SIZE)
                writer.write(ClientHandshake(OTHER).answer(hello) + raw(Stop(9, "let me in")))
                assert await asyncio.wait_for(reader.read(), SOON) == b"", "not even a proof comes back"
                assert isinstance(await asyncio.wait_for(refused, SOON), AuthError)
                writer.close()

        asyncio.run(main())
        assert parsed == []

    def test_both_kinds_of_stream_refuse_a_server_with_another_token(self, path: Path) -> None:
        def lie(connection: socket.socket) -> None:
            connection.sendall(ServerHandshake(OTHER).hello())
            connection.recv(4096)
            connection.sendall(b"\0" * 32)

        with serving(path, lie), pytest.raises(AuthError, match="the server does not know"):
            BlockingStream.connect(UnixAddress.here(path), TOKEN)
        path.unlink()
        with serving(path, lie), pytest.raises(AuthError, match="the server does not know"):
            asyncio.run(connect(UnixAddress.here(path), TOKEN))

    def test_a_silent_stream_client_is_dropped_at_the_deadline(self, path: Path) -> None:
        async def main() -> None:
            refused: asyncio.Future[WireError] = asyncio.get_running_loop().create_future()

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    await accept(reader, writer, TOKEN, timeout=0.05)
                except WireError as error:
                    refused.set_result(error)

            async with await asyncio.start_unix_server(serve, sock=listen(path)):
                reader, writer = await connect_raw(path)
                assert "did not finish the handshake in time" in str(await asyncio.wait_for(refused, SOON))
                await asyncio.wait_for(reader.read(), SOON)
                writer.close()

        asyncio.run(main())

    def test_a_silent_stream_server_is_given_up_at_the_deadline(self, path: Path) -> None:
        listener = listen(path)
        began = time.monotonic()
        with pytest.raises(WireError, match="did not finish the handshake in time"):
            BlockingStream.connect(UnixAddress.here(path), TOKEN, timeout=0.05)
        with pytest.raises(WireError, match="did not finish the handshake in time"):
            asyncio.run(connect(UnixAddress.here(path), TOKEN, timeout=0.05))
        assert time.monotonic() - began < SOON
        listener.close()

    def test_a_stream_server_that_hangs_up_is_named_in_the_error(self, path: Path) -> None:
        for hang_up in (lambda c: None, lambda c: c.sendall(ServerHandshake(TOKEN).hello())):
            with serving(path, hang_up), pytest.raises(ConnectionLost):
                BlockingStream.connect(UnixAddress.here(path), TOKEN)
            path.unlink()
            with serving(path, hang_up), pytest.raises(ConnectionLost):
                asyncio.run(connect(UnixAddress.here(path), TOKEN))
            path.unlink()

    def test_a_socket_that_nobody_listens_on_is_named_in_the_error(self, path: Path) -> None:
        for attempt in (
            lambda: BlockingStream.connect(UnixAddress.here(path), TOKEN),
            lambda: asyncio.run(connect(UnixAddress.here(path), TOKEN)),
        ):
            with pytest.raises(RendezvousError, match="nobody answers at .*; has the job ended"):
                attempt()


async def connect_raw(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with unix_address(path) as address:
        return await asyncio.open_unix_connection(address)


def test_a_listening_unix_socket_is_private(path: Path) -> None:
    previous = os.umask(0)
    try:
        listener = listen(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not listener.get_inheritable()
    listener.close()


def test_listening_on_a_taken_path_is_an_error_and_leaks_no_descriptor(path: Path) -> None:
    listener = listen(path)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match="in use"):
        listen(path)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    listener.close()
