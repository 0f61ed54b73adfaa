"""`BlockingStream`, over unix sockets and TCP, with TLS and without."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.unit.wire.endpoints import Endpoint, encoded, fail_on_refusal, serve_once
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import ConnectionLost, FrameError, RendezvousError
from unirun.wire.address import unix_address
from unirun.wire.aio import Stream, StreamServer
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import ANSWER_SIZE, HANDSHAKE_TIMEOUT, Handshake
from unirun.wire.messages import Shutdown, Stop
from unirun.wire.reports import Notice
from unirun.wire.sockets import IDLE, INTERVAL, PROBES, keep_alive


def test_a_silent_peer_is_given_up_after_its_time() -> None:
    """It is asked after `IDLE` seconds, and so often, at so many seconds from each other."""
    with socket.socket() as sock:
        keep_alive(sock)
        options = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        found = [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert found == [1, IDLE, INTERVAL, PROBES]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


class TestBlockingStream:
    def test_a_blocking_stream_speaks_with_an_asyncio_stream(self, endpoint: Endpoint) -> None:
        async def main() -> None:
            async def serve(stream: Stream) -> None:
                stream.send(await stream.receive())
                await stream.close()

            server = StreamServer(endpoint.listen(), endpoint.credentials, serve, fail_on_refusal)
            await asyncio.to_thread(talk)
            server.close()

        def talk() -> None:
            with BlockingStream.connect(endpoint.address, endpoint.credentials) as stream:
                stream.send(Stop(15, "please", 1.5))
                assert stream.receive(WAIT_TIMEOUT) == Stop(15, "please", 1.5)
                # A process of this host may be stopped for any time.
                assert stream.socket.gettimeout() == (HANDSHAKE_TIMEOUT if endpoint.tcp else None)
                with pytest.raises(ConnectionLost):
                    stream.receive(WAIT_TIMEOUT)

        asyncio.run(main())

    def test_a_blocking_stream_returns_all_messages_of_one_read(self) -> None:
        ours, theirs = socket.socketpair()
        stream = BlockingStream(ours)
        theirs.sendall(encoded(Notice("a", "1")) + encoded(Notice("a", "2")) + encoded(Notice("a", "3"))[:-1])
        assert list(stream.drain()) == [Notice("a", "1"), Notice("a", "2")]
        theirs.sendall(encoded(Notice("a", "3"))[-1:])
        assert list(stream.drain()) == [Notice("a", "3")]
        theirs.close()
        with pytest.raises(ConnectionLost):
            list(stream.drain())
        stream.close()
        stream.close()

    def test_messages_that_several_threads_send_at_once_come_whole(self) -> None:
        ours, theirs = socket.socketpair()
        texts = [str(number) * 1_000_000 for number in range(4)]
        with BlockingStream(ours) as sender, BlockingStream(theirs) as receiver:
            # No socket takes such a message at once.
            threads = [threading.Thread(target=sender.send, args=(Notice("a", text),)) for text in texts]
            for thread in threads:
                thread.start()
            heard = [receiver.receive(WAIT_TIMEOUT) for _ in texts]
            for thread in threads:
                thread.join()
        assert sorted(each.text for each in heard if isinstance(each, Notice)) == texts

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
            late = threading.Timer(0.05, lambda: theirs.sendall(encoded(Shutdown())))
            late.start()
            assert stream.receive(WAIT_TIMEOUT) == Shutdown()
            late.join(WAIT_TIMEOUT)
            theirs.sendall(encoded(Shutdown()))
            assert stream.receive() == Shutdown()

    def test_a_blocking_stream_takes_a_handshake_in_pieces_and_leaves_later_bytes(
        self, endpoint: Endpoint
    ) -> None:
        def serve(connection: socket.socket) -> None:
            handshake = Handshake(endpoint.token)
            hello = handshake.hello()
            for n in range(len(hello)):
                time.sleep(0.002)
                connection.sendall(hello[n : n + 1])
            proof = handshake.proof(connection.recv(ANSWER_SIZE))
            connection.sendall(proof[:10])
            connection.sendall(proof[10:] + encoded(Notice("a", "1")) + encoded(Notice("a", "2")))

        with (
            serve_once(endpoint, serve),
            BlockingStream.connect(endpoint.address, endpoint.credentials) as stream,
        ):
            assert stream.receive(WAIT_TIMEOUT) == Notice("a", "1")
            assert [*stream.buffered()] == [Notice("a", "2")]

    def test_a_blocking_stream_waits_for_a_unix_listener_whose_queue_is_full(self, tmp_path: Path) -> None:
        endpoint = Endpoint("unix", tmp_path)
        listener = endpoint.listen()
        listener.listen(0)
        first = socket.socket(socket.AF_UNIX)
        with listener, first, unix_address(endpoint.path) as path:
            first.connect(path)
            with pytest.raises(RendezvousError, match="nobody answers at"):
                BlockingStream.connect(endpoint.address, endpoint.credentials, timeout=0.05)

            def make_room() -> None:
                listener.accept()[0].close()
                with listener.accept()[0] as second:
                    handshake = Handshake(endpoint.token)
                    second.sendall(handshake.hello())
                    second.sendall(handshake.proof(second.recv(ANSWER_SIZE)) + encoded(Shutdown()))

            room = threading.Timer(0.05, make_room)
            room.start()
            with BlockingStream.connect(
                endpoint.address, endpoint.credentials, timeout=WAIT_TIMEOUT
            ) as stream:
                assert stream.receive(WAIT_TIMEOUT) == Shutdown()
            room.join(WAIT_TIMEOUT)

    def test_a_blocking_stream_raises_when_the_peer_is_gone(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        with BlockingStream(ours) as stream:
            with pytest.raises(ConnectionLost):
                stream.send(Shutdown())
            with pytest.raises(ConnectionLost):
                stream.receive(WAIT_TIMEOUT)

    def test_a_blocking_stream_refuses_garbage_from_an_authenticated_peer(self) -> None:
        ours, theirs = socket.socketpair()
        with BlockingStream(ours) as stream, theirs:
            theirs.sendall(b"\0\0\0\2{}")
            with pytest.raises(FrameError, match="unknown message"):
                stream.receive(WAIT_TIMEOUT)
