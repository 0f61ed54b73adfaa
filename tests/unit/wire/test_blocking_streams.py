"""`BlockingStream`, over unix sockets and TCP, with TLS and without."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.unit.wire.places import SOON, Place, raw, serving, unexpected
from unirun.errors import ConnectionLost, FrameError, RendezvousError
from unirun.wire.address import unix_address
from unirun.wire.aio import Stream, StreamServer
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import ANSWER_SIZE, ServerHandshake
from unirun.wire.messages import Shutdown, Stop
from unirun.wire.reports import Notice


class TestBlockingStream:
    def test_a_blocking_stream_speaks_with_an_asyncio_stream(self, place: Place) -> None:
        async def main() -> None:
            async def serve(stream: Stream) -> None:
                stream.send(await stream.receive())
                await stream.close()

            server = StreamServer(place.listen(), place.credentials, serve, unexpected)
            await asyncio.to_thread(talk)
            server.close()

        def talk() -> None:
            with BlockingStream.connect(place.address, place.credentials) as stream:
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

    def test_a_blocking_stream_takes_a_handshake_in_pieces_and_leaves_later_bytes(self, place: Place) -> None:
        def serve(connection: socket.socket) -> None:
            handshake = ServerHandshake(place.token)
            hello = handshake.hello()
            for n in range(len(hello)):
                time.sleep(0.002)
                connection.sendall(hello[n : n + 1])
            proof = handshake.proof(connection.recv(ANSWER_SIZE))
            connection.sendall(proof[:10])
            connection.sendall(proof[10:] + raw(Notice("a", "1")) + raw(Notice("a", "2")))

        with (
            serving(place, serve),
            BlockingStream.connect(place.address, place.credentials) as stream,
        ):
            assert stream.receive(SOON) == Notice("a", "1")
            assert [*stream.buffered()] == [Notice("a", "2")]

    def test_a_blocking_stream_waits_for_a_unix_listener_whose_queue_is_full(self, tmp_path: Path) -> None:
        place = Place("unix", tmp_path)
        listener = place.listen(backlog=0)
        first = socket.socket(socket.AF_UNIX)
        with listener, first, unix_address(place.path) as path:
            first.connect(path)
            with pytest.raises(RendezvousError, match="nobody answers at"):
                BlockingStream.connect(place.address, place.credentials, timeout=0.05)

            def make_room() -> None:
                listener.accept()[0].close()
                with listener.accept()[0] as second:
                    handshake = ServerHandshake(place.token)
                    second.sendall(handshake.hello())
                    second.sendall(handshake.proof(second.recv(ANSWER_SIZE)) + raw(Shutdown()))

            room = threading.Timer(0.05, make_room)
            room.start()
            with BlockingStream.connect(place.address, place.credentials, timeout=SOON) as stream:
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
