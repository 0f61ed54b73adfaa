"""The calling end: ids, deadlines, what is owed by whom, and what happens when a worker is lost.

A call is sent to the worker that holds the rank now; until that serves, it waits. When the connection breaks,
the calls that are open there are sent once more with their ids over a new one: a worker that lives runs nothing
twice and answers with what it has kept. When nobody is there any more, the calls fail with `WorkerLost`, or, in an
idempotent invocation, the whole invocation is made again, with the worker that comes in its place.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unirun.errors import CallError, ChannelError, WorkerLost
from unirun.roles.calls.codec import dump
from unirun.roles.calls.counting import CallBook
from unirun.roles.calls.directory import Directory, Place
from unirun.roles.calls.dispatcher import ACK
from unirun.roles.calls.envelope import encode_address, encode_request
from unirun.roles.calls.pending import Call, Invoked, Method, Peer, called_ranks, lost
from unirun.roles.calls.policy import ANY, Invocation
from unirun.roles.calls.refs import InvocationRef
from unirun.roles.calls.service import Deadlines, Service
from unirun.roles.calls.sharding import rearranged, split
from unirun.roles.transport.protocol import Address, Channel, Parcel, Transport, own
from unirun.wire.reports import Calls

ERROR_GRACE = 0.1
"""Seconds between the first error of a group call and its end: an error in a collective comes a moment before the
news of the death that caused it."""

LARGE = 1 << 20
"""Bytes from which a result is acked at once: the worker need not keep it until the next call."""


class Caller:
    """Makes calls from this process; one per process."""

    def __init__(
        self,
        me: Address,
        directory: Directory,
        transport: Transport,
        *,
        call_timeout: float,
        tell: Callable[[Calls], None] = lambda calls: None,
    ) -> None:
        """`tell` hears now and then, and when `report` is called, what was called so far."""
        self._me = encode_address(me)
        self._directory, self._transport, self._call_timeout = directory, transport, call_timeout
        self._service = Service("unirun-calls")
        self._book = CallBook(self._service, tell)
        self.report = self._book.report
        self._lock = threading.Lock()
        self._peers: dict[Address, Peer] = {}
        self._broken: dict[str, int] = {}
        self._parked: dict[tuple[str, int], deque[Call]] = {}
        self._seqs = itertools.count(1)
        self._heard: dict[tuple[str, int], Peer] = {}
        self._deadlines: dict[float, Deadlines[Invoked]] = {}
        self._turn = itertools.count()
        self._chosen: dict[tuple[str, int], int] = {}
        directory.when_changed(lambda: self._service.soon(self._look))

    def method(self, role: str, name: str, options: Invocation, ranks: Sequence[int] | None = None) -> Method:
        """What `invoke` calls; `ranks` come before the target in `options`.

        Raises `UsageError` for ranks that there are not.
        """
        ranks = called_ranks(role, self._directory.size(role), options, ranks)
        seconds = self._call_timeout if options.timeout is None else options.timeout
        with self._lock:
            if seconds not in self._deadlines:
                self._deadlines[seconds] = Deadlines(seconds, self._service, self._expire)
        return Method(
            role,
            name,
            options,
            ranks,
            workers=tuple(f"{role}:{rank}" for rank in ranks),
            bare=options.one,
            chooses=options.target == ANY,
            deadlines=self._deadlines[seconds],
            wire=name.encode(),
            count=self._book.count(role, name, asynchronous=not options.blocking),
        )

    def invoke(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InvocationRef[Any]:
        """Start a call.

        Raises `EncodingError` for an argument that cannot be pickled, before anything is sent.
        """
        options, ranks, workers = method.options, method.ranks, method.workers
        if method.chooses:
            ranks = (self._least_busy(method.role, ranks),)
            workers = (f"{method.role}:{ranks[0]}",)
        if options.pre_func is not None:
            args, kwargs = rearranged(options.pre_func(*args, **kwargs))
        shares = split(args, kwargs, len(ranks), auto=options.auto_shard)
        what = f"an argument of {method.role}'s {method.name}"
        parcels = [Parcel(*dump(arguments, what)) for arguments in shares.arguments]
        if not options.blocking:
            # The trainer goes on and may change its tensors before they are sent, or sent again.
            parcels = [own(parcel) for parcel in parcels]
        ref: InvocationRef[Any] = InvocationRef(
            method.name, workers, bare=method.bare, post=options.post_func, sharding=shares.sharding
        )
        if len(parcels) > 1 or method.chooses:
            method.count.split = True
        invoked = Invoked(ref, method, parcels, options.retries, time.monotonic())
        invoked.calls = [Call(invoked, i, rank, next(self._seqs)) for i, rank in enumerate(ranks)]
        if options.blocking and len(ranks) == 1:
            invoked.patience = method.deadlines.seconds
        method.deadlines.add(invoked)
        if not options.idempotent and (worker := self._untold(method.role, ranks)):
            for call in invoked.calls:
                reason = f"{worker} was started again since it was called last, what it held is gone"
                self._settle(call, lost(worker, reason))
            return ref
        for call in invoked.calls:
            self._send(call)
        return ref

    def _untold(self, role: str, ranks: Sequence[int]) -> str:
        """A worker that has died since this caller's last call to it, which the caller does not know.

        Every loss is told once, by a call that was open or by the next one: what it finds is not what was there.
        """
        found = ""
        for rank in ranks:
            heard = self._heard.get((role, rank))
            if heard is not None:
                place = self._directory.find(role, rank)
                if place.gone or heard.lost or heard.address.incarnation < place.address.incarnation:
                    found = found or f"{role}:{rank}"
                    del self._heard[role, rank]
        return found

    def connected(self, role: str, rank: int) -> Address:
        """The address of a rank's worker, with a channel to it. Raises `WorkerLost`, `ChannelError`."""
        place = self._directory.find(role, rank)
        if not place.endpoint or place.gone:
            raise WorkerLost(f"{role}:{rank} does not serve calls now", worker=f"{role}:{rank}")
        peer = self._peer(place.address, place.endpoint)
        with peer.lock:
            self._channel(peer)
        return place.address

    def close(self) -> None:
        """End every channel; open calls are not answered any more."""
        self._service.close()
        for peer in list(self._peers.values()):
            if peer.channel is not None:
                peer.channel.close()

    def _least_busy(self, role: str, ranks: Sequence[int]) -> int:
        """The rank with the fewest open calls of this caller; serving ones first, then who was chosen longest ago."""

        def busy(rank: int) -> tuple[bool, int, int]:
            place = self._directory.find(role, rank)
            peer = self._peers.get(place.address)
            waiting = not place.endpoint or place.gone or (peer is not None and peer.lost)
            return waiting, len(peer.calls) if peer else 0, self._chosen.get((role, rank), -1)

        chosen = min(ranks, key=busy)
        self._chosen[role, chosen] = next(self._turn)
        return chosen

    def _send(self, call: Call) -> None:
        """Send a call, or let it wait for its worker, behind those that wait already.

        A call of several workers also waits while one that was lost has no successor: they may have something to do
        together. What they do alone goes on.
        """
        who = call.invocation.method.role, call.rank
        place = self._directory.find(*who)
        # Without the lock: what this thread has sent before either waits by now, or is on its way.
        if who in self._parked or not self._ready(place, call):
            with self._lock:
                place = self._directory.find(*who)
                if who in self._parked or not self._ready(place, call):
                    # Another thread will send it, when the one that waits can no longer be told how.
                    call.invocation.patience = None
                    self._parked.setdefault(who, deque()).append(call)
                    self._service.soon(self._look)
                    return
        self._send_to(place, call)

    def _ready(self, place: Place, call: Call) -> bool:
        """Whether a call need not wait: its worker serves, or never will again."""
        if place.over:
            return True
        peer = self._peers.get(place.address)
        if (
            not place.endpoint
            or place.gone
            or place.address.incarnation <= call.after
            or (peer and peer.lost)
        ):
            return False
        return len(call.invocation.calls) == 1 or place.generation > self._broken.get(place.address.role, -1)

    def _send_to(self, place: Place, call: Call) -> None:
        reason = "it has ended"
        if not place.over:
            peer = self._peer(place.address, place.endpoint)
            try:
                with peer.lock:
                    if peer.lost:
                        raise ChannelError("it is gone")
                    channel = peer.channel or self._channel(peer)
                    call.peer = peer
                    peer.calls[call.seq] = call
                    self._heard.setdefault(place.address[:2], peer)
                    self._transmit(channel, peer, call, place.generation)
                return
            except CallError:
                # It cannot be sent, which says nothing about the worker.
                peer.calls.pop(call.seq, None)
                raise
            except ChannelError as error:
                reason = str(error)
            self._lose(peer, reason)
            if call.peer is not None:
                return
            call.after = place.address.incarnation
        self._settle(call, lost(str(place.address), reason))

    def _peer(self, address: Address, endpoint: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            with self._lock:
                peer = self._peers.setdefault(address, Peer(address, endpoint))
        return peer

    def _channel(self, peer: Peer) -> Channel:
        if peer.channel is None:
            peer.channel = self._transport.connect(
                peer.address,
                peer.endpoint,
                lambda reason: self._service.soon(partial(self._mend, peer, reason)),
            )
        return peer.channel

    def _transmit(self, channel: Channel, peer: Peer, call: Call, generation: int) -> None:
        invoked = call.invocation
        parcel = invoked.parcel(call.index)
        head = encode_request(
            self._me, call.seq, generation, peer.due_acks(), invoked.method.wire, parcel.head
        )
        patience, invoked.patience = invoked.patience, None
        wait = channel.call(Parcel(head, parcel.buffers), partial(self._answered, peer, call), patience)
        if wait is not None:
            invoked.ref.wait_with(wait)

    def _answered(self, peer: Peer, call: Call, parcel: Parcel) -> None:
        peer.breaks = 0
        peer.acks.append(call.seq)
        if peer.calls.pop(call.seq, None) is call:
            invoked = call.invocation
            took = time.monotonic() - invoked.began
            invoked.method.count.add(call.rank, invoked.parcel(call.index).size, parcel.size, took)
            self._settle(call, parcel)
        if parcel.size >= LARGE:
            self._service.soon(partial(self._ack, peer))

    def _ack(self, peer: Peer) -> None:
        with peer.lock:
            if peer.acks and peer.channel is not None:
                head = encode_request(self._me, 0, 0, peer.due_acks(), ACK, b"")
                peer.channel.call(Parcel(head), lambda parcel: None)

    def _mend(self, peer: Peer, reason: str) -> None:
        """A channel is broken. Whoever lives still has what it owes; who is dead is not there any more."""
        with peer.lock:
            peer.channel = None
            peer.breaks += 1
            if peer.lost or not peer.calls:
                return
            place = self._directory.find(peer.address.role, peer.address.rank)
            if peer.breaks < 3 and place.address == peer.address and not place.gone and not place.over:
                try:
                    channel = self._channel(peer)
                    open_calls = list(peer.calls.values())
                    for call in sorted(open_calls, key=lambda call: call.seq):
                        self._transmit(channel, peer, call, place.generation)
                    return
                except ChannelError as error:
                    reason = str(error)
        self._lose(peer, reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        """The worker is dead: what it owes will not come."""
        place = self._directory.find(*peer.address[:2])
        if not peer.lost and place.address == peer.address and not place.over:
            self._broken[peer.address.role] = place.generation
        with peer.lock:
            peer.lost = True
            taken = [peer.calls.pop(seq, None) for seq in list(peer.calls)]
            calls = [call for call in taken if call is not None]
            channel, peer.channel = peer.channel, None
        if channel is not None:
            channel.close()
        for call in calls:
            call.after = peer.address.incarnation
            if not call.invocation.retries:
                self._heard.pop(peer.address[:2], None)
            self._settle(call, lost(str(peer.address), reason))

    def _look(self) -> None:
        """The directory has changed: send what waited, and give up what waits for the dead."""
        with self._lock:
            waiting = list(self._parked)
            peers = list(self._peers.values())
        for peer in peers:
            place = self._directory.find(peer.address.role, peer.address.rank)
            if place.address != peer.address or place.gone or place.over:
                self._lose(peer, "was started again" if place.address != peer.address else "is gone")
                if place.address != peer.address:
                    self._peers.pop(peer.address, None)
        for who in waiting:
            self._send_parked(who)

    def _send_parked(self, who: tuple[str, int]) -> None:
        """Send what waits for one rank, in order; what comes meanwhile queues up behind it."""
        while True:
            place = self._directory.find(*who)
            with self._lock:
                queue = self._parked[who]
                while queue and queue[0].invocation.ref.done():
                    queue.popleft()
                if not queue:
                    del self._parked[who]
                    return
                if not self._ready(place, queue[0]):
                    return
                call = queue.popleft()
            self._send_to(place, call)

    def _settle(self, call: Call, outcome: Parcel | WorkerLost) -> None:
        invoked = call.invocation
        ref = invoked.ref
        ref.settle(call.index, outcome)
        if ref.settled:
            if ref.failed and invoked.retries > 0 and ref.interrupted:
                self._service.soon(partial(self._again, invoked, invoked.attempt))
            else:
                self._finish(invoked)
        elif ref.failed and not invoked.failing:
            invoked.failing = True
            grace = time.monotonic() + ERROR_GRACE
            self._service.at(grace, partial(self._fail, invoked, invoked.attempt))

    def _fail(self, invoked: Invoked, attempt: int) -> None:
        """A moment after the first error. When the call will be made again, all must have left it first."""
        if attempt == invoked.attempt and not (invoked.retries > 0 and invoked.ref.interrupted):
            self._finish(invoked)

    def _again(self, invoked: Invoked, attempt: int) -> None:
        if invoked.ref.done() or attempt != invoked.attempt:
            return
        invoked.attempt += 1
        invoked.retries -= 1
        invoked.failing = False
        invoked.ref.start_again()
        for call in invoked.calls:
            call.seq, call.peer = next(self._seqs), None
        for call in list(invoked.calls):
            self._send(call)

    def _finish(self, invoked: Invoked) -> None:
        invoked.method.deadlines.drop(invoked)
        self._forget(invoked)
        invoked.ref.finish()
        invoked.untie()

    def _expire(self, invoked: Invoked) -> None:
        self._forget(invoked)
        invoked.ref.expire(invoked.method.deadlines.seconds)
        invoked.untie()

    def _forget(self, invoked: Invoked) -> None:
        """Answers that still come are acked and dropped."""
        if invoked.ref.settled:
            return
        for call in invoked.calls:
            if call.peer is not None:
                call.peer.calls.pop(call.seq, None)
