"""Publishers and receivers in one process, which talk over sockets as in a job."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT
from unirun.roles.transport.protocol import Handler, Parcel, Reply
from unirun.roles.transport.socket_transport import SocketTransport
from unirun.values import WorkerId
from unirun.weights.hub import Holder, request_of
from unirun.weights.messages import WEIGHTS, Request
from unirun.weights.publishing import Publisher
from unirun.weights.receiving import Receiver
from unirun.weights.sources import PeerConnection, RemoteSource, VersionFile
from unirun.weights.tensors import Weights, assigner, targets_of, tensors_of
from unirun.wire.handshake import new_token

_numbers = itertools.count()


class WeightsHarness:
    """A folder for the sockets of processes that share a token; publishers listen there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._token, self._stack = folder, new_token(), ExitStack()
        self._listening: list[SocketTransport] = []
        self.sent = 0
        """Bytes of tensors that publishers have sent, without memory that was lent."""

    def _transport(self, node: str, *, tcp: bool) -> SocketTransport:
        credentials = credentials_in(self._folder / node, self._token, node, tls=tcp)
        addr = "127.0.0.1" if tcp else ""
        transport = SocketTransport(self._folder / node / "weights", credentials, addr)
        self._stack.callback(transport.close)
        return transport

    def publisher(self, rank: int = 0, *, tcp: bool = False) -> tuple[Publisher, str]:
        """A publisher, and where it listens: on this host, or as if on another one."""
        publisher = Publisher("policy")
        self._stack.callback(publisher.close)

        def handle(parcel: Parcel, reply: Reply) -> None:
            request = request_of(parcel.head)
            assert isinstance(request, Request)

            def counted(answer: Parcel) -> None:
                self.sent += sum(buffer.nbytes for buffer in answer.buffers)
                reply(answer)

            publisher.handle(request, counted)

        return publisher, self.serve(WorkerId("actor", rank, 0), handle, tcp=tcp)

    def serve(self, who: WorkerId, handle: Handler, *, tcp: bool = False) -> str:
        """Let `handle` answer what `who` is asked. Returns where."""
        transport = self._transport(f"p{next(_numbers)}", tcp=tcp)
        self._listening.append(transport)
        return transport.serve(who, handle, WEIGHTS)

    def line(self, who: WorkerId, endpoint: str, *, tcp: bool = False) -> PeerConnection:
        """A connection from a process of its own."""
        line = PeerConnection(who, self._transport(f"r{next(_numbers)}", tcp=tcp), endpoint)
        self._stack.callback(line.close)
        return line

    def end_publishers(self) -> None:
        """End the publishers' connections, as their death does."""
        for transport in self._listening:
            transport.close()

    def holders(self, *receivers: ReceiverHarness, tcp: bool = False) -> list[RemoteSource]:
        """The readers, as somebody sees them who was started later."""
        found = []
        for rank, receiver in enumerate(receivers):
            who = WorkerId("rollout", rank, 0)

            def handle(parcel: Parcel, reply: Reply, holder: Holder = receiver.holder) -> None:
                request = request_of(parcel.head)
                assert isinstance(request, Request)
                holder.handle(request, reply)

            line = self.line(who, self.serve(who, handle, tcp=tcp), tcp=tcp)
            found.append(RemoteSource("policy", line, "rollout:late", holder=True))
        return found

    def neighbours(self, count: int, *endpoints: str) -> list[ReceiverHarness]:
        """Receivers on another host than these publishers, who give to each other what they get."""
        receivers = [self.receiver(*endpoints, tcp=True, host="h1") for _ in range(count)]
        for receiver in receivers:
            for other, source in zip(receivers, self.holders(*receivers), strict=True):
                if other is not receiver:
                    receiver.others[other.name] = source
        return receivers

    def receiver(self, *endpoints: str, tcp: bool = False, host: str = "") -> ReceiverHarness:
        """A receiver that is connected to these publishers."""
        number = next(_numbers)
        transport = self._transport(f"r{number}", tcp=tcp)
        sources = [
            RemoteSource(
                "policy",
                PeerConnection(WorkerId("actor", rank, 0), transport, endpoint),
                f"rollout:{number}",
                here=transport.is_here(endpoint),
                host=host,
            )
            for rank, endpoint in enumerate(endpoints)
        ]
        for source in sources:
            self._stack.callback(source.line.close)
        return ReceiverHarness(sources, f"rollout:{number}")

    def close(self) -> None:
        """End all of it."""
        self._stack.close()


class ReceiverHarness:
    """A receiver and its connections."""

    def __init__(self, sources: Sequence[RemoteSource], name: str) -> None:
        self.name = name
        self.others: dict[str, RemoteSource] = {}
        self.sources, self.holder = sources, Holder(lambda _: self.publishers_have_ended)
        self.publishers_have_ended = False
        self._receiver = Receiver("policy", 0, self.holder, self.others.get)

    def receive(
        self,
        into: Weights,
        at_least: int = 0,
        within: float = WAIT_TIMEOUT,
        *,
        assign: bool = False,
        eta: float = 1.0,
    ) -> int:
        """As `WeightsChannel.receive`."""
        deadline, setter = time.monotonic() + within, assigner(into) if assign else None
        target = self._receiver.target(targets_of(into, eta), deadline, setter, eta)
        return self._receiver.receive(self.sources, target, at_least)

    def receive_held(self, holders: Sequence[RemoteSource], into: Weights, at_least: int = 0) -> int | None:
        """As `Receiver.receive_held`."""
        target = self._receiver.target(tensors_of(into), time.monotonic() + WAIT_TIMEOUT)
        return self._receiver.receive_held(holders, target, at_least)

    def borrow(self, at_least: int, within: float = WAIT_TIMEOUT) -> tuple[int, VersionFile]:
        """As `Receiver.borrow`, of what is there as a file."""
        found = self._receiver.borrow(self.sources, at_least, time.monotonic() + within)
        assert found is not None
        return found

    def latest(self) -> int:
        """As `Receiver.latest`."""
        return self._receiver.latest(self.sources, time.monotonic() + WAIT_TIMEOUT)


@contextmanager
def weights_harness(folder: Path) -> Iterator[WeightsHarness]:
    """A harness that ends with the block."""
    made = WeightsHarness(folder)
    try:
        yield made
    finally:
        made.close()
