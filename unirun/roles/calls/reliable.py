"""`ReliableConnection`: to one worker; it is opened again when it breaks, and the open calls are sent again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from unirun.errors import CallError, ChannelError
from unirun.roles.calls.call import Call
from unirun.roles.calls.codec import ACK, GIVE_UP, MAX_ACKS, encode_giving_up, encode_request
from unirun.roles.transport.protocol import Connection, Parcel, Scheduler, Transport
from unirun.values import WorkerId

RECONNECT_DELAY = 0.02
MAX_RECONNECT_DELAY = 1.0
"""Seconds until a broken connection is opened again, the second time and at most; the first time is at once."""
LARGE = 1 << 20
"""Bytes from which a result is acked at once: the worker need not keep it until the next call."""

Part = tuple[Call, int]
"""A call, and the index of the worker in it."""


class ReliableConnection:
    """A connection to one worker's process. It is opened with the first call, and again as long as calls are open, or
    are given up and the worker may not know it."""

    def __init__(
        self,
        address: WorkerId,
        endpoint: str,
        *,
        me: bytes,
        transport: Transport,
        scheduler: Scheduler,
        answered: Callable[[Call, int, Parcel], None],
        failed: Callable[[Call, int, CallError], None],
    ) -> None:
        """`answered` is called with each answer, in a thread of the transport; `failed`, by `scheduler`, with a call
        that cannot be sent to any worker. Both get the index of this worker in the call."""
        self.address, self._endpoint = address, endpoint
        self._me, self._transport, self._scheduler = me, transport, scheduler
        self._answered, self._failed = answered, failed
        # Held while sending. Answers are taken without it, so that the reading thread never waits for a sending one.
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._parts: dict[int, Part] = {}
        self._acks: deque[int] = deque()
        # Those that a request has taken along which is not answered yet: they are lost if the connection breaks.
        self._unproved: set[tuple[int, ...]] = set()
        # By number, the calls that are given up and not answered; True if another worker of the call was lost.
        self._given_up: dict[int, bool] = {}
        self._breaks = 0
        self._gone = False
        self.reconnecting = False
        """True if the worker cannot be reached now; the next attempt is in a moment."""

    def __len__(self) -> int:
        """The number of open calls."""
        return len(self._parts)

    @property
    def _owes(self) -> bool:
        """True if there is something that the worker must be told."""
        return bool(self._parts or self._given_up)

    def send(self, call: Call, index: int) -> bool:
        """Send a call now, or as soon as there is a connection. False, with nothing sent, when the worker is gone."""
        with self._lock:
            if self._gone:
                return False
            self._parts[call.seq] = call, index
            if self._connection is not None:
                self._transmit(self._connection, call.seq, call, index)
            elif not self.reconnecting:
                self._connect()
        return True

    def forget(self, call: Call, *, lost: bool = False) -> None:
        """Do not send a call again; its answer is acked and dropped. The caller may change its arguments."""
        connection = self._connection
        if self._parts.pop(call.seq, None) is not None:
            if connection is not None:
                connection.keep()
            self.give_up(call.seq, lost=lost)

    def give_up(self, seq: int, *, lost: bool) -> None:
        """Tell the worker, now or as soon as there is a connection, that its result of a call is no longer waited for;
        `lost`: another worker of the call was lost, so the call need not begin."""
        self._given_up[seq] = lost or self._given_up.get(seq, False)
        self._scheduler.soon(partial(self._tell, GIVE_UP, encode_giving_up(seq, lost=lost)))

    def lose(self) -> list[Part]:
        """The worker is gone: close the connection. Returns the calls that were not answered."""
        with self._lock:
            self._gone = True
            self._given_up.clear()
            taken = [self._parts.pop(seq, None) for seq in list(self._parts)]
        self.close()
        return [part for part in taken if part is not None]

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> None:
        """Connect, and send all open calls in the order in which they were sent, and what was given up; later, if
        there is no answer."""
        try:
            self._connection = self._transport.connect(
                self.address, self._endpoint, lambda reason: self._scheduler.soon(self._broke)
            )
        except ChannelError:
            self._connect_later()
            return
        for seq, (call, index) in sorted(self._parts.items()):
            self._transmit(self._connection, seq, call, index)
        for seq, lost in list(self._given_up.items()):
            then = None if seq in self._parts else partial(self._forgotten, seq)
            self._request(self._connection, GIVE_UP, encode_giving_up(seq, lost=lost), then)

    def _forgotten(self, seq: int) -> None:
        """The worker knows that a call is given up whose answer would come over an earlier connection."""
        self._given_up.pop(seq, None)
        self._acks.append(seq)

    def _connect_later(self) -> None:
        self.reconnecting = True
        delay = min(RECONNECT_DELAY * 2 ** (self._breaks - 1), MAX_RECONNECT_DELAY) if self._breaks else 0.0
        self._breaks = min(self._breaks + 1, 16)
        self._scheduler.at(self._scheduler.now() + delay, self._reconnect)

    def _broke(self) -> None:
        """The connection is broken. A worker that lives still has the results that it owes."""
        with self._lock:
            self._connection = None
            unproved, self._unproved = self._unproved, set()
            for acks in list(unproved):
                self._acks.extend(acks)
            if self._owes and not self._gone and not self.reconnecting:
                self._connect_later()

    def _reconnect(self) -> None:
        with self._lock:
            self.reconnecting = False
            if self._owes and not self._gone and self._connection is None:
                self._connect()

    def _transmit(self, connection: Connection, seq: int, call: Call, index: int) -> None:
        parcel = call.parcel(index)
        if parcel is None:
            # The call is over.
            self._parts.pop(seq, None)
            return
        acks = self._due_acks()
        head = encode_request(
            self._me, seq, call.generation, call.joint, acks, call.prepared.wire, parcel.head
        )
        patience, call.patience = call.patience, None
        try:
            call.fetch = connection.call(
                Parcel(head, parcel.buffers), partial(self._answer, seq, acks), patience
            )
        except CallError as error:
            # It cannot be sent, which says nothing about the worker.
            self._unproved.discard(acks)
            self._acks.extend(acks)
            self._parts.pop(seq, None)
            self._scheduler.soon(partial(self._failed, call, index, error))
            return

    def _answer(self, seq: int, acks: tuple[int, ...], parcel: Parcel) -> None:
        self._breaks = 0
        self._unproved.discard(acks)
        self._acks.append(seq)
        self._given_up.pop(seq, None)
        part = self._parts.pop(seq, None)
        if part is not None:
            self._answered(*part, parcel)
        if parcel.size >= LARGE:
            self._scheduler.soon(self._ack)

    def _ack(self) -> None:
        if self._acks:
            self._tell(ACK, b"")

    def _tell(self, method: bytes, body: bytes) -> None:
        with self._lock:
            if self._connection is not None:
                self._request(self._connection, method, body)

    def _request(
        self, connection: Connection, method: bytes, body: bytes, then: Callable[[], None] | None = None
    ) -> None:
        """Send a request of the connection itself; `then` is called when it was answered."""
        acks = self._due_acks()

        def answered(parcel: Parcel) -> None:
            self._unproved.discard(acks)
            if then is not None:
                then()

        connection.call(Parcel(encode_request(self._me, 0, 0, False, acks, method, body)), answered)

    def _due_acks(self) -> tuple[int, ...]:
        """The acks that the next request takes along."""
        if not self._acks:
            return ()
        acks = tuple(self._acks.popleft() for _ in range(min(len(self._acks), MAX_ACKS)))
        self._unproved.add(acks)
        return acks
