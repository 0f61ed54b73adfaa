"""One worker as a caller reaches it: the connection, what is open on it, and what is sent again over the next one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from unirun.errors import CallError, ChannelError
from unirun.roles.calls.dispatcher import ACK
from unirun.roles.calls.envelope import MAX_ACKS, encode_request
from unirun.roles.calls.pending import Call
from unirun.roles.calls.service import Service
from unirun.roles.transport.protocol import Address, Channel, Parcel, Transport

RECONNECT = 0.02
MAX_RECONNECT = 1.0
"""Seconds until a broken connection is made again, the second time and at most; the first time it is made at once."""
LARGE = 1 << 20
"""Bytes from which a result is acked at once: the worker need not keep it until the next call."""


class Peer:
    """One worker's process. Its connection is made with the first call, and again as long as calls are open."""

    def __init__(
        self,
        address: Address,
        endpoint: str,
        *,
        me: bytes,
        transport: Transport,
        service: Service,
        answered: Callable[[Call, Parcel], None],
        failed: Callable[[Call, CallError], None],
    ) -> None:
        """`answered` is called with each answer, in a thread of the transport; `failed`, by `service`, with a call that
        cannot be sent to any worker."""
        self.address, self._endpoint = address, endpoint
        self._me, self._transport, self._service = me, transport, service
        self._answered, self._failed = answered, failed
        # For what sends; answers come without it, so that the reading thread never waits for a sending one.
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._calls: dict[int, Call] = {}
        self._acks: deque[int] = deque()
        self._breaks = 0
        self._gone = False
        self.mending = False
        """Whether it cannot be reached now, and is tried again in a moment."""

    def __len__(self) -> int:
        """How many calls are open."""
        return len(self._calls)

    def send(self, call: Call, generation: int) -> bool:
        """Send a call now, or as soon as there is a connection. False, with nothing sent, when the worker is gone."""
        with self._lock:
            if self._gone:
                return False
            call.generation = generation
            self._calls[call.seq] = call
            if self._channel is not None:
                self._transmit(self._channel, call)
            elif not self.mending:
                self._connect()
        return True

    def forget(self, call: Call) -> None:
        """Its answer is acked and dropped."""
        self._calls.pop(call.seq, None)

    def lose(self) -> list[Call]:
        """The worker is gone. Returns the calls that it owes an answer."""
        with self._lock:
            self._gone = True
            taken = [self._calls.pop(seq, None) for seq in list(self._calls)]
        self.close()
        return [call for call in taken if call is not None]

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _open(self) -> Channel:
        return self._transport.connect(
            self.address, self._endpoint, lambda reason: self._service.soon(self._broke)
        )

    def _connect(self) -> None:
        """Connect, and send all that is open in the order in which it was sent before; later, if that cannot be now."""
        try:
            self._channel = self._open()
        except ChannelError:
            self._connect_later()
            return
        for call in sorted(self._calls.values(), key=lambda call: call.seq):
            self._transmit(self._channel, call)

    def _connect_later(self) -> None:
        self.mending = True
        delay = min(RECONNECT * 2 ** (self._breaks - 1), MAX_RECONNECT) if self._breaks else 0.0
        self._breaks = min(self._breaks + 1, 16)
        self._service.at(self._service.now() + delay, self._mend)

    def _broke(self) -> None:
        """The connection is broken. A worker that lives still has what it owes."""
        with self._lock:
            self._channel = None
            if self._calls and not self._gone and not self.mending:
                self._connect_later()

    def _mend(self) -> None:
        with self._lock:
            self.mending = False
            if self._calls and not self._gone and self._channel is None:
                self._connect()

    def _transmit(self, channel: Channel, call: Call) -> None:
        invoked = call.invocation
        parcel, method = invoked.parcel(call.index), invoked.method.wire
        head = encode_request(
            self._me, call.seq, call.generation, invoked.joint, self._due_acks(), method, parcel.head
        )
        patience, invoked.patience = invoked.patience, None
        try:
            wait = channel.call(Parcel(head, parcel.buffers), partial(self._answer, call), patience)
        except CallError as error:
            # It cannot be sent, which says nothing about the worker.
            self._calls.pop(call.seq, None)
            self._service.soon(partial(self._failed, call, error))
            return
        if wait is not None:
            invoked.ref.wait_with(wait)

    def _answer(self, call: Call, parcel: Parcel) -> None:
        self._breaks = 0
        self._acks.append(call.seq)
        if self._calls.pop(call.seq, None) is call:
            self._answered(call, parcel)
        if parcel.size >= LARGE:
            self._service.soon(self._ack)

    def _ack(self) -> None:
        with self._lock:
            if self._acks and self._channel is not None:
                head = encode_request(self._me, 0, 0, False, self._due_acks(), ACK, b"")
                self._channel.call(Parcel(head), lambda parcel: None)

    def _due_acks(self) -> list[int]:
        """The acks that the next request takes along."""
        if not self._acks:
            return []
        return [self._acks.popleft() for _ in range(min(len(self._acks), MAX_ACKS))]
