"""The calling end: ids, deadlines, what is owed by whom, and what happens when a worker is lost.

A call is sent to the worker that holds the rank now; until that serves, it waits. Only the directory, which the job's
master writes, says who is dead. When a connection breaks, it is made again until the directory says that the worker is
gone, and the open calls are sent once more with their ids: a worker that lives runs nothing twice and answers with what
it has kept. When a worker is gone, its calls fail with `WorkerLost`, or, in an idempotent invocation, the whole
invocation is made again, with the worker that comes in its place.

The calls of one invocation to several workers are joint: they may meet in a collective. They are all sent for one
generation of the role, and a worker that is in a later one refuses its part.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from unirun.errors import CallError, WorkerLost
from unirun.roles.calls.codec import dump
from unirun.roles.calls.counting import CallBook
from unirun.roles.calls.directory import Directory, Place
from unirun.roles.calls.dispatcher import OPEN_RPC
from unirun.roles.calls.envelope import encode_address, refused_for
from unirun.roles.calls.losses import Losses
from unirun.roles.calls.peer import Peer
from unirun.roles.calls.pending import Call, Invoked, Method, called_ranks, lost
from unirun.roles.calls.policy import ANY, DEFAULT, Invocation
from unirun.roles.calls.refs import InvocationRef
from unirun.roles.calls.service import Deadlines, Service
from unirun.roles.calls.sharding import rearranged, split
from unirun.roles.transport.executor import SerialExecutor
from unirun.roles.transport.protocol import Address, Parcel, Transport, own
from unirun.wire.reports import Calls

ERROR_GRACE = 0.1
"""Seconds between the first error of a group call and its end: an error in a collective comes a moment before the
news of the death that caused it."""


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
        service: Service | None = None,
    ) -> None:
        """`tell` hears now and then, and when `report` is called, what was called so far. `service` has the clock."""
        self._me = encode_address(me)
        self._directory, self._transport, self._call_timeout = directory, transport, call_timeout
        self._service = service or Service("unirun-calls")
        self._callbacks = SerialExecutor("unirun-callbacks")
        self._deliver = self._callbacks.submit
        self._book = CallBook(self._service, tell)
        self.report = self._book.report
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._order: dict[str, threading.RLock] = defaultdict(threading.RLock)
        self._peers: dict[Address, Peer] = {}
        self._parked: dict[tuple[str, int], deque[Call]] = {}
        self._refused: list[tuple[Call, int]] = []
        self._seqs = itertools.count(1)
        self._losses = Losses(directory, restarted=me.incarnation > 0)
        self._deadlines: dict[float, Deadlines[Invoked]] = {}
        self._opened: dict[Address, str] = {}
        self._turn = itertools.count()
        self._turns: dict[str, dict[int, int]] = defaultdict(dict)
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
            turns=self._turns[role],
        )

    def invoke(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InvocationRef[Any]:
        """Start a call.

        Raises `EncodingError` for an argument that cannot be pickled, before anything is sent.
        """
        options, ranks, workers = method.options, method.ranks, method.workers
        if method.chooses:
            ranks = (self._least_busy(method),)
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
            method.name,
            workers,
            bare=method.bare,
            post=options.post_func,
            sharding=shares.sharding,
            deliver=self._deliver,
        )
        if len(parcels) > 1 or method.chooses:
            method.count.split = True
        invoked = Invoked(ref, method, parcels, options.retries, self._service.now(), joint=len(ranks) > 1)
        invoked.calls = [Call(invoked, i, rank) for i, rank in enumerate(ranks)]
        if options.blocking and len(ranks) == 1:
            invoked.patience = method.deadlines.seconds
        method.deadlines.add(invoked)
        if not options.idempotent:
            invoked.untold = self._losses.tell(method.role, ranks)
        if invoked.untold:
            for call in list(invoked.calls):
                self._settle(call, _gone_since(invoked.untold))
        else:
            self._send_all(invoked)
        return ref

    def open_rpc(self, role: str, rank: int) -> tuple[Address, str]:
        """Let the worker of a rank be called by torch.distributed.rpc: who it is, and the endpoint of its agent. Raises
        what a call raises."""
        place = self._directory.find(role, rank)
        address = place.address
        if not place.endpoint or address not in self._opened:
            method = self.method(role, OPEN_RPC, replace(DEFAULT, target=rank, idempotent=True, retries=3))
            address, endpoint = self.invoke(method, (), {}).result()
            self._opened[address] = endpoint
        return address, self._opened[address]

    def close(self) -> None:
        """End every channel; open calls are not answered any more."""
        self._service.close()
        for peer in list(self._peers.values()):
            peer.close()
        self._callbacks.close()

    def _least_busy(self, method: Method) -> int:
        """The rank with the fewest open calls of this caller; serving ones first, then who was chosen longest ago."""

        def busy(rank: int) -> tuple[bool, int, int]:
            place = self._directory.find(method.role, rank)
            peer = self._peers.get(place.address)
            return not place.endpoint, len(peer) if peer else 0, method.turns.get(rank, -1)

        chosen = min(method.ranks, key=busy)
        method.turns[chosen] = next(self._turn)
        return chosen

    def _send_all(self, invoked: Invoked) -> None:
        """Send every call of an invocation. Joint ones come in one order to all workers of a role."""
        if not invoked.joint:
            for call in invoked.calls:
                call.seq = next(self._seqs)
                self._send(call)
            return
        with self._order[invoked.method.role]:
            for call in invoked.calls:
                call.seq = next(self._seqs)
            for call in list(invoked.calls):
                self._send(call)

    def _send(self, call: Call) -> None:
        """Send a call, or let it wait for its worker, behind those that wait already.

        A joint call also waits while a rank of the role is without a worker. What workers do alone goes on.
        """
        who = call.invocation.method.role, call.rank
        place = self._directory.find(*who)
        # Without the lock: what this thread has sent before either waits by now, or is on its way.
        if who in self._parked or not _ready(place, call):
            with self._lock:
                place = self._directory.find(*who)
                if who in self._parked or not _ready(place, call):
                    # Another thread will send it, when the one that waits can no longer be told how.
                    call.invocation.patience = None
                    self._parked.setdefault(who, deque()).append(call)
                    self._service.soon(self._look)
                    return
        self._send_to(place, call)

    def _send_to(self, place: Place, call: Call) -> None:
        invoked, worker = call.invocation, str(place.address)
        if place.over:
            self._settle(call, _ended(worker))
            return
        generation = self._started(invoked, place)
        if invoked.untold:
            self._settle(call, _gone_since(invoked.untold))
            return
        if invoked.joint and generation != place.generation:
            self._settle(call, self._outdated(call, place, generation))
            return
        self._losses.call(place.address)
        call.peer = self._peer(place)
        if not call.peer.send(call, place.generation):
            self._losses.told(place.address)
            self._settle(call, lost(worker, "it is gone"))

    def _started(self, invoked: Invoked, place: Place) -> int:
        """The generation for which the calls of an invocation are sent: that of the first one. Before that is sent, a
        worker may have died while it waited."""
        with self._starting:
            if invoked.generation is None:
                invoked.generation = place.generation
                if not invoked.method.options.idempotent:
                    invoked.untold = self._losses.tell(invoked.method.role, invoked.ranks)
            return invoked.generation

    def _outdated(self, call: Call, place: Place, generation: int) -> WorkerLost:
        """The error of a joint call that was made for an earlier `generation` than that of `place`: a rank was lost
        meanwhile. It is told by this."""
        invoked = call.invocation
        worker = "" if invoked.retries else self._losses.tell(invoked.method.role, invoked.ranks)
        reason = f"its role has formed generation {place.generation}, and the call was made for {generation}"
        return lost(worker or str(place.address), reason)

    def _peer(self, place: Place) -> Peer:
        address = place.address
        peer = self._peers.get(address)
        if peer is None:
            fresh = Peer(
                address,
                place.endpoint,
                me=self._me,
                transport=self._transport,
                service=self._service,
                answered=self._answered,
                failed=self._settle,
            )
            with self._lock:
                peer = self._peers.setdefault(address, fresh)
            if self._directory.find(address.role, address.rank) != place:
                # The directory changed before this peer was there to be lost.
                self._service.soon(self._look)
        return peer

    def _answered(self, call: Call, parcel: Parcel) -> None:
        if (generation := refused_for(parcel.head)) is not None:
            self._service.soon(partial(self._was_refused, call, generation))
            return
        invoked = call.invocation
        took = self._service.now() - invoked.began
        invoked.method.count.add(call.rank, invoked.parcel(call.index).size, parcel.size, took)
        self._settle(call, parcel)

    def _was_refused(self, call: Call, generation: int) -> None:
        """A worker is in a later `generation` than the one that the call was made for. When the directory knows that
        one, it tells who was lost."""
        invoked = call.invocation
        place = self._directory.find(invoked.method.role, call.rank)
        if invoked.ref.done():
            return
        if place.generation < generation and not place.over:
            self._refused.append((call, generation))
        else:
            self._settle(call, self._outdated(call, place, call.generation))

    def _lose(self, peer: Peer, place: Place) -> None:
        """The worker is dead, or has ended: what it owes will not come. `place` is what the directory says."""
        worker = str(peer.address)
        for call in peer.lose():
            if not call.invocation.retries:
                self._losses.told(peer.address)
            reason = "it died" if place.gone else "it was started again"
            self._settle(call, _ended(worker) if place.over else lost(worker, reason))

    def _look(self) -> None:
        """The directory has changed: send what waited, and give up what waits for the dead."""
        with self._lock:
            waiting = list(self._parked)
            peers = list(self._peers.values())
        for peer in peers:
            place = self._directory.find(peer.address.role, peer.address.rank)
            if place.address != peer.address or place.gone or place.over:
                self._lose(peer, place)
                if place.address != peer.address:
                    self._peers.pop(peer.address, None)
        refused, self._refused = self._refused, []
        for call, generation in refused:
            self._was_refused(call, generation)
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
                if not _ready(place, queue[0]):
                    return
                call = queue.popleft()
            self._send_to(place, call)

    def _settle(self, call: Call, outcome: Parcel | CallError) -> None:
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
            self._fail_later(invoked)

    def _fail_later(self, invoked: Invoked) -> None:
        self._service.at(self._service.now() + ERROR_GRACE, partial(self._fail, invoked, invoked.attempt))

    def _fail(self, invoked: Invoked, attempt: int) -> None:
        """A moment after the first error. When the call will be made again, all must have left it first."""
        if attempt != invoked.attempt or (invoked.retries > 0 and invoked.ref.interrupted):
            return
        unreached = (call for call in invoked.calls if call.peer is None or call.peer.mending)
        if any(not invoked.ref.has(call.index) for call in unreached):
            # A worker that has not answered cannot be reached: perhaps it is dead, which would be the cause.
            self._fail_later(invoked)
            return
        self._finish(invoked)

    def _again(self, invoked: Invoked, attempt: int) -> None:
        if invoked.ref.done() or attempt != invoked.attempt:
            return
        invoked.attempt += 1
        invoked.retries -= 1
        invoked.failing = False
        invoked.generation = None
        invoked.ref.start_again()
        for call in invoked.calls:
            call.peer = None
        self._send_all(invoked)

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
                call.peer.forget(call)


def _ended(worker: str) -> WorkerLost:
    return lost(worker, "it has ended", "it takes no calls any more; call other workers")


def _gone_since(worker: str) -> WorkerLost:
    return lost(worker, f"{worker} was started again since it was called last, what it held is gone")


def _ready(place: Place, call: Call) -> bool:
    """Whether a call need not wait: its worker serves, or never will again."""
    if place.over:
        return True
    if not place.endpoint:
        return False
    return place.whole or not call.invocation.joint
