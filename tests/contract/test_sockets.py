"""The contract of sockets alone: the peers that are let in, and the use of memory and descriptors."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.cluster import Cluster
from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.roles.transport import socket_transport, stripes
from unirun.roles.transport.frames import INLINE, OPEN, RELEASE, REPLY, REQUEST, encode_header
from unirun.roles.transport.protocol import CALLS, Parcel, Reply
from unirun.roles.transport.socket_transport import CallAddress, SocketConnection, SocketTransport
from unirun.roles.transport.sockets import MANY, TlsFrameSocket
from unirun.roles.transport.stripes import STRIPED
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import Credentials, server_name
from unirun.wire.handshake import ANSWER_SIZE, HELLO_SIZE, Handshake, Token, new_token

ME, CALLER = WorkerId("worker", 0, 0), WorkerId("trainer", 0, 0)
NUMBERS = itertools.count()


class ListeningWorker:
    """A worker that listens, and the requests that it got."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.token, self._folder = kind, new_token(), folder
        self.requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.folder = folder / "worker" / "calls"
        self.credentials = self.on("worker")
        self.transport = SocketTransport(
            self.folder,
            self.credentials,
            "127.0.0.1" if self.tcp else "",
            lambda text, count: self.refused.put(text),
        )
        self.endpoint = self.transport.serve(ME, self.echo)
        there = CallAddress.parse(self.endpoint)
        self.path, self.address = there.path, there.tcp or UnixAddress.here(there.path)

    @property
    def tcp(self) -> bool:
        """True if callers are on other nodes."""
        return self.kind != "unix"

    def on(self, node: str, token: Token | None = None) -> Credentials:
        """The credentials of a process on `node`."""
        insecure = self.kind == "insecure"
        return credentials_in(self._folder / node, token or self.token, node, tls=self.tcp, insecure=insecure)

    def echo(self, parcel: Parcel, reply: Reply) -> None:
        """Remember what came, and send it back."""
        self.requests.put(parcel.head)
        reply(parcel)

    @contextlib.contextmanager
    def caller(self, token: Token | None = None) -> Iterator[SocketTransport]:
        """A caller, with the right token or another."""
        node = f"caller-{next(NUMBERS)}"
        transport = SocketTransport(self._folder / node / "calls", self.on(node, token))
        yield transport
        transport.close()

    def connect_raw(self) -> socket.socket:
        """A connection that has said nothing yet; over TLS, it has a certificate of the job."""
        if isinstance(self.address, UnixAddress):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(WAIT_TIMEOUT)
            sock.connect(self.path)
            return sock
        sock = socket.create_connection((self.address.addr, self.address.port), WAIT_TIMEOUT)
        context = self.credentials.client_context()
        return context.wrap_socket(sock, server_hostname=server_name("worker")) if context else sock

    def connect_with_token(self) -> socket.socket:
        """A connection that has proved the token."""
        sock = BlockingStream.connect(self.address, self.credentials).socket
        sock.settimeout(WAIT_TIMEOUT)
        return sock

    def answers(self) -> bool:
        """Return True if a caller is served now."""
        with self.caller() as caller:
            done: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            channel = caller.connect(ME, self.endpoint, lambda reason: done.put(b""))
            channel.call(Parcel(b"are you there?"), lambda parcel: done.put(parcel.head))
            answer = done.get(timeout=WAIT_TIMEOUT)
            while self.requests.get(timeout=WAIT_TIMEOUT) != b"are you there?":
                pass
            return answer == b"are you there?"


@pytest.fixture(params=["unix", "tls", "insecure"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ListeningWorker]:
    """A worker in this process."""
    worker = ListeningWorker(request.param, tmp_path)
    yield worker
    worker.transport.close()


def closed_by_peer(sock: socket.socket) -> bool:
    """Return True if the other end closes the connection, whatever it sends before."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


class TestHandshake:
    def test_a_peer_with_the_token_is_served(self, worker: ListeningWorker) -> None:
        assert worker.answers()

    def test_a_peer_with_another_token_gets_an_error(self, worker: ListeningWorker) -> None:
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        with worker.caller(new_token()) as caller:
            caller.connect(ME, worker.endpoint, reasons.put)
            reason = "is not node worker of this job" if worker.kind == "tls" else "closed the stream"
            assert reason in reasons.get(timeout=WAIT_TIMEOUT)
        assert worker.requests.empty()
        assert worker.answers()

    def test_what_follows_a_wrong_proof_is_not_read(self, worker: ListeningWorker) -> None:
        with worker.connect_raw() as sock:
            hello = sock.recv(HELLO_SIZE)
            answer = Handshake(new_token()).answer(hello)
            with contextlib.suppress(OSError):
                sock.sendall(answer + encode_header(REQUEST, 1, 5, []) + b"hello")
            assert closed_by_peer(sock)
        assert worker.answers()
        assert worker.requests.empty()

    @pytest.mark.parametrize(
        "noise",
        [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(ANSWER_SIZE), bytes(1 << 20)],
        ids=["nothing", "a zero", "http", "an answer's length", "a megabyte"],
    )
    def test_noise_ends_the_handshake(self, worker: ListeningWorker, noise: bytes) -> None:
        with worker.connect_raw() as sock:
            with contextlib.suppress(OSError):
                sock.sendall(noise)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            assert closed_by_peer(sock)
        assert worker.requests.empty()
        assert worker.answers()

    def test_a_peer_that_connects_and_leaves_does_no_harm(self, worker: ListeningWorker) -> None:
        for _ in range(50):
            worker.connect_raw().close()
        assert worker.answers()

    def test_a_silent_peer_is_disconnected_at_the_deadline_of_the_handshake(
        self, worker: ListeningWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(socket_transport, "HANDSHAKE_TIMEOUT", 0.3)
        began = time.monotonic()
        with worker.connect_raw() as silent, worker.connect_raw() as slow:
            slow.sendall(b"unirun")
            assert closed_by_peer(silent)
            assert closed_by_peer(slow)
        assert 0.25 < time.monotonic() - began < WAIT_TIMEOUT
        assert worker.answers()

    def test_connecting_to_no_socket_breaks_the_channel(
        self, worker: ListeningWorker, tmp_path: Path
    ) -> None:
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        with worker.caller() as caller:
            caller.connect(ME, str(tmp_path / "nobody"), reasons.put)
            assert "No such file" in reasons.get(timeout=WAIT_TIMEOUT)

    @pytest.mark.parametrize("kind", ["unix", "tls", "insecure"])
    def test_a_worker_that_listens_no_more_breaks_the_channel(self, tmp_path: Path, kind: str) -> None:
        worker = ListeningWorker(kind, tmp_path)
        worker.transport.close()
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        with worker.caller() as caller:
            caller.connect(ME, worker.endpoint, reasons.put)
            assert "Connection refused" in reasons.get(timeout=WAIT_TIMEOUT)

    def test_the_sockets_are_for_their_owner_only(self, worker: ListeningWorker) -> None:
        assert os.stat(worker.path).st_mode & 0o077 == 0
        assert os.stat(worker.folder).st_mode & 0o077 == 0


class TestHandlers:
    """A worker listens once, for handlers with names; each connection is to one of them."""

    def test_a_connection_is_to_the_handler_that_it_names(self, worker: ListeningWorker) -> None:
        def handle(parcel: Parcel, reply: Reply) -> None:
            reply(Parcel(b"weights " + parcel.head))

        assert worker.transport.serve(ME, handle, "weights") == worker.endpoint
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with worker.caller() as caller:
            for name in ("weights", CALLS):
                connection = caller.connect(ME, worker.endpoint, lambda reason: None, name)
                connection.call(Parcel(b"x"), lambda parcel: answers.put(parcel.head))
                expected = b"weights x" if name == "weights" else b"x"
                assert answers.get(timeout=WAIT_TIMEOUT) == expected

    def test_a_handler_that_is_not_there_breaks_the_connection(self, worker: ListeningWorker) -> None:
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        with worker.caller() as caller:
            caller.connect(ME, worker.endpoint, reasons.put, "nothing")
            assert "closed the connection" in reasons.get(timeout=WAIT_TIMEOUT)
        assert worker.answers()

    def test_a_connection_names_its_handler_once(self, worker: ListeningWorker) -> None:
        name = encode_header(OPEN, 0, len(CALLS), []) + CALLS.encode()
        for frames in (name + name, encode_header(REQUEST, 1, 0, []) + name):
            with worker.connect_with_token() as sock:
                sock.sendall(frames)
                assert closed_by_peer(sock)
        assert worker.answers()


class TestStripes:
    """Large buffers over TLS go through connections of their own, as soon as there are some."""

    @pytest.fixture(params=["tls"])
    def worker(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[ListeningWorker]:
        monkeypatch.setattr(stripes, "stripe_count", lambda: 3)
        worker = ListeningWorker(request.param, tmp_path)
        yield worker
        worker.transport.close()

    def test_large_requests_and_answers_come_whole_and_in_order(self, worker: ListeningWorker) -> None:
        answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        with worker.caller() as caller:
            connection = caller.connect(ME, worker.endpoint, lambda reason: answers.put(Parcel(b"broken")))
            assert isinstance(connection, SocketConnection)
            assert isinstance(connection._socket, TlsFrameSocket)
            sending = connection._socket.stripes
            for number in range(6):
                sizes = [STRIPED, 5, 0, number]
                buffers = tuple(memoryview(os.urandom(size)) for size in sizes)
                connection.call(Parcel(b"large", buffers), answers.put)
                connection.call(Parcel(b"small"), answers.put)
                large, small = (answers.get(timeout=WAIT_TIMEOUT) for _ in range(2))
                assert (large.head, large.buffers, small.head) == (b"large", buffers, b"small")
                # The connections are opened when the first large buffers go one way, and the other.
                eventually(lambda: len(sending._sockets) == 6, "three connections for each direction")
            assert next(sending._numbers) == 6, "all but the first request went in stripes"
            assert worker.requests.qsize() == 12

    def test_the_end_of_one_ends_the_connection(self, worker: ListeningWorker) -> None:
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        with worker.caller() as caller:
            connection = caller.connect(ME, worker.endpoint, reasons.put)
            assert isinstance(connection, SocketConnection)
            assert isinstance(connection._socket, TlsFrameSocket)
            connection.call(Parcel(b"large", (memoryview(bytes(STRIPED)),)), answers.put)
            answers.get(timeout=WAIT_TIMEOUT)
            sending = connection._socket.stripes
            eventually(lambda: len(sending._sockets) == 6, "three connections for each direction")
            next(iter(sending._sockets)).shutdown(socket.SHUT_RDWR)
            connection.call(Parcel(b"large", (memoryview(bytes(STRIPED)),)), answers.put)
            assert reasons.get(timeout=WAIT_TIMEOUT)
        assert worker.answers()

    def test_stripes_of_a_connection_that_is_not_there_are_refused(self, worker: ListeningWorker) -> None:
        with worker.connect_with_token() as sock:
            head = b"stripes 0123"
            sock.sendall(encode_header(OPEN, 0, len(head), []) + head)
            assert closed_by_peer(sock)
        assert worker.answers()


class TestFrames:
    """One who has the token can be wrong, too."""

    @pytest.mark.parametrize(
        "data",
        [
            b"\xff" * 64,
            encode_header(REPLY, 1, 0, []),
            encode_header(RELEASE, 77, 0, []),
            encode_header(REQUEST, 1, 0, [1 << 62]),
            encode_header(REQUEST, 1, 0, [1 << 20], 5),
            encode_header(9, 1, 0, []),
        ],
        ids=["noise", "answer", "release", "too-much", "no-descriptor", "unknown"],
    )
    def test_a_wrong_frame_ends_the_connection_and_no_other(
        self, worker: ListeningWorker, data: bytes
    ) -> None:
        with worker.connect_with_token() as sock:
            sock.sendall(data)
            assert closed_by_peer(sock)
        assert worker.answers()

    def test_a_frame_that_ends_half_way_is_no_request(self, worker: ListeningWorker) -> None:
        whole = encode_header(REQUEST, 1, 100, [50]) + bytes(150)
        for end in (1, 10, len(whole) // 2, len(whole) - 1):
            with worker.connect_with_token() as sock:
                sock.sendall(whole[:end])
                sock.shutdown(socket.SHUT_WR)
                assert closed_by_peer(sock)
        assert worker.requests.empty()
        assert worker.answers()

    def test_a_frame_that_comes_byte_by_byte_is_one_request(self, worker: ListeningWorker) -> None:
        with worker.connect_with_token() as sock:
            for byte in encode_header(REQUEST, 1, 5, [3]) + b"hello" + b"abc":
                sock.sendall(bytes([byte]))
            assert worker.requests.get(timeout=WAIT_TIMEOUT) == b"hello"

    def test_a_descriptor_of_something_else_ends_the_connection(self, tmp_path: Path) -> None:
        worker = ListeningWorker("unix", tmp_path)
        small = os.open(tmp_path / "small", os.O_RDWR | os.O_CREAT)
        before = len(os.listdir("/proc/self/fd"))
        with worker.connect_with_token() as sock:
            socket.send_fds(sock, [encode_header(REQUEST, 1, 0, [1 << 20], 5)], [small])
            assert closed_by_peer(sock)
        assert worker.requests.empty()
        os.close(small)
        eventually(
            lambda: len(os.listdir("/proc/self/fd")) < before, "the descriptor that was sent is closed"
        )
        worker.transport.close()

    def test_a_peer_that_does_not_read_delays_no_other(self, worker: ListeningWorker) -> None:
        with worker.connect_with_token() as sock:
            sock.setblocking(False)
            frame = encode_header(REQUEST, 1, 1 << 16, []) + bytes(1 << 16)
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            data = memoryview(frame * 100)
            while data and poll.poll(200):
                # TLS may have room for less than a record.
                with contextlib.suppress(ssl.SSLWantWriteError):
                    data = data[sock.send(data) :]
            assert worker.answers()


@pytest.fixture(scope="module", params=["socket", "tls"])
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Workers that are processes, over sockets."""
    cluster = Cluster(request.param, tmp_path_factory.mktemp("memory") / "calls")
    yield cluster
    cluster.close()


class TestMemory:
    def test_two_hundred_large_calls_leave_no_descriptors(self, workers: Cluster) -> None:
        role = workers.role(1)
        tensor = torch.ones(1 << 18)

        def exchange(times: int) -> None:
            for _ in range(times):
                assert role.group[0].echo(tensor).sum() == 1 << 18

        exchange(10)
        ours, theirs = len(os.listdir("/proc/self/fd")), role[0].ask("files")
        exchange(200)
        assert len(os.listdir("/proc/self/fd")) <= ours + 2
        assert role[0].ask("files") <= theirs + 2

    def test_results_that_are_kept_keep_their_memory_and_no_descriptors(self, workers: Cluster) -> None:
        role = workers.role(1)
        role.group.echo()
        ours, theirs = len(os.listdir("/proc/self/fd")), role[0].ask("files")
        size = INLINE // 4 + 1
        results = [role.group[0].echo(torch.full((size,), float(n))) for n in range(300)]
        assert all(float(result[-1]) == n for n, result in enumerate(results))
        assert len(os.listdir("/proc/self/fd")) <= ours + MANY + 2
        assert role[0].ask("files") <= theirs + MANY + 2
        results.clear()
        role.group.echo()
        assert role.group[0].echo(torch.ones(size)).sum() == size

    def test_workers_that_come_and_go_leave_no_descriptors(self, workers: Cluster) -> None:
        role = workers.role(1)
        counts = []
        for _ in range(6):
            ref = role.group.hold.call_async("x")
            role[0].expect("holding x")
            role.group.echo.call_async(torch.ones(1 << 20))
            role.kill(0)
            assert ref.exception(WAIT_TIMEOUT) is not None
            role.restart(0)
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[-1] <= counts[1] + 1, counts

    def test_two_threads_may_send_large_things_at_once(self, workers: Cluster) -> None:
        role = workers.role(1)
        wrong: list[int] = []

        def work(name: int) -> None:
            wrong.extend(
                n
                for n in range(25)
                if not bool((role.group[0].echo(torch.full((1 << 17,), n + name)) == n + name).all())
            )

        threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_TIMEOUT)
        assert wrong == []
