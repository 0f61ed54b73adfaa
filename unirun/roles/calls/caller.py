"""The calling end: ids, deadlines, which worker owes an answer, and what happens when a worker is lost.

A call is sent to the worker that holds the rank now; until that serves, the call waits. Only the job's master says
who is dead, and `Peers` has its word. When a connection breaks, it is opened again until the worker is known to be
gone, and the open calls are sent once more with their ids: a worker that lives runs nothing twice and answers with the
result that it has kept. When a worker is gone, its calls fail with `WorkerLost`. An idempotent call is made again as a
whole, with the worker that comes in its place.

A call to several workers, or to all of a role that may have several, is joint: its parts may meet in a collective. They
are all sent for one generation of the role, and a worker that is in a later one refuses its part.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from unirun.errors import CallError, EncodingError, WorkerLost
from unirun.observe.spans import spans
from unirun.roles.calls.call import Call, CallBook, InvocationRef, Method, span_of
from unirun.roles.calls.codec import (
    DESCRIBE,
    OPEN_RPC,
    dump,
    encode_address,
    refused_for,
)
from unirun.roles.calls.policy import ANY, DEFAULT, Invocation, called_ranks, rearranged, split
from unirun.roles.calls.reliable import Part, ReliableConnection
from unirun.roles.calls.sending import named_arguments, unsendable
from unirun.roles.peers import Peer, Peers
from unirun.roles.transport.protocol import Parcel, Scheduler, Transport, own
from unirun.values import WorkerId
from unirun.wire.messages import RoleView
from unirun.wire.reports import Calls

# The losses of workers that a caller has reported.
#
# Each is reported once: by a call that was open, or by the next one.


class ReportedLosses:
    """The incarnation of each rank up to which losses are reported, for the ranks that were called.

    A worker that has died since its last call is not the one that was called: the state of that one is lost.
    """

    def __init__(self, peers: Peers, *, restarted: bool) -> None:
        """A caller that was `restarted` does not know what its predecessor reported: it begins at incarnation 0."""
        self._peers = peers
        self._first = 0 if restarted else None
        self._lock = threading.Lock()
        self._incarnations: dict[tuple[str, int], int] = {}

    def called(self, address: WorkerId) -> None:
        """A call is sent to the worker at `address`."""
        if self._first is None:
            self._incarnations.setdefault(address[:2], address.incarnation)

    def reported(self, address: WorkerId) -> None:
        """A call fails with the loss of the worker at `address`."""
        with self._lock:
            self._incarnations[address[:2]] = max(
                self._incarnations.get(address[:2], 0), address.incarnation + 1
            )

    def report(self, role: str, ranks: Sequence[int]) -> str:
        """The name of the first of `ranks` with a loss that is not reported, or "". All count as reported then."""
        found = ""
        with self._lock:
            for rank in ranks:
                known = self._incarnations.get((role, rank), self._first)
                if known is not None:
                    peer = self._peers.find(role, rank)
                    incarnation = peer.address.incarnation + peer.gone
                    if known < incarnation:
                        found = found or f"{role}:{rank}"
                        self._incarnations[role, rank] = incarnation
        return found


T = TypeVar("T")


class Deadlines(Generic[T]):
    """A FIFO of items that share one timeout: they expire in the order in which they were added.

    So the scheduler looks at the first item only, and an item that is dropped in time costs it nothing.
    """

    def __init__(self, seconds: float, scheduler: Scheduler, late: Callable[[T], None]) -> None:
        """`late` is called, by `scheduler`, with what was not dropped `seconds` after it was added."""
        self.seconds = seconds
        self._scheduler, self._late = scheduler, late
        self._open: dict[T, float] = {}
        self._lock = threading.Lock()
        self._watched = False

    def add(self, item: T) -> None:
        """Add `item`; its timeout begins."""
        self._open[item] = self._scheduler.now() + self.seconds
        if not self._watched:
            self._watch()

    def drop(self, item: T) -> None:
        """Forget `item`, which was in time or has expired already."""
        self._open.pop(item, None)

    def __iter__(self) -> Iterator[T]:
        """Those that are neither dropped nor late."""
        return iter(list(self._open))

    def _watch(self) -> None:
        with self._lock:
            if self._watched:
                return
            self._watched = True
        self._scheduler.at(self._scheduler.now() + self.seconds, self._look)

    def _look(self) -> None:
        for item in list(self._open):
            when = self._open.get(item)
            if when is not None and when > self._scheduler.now():
                self._scheduler.at(when, self._look)
                return
            if when is not None:
                self.drop(item)
                self._scheduler.soon(partial(self._late, item))
        self._watched = False
        # `add` starts no watch while this function runs, so what was added meanwhile needs one now.
        if self._open:
            self._watch()


GROWTH_TIMEOUT = 5.0
"""Seconds in which a role must begin to grow that is at a boundary. The next call waits for that."""

_SETTLED = ("running", "succeeded", "failed", "stopped")
"""The phases of roles that neither start nor recover."""

GROUP_ERROR_DELAY = 0.1
"""Seconds between the first error of a group call and its end: an error in a collective comes a moment before the
news of the death that caused it."""


class Caller:
    """Makes calls from this process; one per process."""

    def __init__(
        self,
        me: WorkerId,
        peers: Peers,
        transport: Transport,
        *,
        call_timeout: float,
        tell: Callable[[Calls], None] = lambda calls: None,
        boundary: Callable[[str], None] | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        """`tell` gets now and then, and when `report` is called, what was called so far. `boundary` is called with a
        role that is to grow when no call to it is open; a trainer has one. `scheduler` has the clock."""
        self._me = encode_address(me)
        self._name = str(me)
        self._spans = spans()
        self._peers, self._transport, self._call_timeout = peers, transport, call_timeout
        self._scheduler = scheduler or Scheduler("unirun-calls")
        self._callbacks = Scheduler("unirun-callbacks")
        self._book = CallBook(self._scheduler, tell)
        self.report = self._book.report
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._order: dict[str, threading.RLock] = defaultdict(threading.RLock)
        self._connections: dict[WorkerId, ReliableConnection] = {}
        self._parked: dict[tuple[str, int], deque[Part]] = {}
        self._refused: list[tuple[Call, int, int]] = []
        self._boundary = boundary
        # The ranks of each role as of the latest call, and the generation that has them. A thread that updates them
        # holds the lock; they may be outdated when a view has come since.
        self._ranks: dict[str, list[int]] = {}
        self._formed: dict[str, int] = {}
        self._following = threading.Lock()
        self._views, self._outdated_ranks = 0, False
        self._closed = False
        self._seqs = itertools.count(1)
        self._losses = ReportedLosses(peers, restarted=me.incarnation > 0)
        self._deadlines: dict[float, Deadlines[Call]] = {}
        # The time until which a rank of a role was debugged, infinite while one is.
        self._debugged: dict[str, float] = {}
        self._opened: dict[WorkerId, str] = {}
        self._turn = itertools.count()
        self._turns: dict[str, dict[int, int]] = defaultdict(dict)
        self.described: dict[str, Mapping[str, Invocation]] = {}
        """The methods of the workloads of those roles of which they are known."""
        peers.when_changed(self._changed)

    def ranks(self, role: str, size: int) -> list[int]:
        """The ranks of a role, now `size`. All groups of the whole role have this list, which changes between calls."""
        view, found = self._peers.view(role), self._ranks.setdefault(role, [])
        found[:] = range(size)
        self._formed[role] = view.generation if view is not None else 0
        return found

    def _changed(self) -> None:
        self._views += 1
        self._outdated_ranks = True
        self._scheduler.soon(self._look)

    def _follow_sizes(self) -> None:
        """Let roles grow that are at a boundary, and take over the numbers of ranks that roles have now. Calls of other
        threads wait meanwhile."""
        with self._following:
            if not self._outdated_ranks:
                return
            views = self._views
            again = [self._follow_size(role, ranks) for role, ranks in list(self._ranks.items())]
            self._outdated_ranks = any(again)
            if views != self._views:
                self._outdated_ranks = True

    def _follow_size(self, role: str, ranks: list[int]) -> bool:
        """The same for one role. Returns True if a later call is to look again."""
        view, brief = self._peers.view(role), self._peers.brief(role)
        if view is None or brief is None:
            return False
        # Ranks of scripts that grow know their boundaries themselves. While another role recovers, none grows.
        grows = self._boundary is not None and view.grows and brief.kind == "workload"
        grows = grows and all(each.phase in _SETTLED for each in self._peers.views())
        busy = grows and self._calls(role)
        if self._boundary is not None and grows and not busy:
            # It has ranks of this generation until it forms the next one, which may take longer than is waited.
            self._take_over(role, view, ranks)
            self._boundary(role)
            self._peers.wait_for(partial(self._grown, role, view.generation), GROWTH_TIMEOUT)
            view = self._peers.view(role) or view
        if view.phase == "reforming" and view.generation == self._formed[role]:
            # The ranks may be those of the generation that it is about to form.
            return True
        self._take_over(role, view, ranks)
        return busy

    def _take_over(self, role: str, view: RoleView, ranks: list[int]) -> None:
        """The ranks are those of the generation in this view."""
        self._formed[role] = view.generation
        if len(ranks) != (size := self._peers.size(role)):
            ranks[:] = range(size)

    def _grown(self, role: str, generation: int) -> bool:
        """Return True if a role that was at a boundary has begun to form the generation after this one, or does not
        grow."""
        view = self._peers.view(role)
        return view is None or (
            not view.grows and (view.phase != "reforming" or view.generation > generation)
        )

    def _calls(self, role: str) -> bool:
        """Return True if calls of this process to a role are open, or about to be sent."""
        return any(each.prepared.role == role for open_ in list(self._deadlines.values()) for each in open_)

    def method(self, role: str, name: str, options: Invocation, ranks: Sequence[int] | None = None) -> Method:
        """The method that `invoke` calls; `ranks` come before the target in `options`.

        Raises `UsageError` for ranks that there are not.
        """
        ranks = called_ranks(role, self._peers.size(role), options, ranks)
        seconds = self._call_timeout if options.timeout is None else options.timeout
        with self._lock:
            if seconds not in self._deadlines:
                self._deadlines[seconds] = Deadlines(seconds, self._scheduler, self._expire)
        chooses = options.target == ANY
        # One rank may be all of a role that has more of them when the call is sent.
        several = len(ranks) > 1 or (ranks is self._ranks.get(role) and self._peers.may_have_several(role))
        return Method(
            role,
            name,
            options,
            ranks,
            chooses=chooses,
            joint=several and not chooses,
            timeout=seconds,
            wire=name.encode(),
            count=self._book.count(role, name, asynchronous=not options.blocking),
            turns=self._turns[role],
            deliver=self._callbacks.soon,
        )

    def invoke(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InvocationRef[Any]:
        """Start a call.

        Raises `EncodingError` for an argument that cannot be pickled, before anything is sent.
        """
        if self._outdated_ranks:
            self._follow_sizes()
        if method.options.pre_func is not None:
            args, kwargs = rearranged(method.options.pre_func(*args, **kwargs))
        call, among = self._open(method, args, kwargs)
        while self._following.locked() or among != tuple(method.ranks):
            # The role has other ranks since, or is about to grow: it did not know of this call.
            self._deadlines[method.timeout].drop(call)
            self._follow_sizes()
            call, among = self._open(method, args, kwargs)
        ranks, options = call.ranks, method.options
        if not options.idempotent:
            call.unreported = self._losses.report(method.role, ranks)
        if call.unreported:
            for index in range(len(ranks)):
                self._settle(call, index, _restarted(call.unreported))
        elif not self._closed:
            self._send_all(call)
        if self._closed:
            self._leave(call)
        return call

    def _open(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InvocationRef[Any], tuple[int, ...]]:
        """A call whose time has begun, to the ranks of the method or to one among them, and these. It is not sent."""
        options, among = method.options, tuple(method.ranks)
        ranks = (self._least_busy(method),) if method.chooses else among
        shares, sharding = split(args, kwargs, len(ranks), auto=options.auto_shard)
        what = f"an argument of {method.role}'s {method.name}"
        try:
            parcels = [Parcel(*dump(arguments, what)) for arguments in shares]
        except EncodingError as error:
            raise unsendable(named_arguments(method.name, args, kwargs), error, error.remedy) from None
        if not options.blocking:
            # The trainer goes on and may change its tensors before they are sent, or sent again.
            parcels = [own(parcel) for parcel in parcels]
        if len(parcels) > 1 or method.chooses:
            method.count.split = True
        call: InvocationRef[Any]
        call = InvocationRef(method, ranks, parcels, sharding, self._scheduler.now())
        if options.blocking and not call.joint:
            call.patience = method.timeout
        self._deadlines[method.timeout].add(call)
        return call, among

    def methods(self, role: str) -> Mapping[str, Invocation]:
        """Every method of a role's workloads with its options. If they are not known, a worker is asked, as soon as one
        serves."""
        if role not in self.described:
            question = self.method(role, DESCRIBE, replace(DEFAULT, target=ANY, idempotent=True, retries=3))
            self.described[role] = self.invoke(question, (), {}).result()
        return self.described[role]

    def open_rpc(self, role: str, rank: int) -> tuple[WorkerId, str]:
        """Let the worker of a rank be called by torch.distributed.rpc. Returns its address, and the endpoint of its RPC
        agent. Raises what a call raises."""
        peer = self._peers.find(role, rank)
        address = peer.address
        if not peer.endpoint or address not in self._opened:
            method = self.method(role, OPEN_RPC, replace(DEFAULT, target=rank, idempotent=True, retries=3))
            address, endpoint = self.invoke(method, (), {}).result()
            self._opened[address] = endpoint
        return address, self._opened[address]

    def close(self) -> None:
        """Close every connection. Calls that are open, or are made later, fail."""
        self._closed = True
        self._scheduler.close()
        for connection in list(self._connections.values()):
            connection.close()
        for open_ in list(self._deadlines.values()):
            for call in open_:
                self._leave(call)
        self._callbacks.close()

    def _leave(self, call: Call) -> None:
        """End a call to which no answer will come."""
        if call.over:
            return
        for index in range(len(call.ranks)):
            if not call.has(index):
                call.settle(index, CallError("this process has left the job, so the call is not answered"))
        self._finish(call)

    def _least_busy(self, method: Method) -> int:
        """The rank with the fewest open calls of this caller, of those that serve, else of those that will; then the
        one chosen longest ago."""

        def busy(rank: int) -> tuple[bool, bool, int, int]:
            peer = self._peers.find(method.role, rank)
            connection = self._connections.get(peer.address)
            open_calls = len(connection) if connection else 0
            return peer.over, not peer.endpoint, open_calls, method.turns.get(rank, -1)

        chosen = min(method.ranks, key=busy)
        method.turns[chosen] = next(self._turn)
        return chosen

    def _send_all(self, call: Call) -> None:
        """Send every part of a call. Joint calls come in one order to all workers of a role."""
        if not call.joint:
            call.seq = next(self._seqs)
            self._send(call, 0)
            return
        with self._order[call.prepared.role]:
            call.seq = next(self._seqs)
            for index in range(len(call.ranks)):
                self._send(call, index)

    def _send(self, call: Call, index: int) -> None:
        """Send a part, or let it wait for its worker, behind those that wait already.

        A part of a joint call also waits while a rank of the role is without a worker.
        """
        who = call.prepared.role, call.ranks[index]
        peer = self._peers.find(*who)
        # Without the lock: what this thread has sent before either waits by now, or is on its way.
        if who in self._parked or not _ready(peer, call):
            with self._lock:
                peer = self._peers.find(*who)
                if who in self._parked or not _ready(peer, call):
                    # Another thread will send it, which cannot let this one read the answer.
                    call.patience = None
                    self._parked.setdefault(who, deque()).append((call, index))
                    self._scheduler.soon(self._look)
                    return
        self._send_to(peer, call, index)

    def _send_to(self, peer: Peer, call: Call, index: int) -> None:
        if peer.over:
            self._settle(call, index, _lost(peer.address, peer, call))
            return
        self._start(call, peer)
        if call.unreported:
            self._settle(call, index, _restarted(call.unreported))
            return
        if call.joint and call.generation != peer.generation:
            self._settle(call, index, self._outdated(call, peer))
            return
        if call.joint and call.lost:
            self._settle(
                call, index, lost(str(peer.address), "another worker of the call was lost", call.remedy)
            )
            return
        self._losses.called(peer.address)
        connection = self._connection(peer)
        call.sent_to[index] = peer.address
        if not connection.send(call, index):
            self._losses.reported(peer.address)
            self._settle(call, index, lost(str(peer.address), "it is gone", call.remedy))

    def _start(self, call: Call, peer: Peer) -> None:
        """Fix the generation for which the parts of a call are sent: that of the first one. Before that is sent, a
        worker may have died while the call waited. A call to all ranks of a role that has another number of them by now
        is for the generation before: some would wait in it for the others."""
        with self._starting:
            if call.generation < 0:
                call.generation = peer.generation - self._resized(call, peer)
                if not call.prepared.options.idempotent:
                    call.unreported = self._losses.report(call.prepared.role, call.ranks)

    def _resized(self, call: Call, peer: Peer) -> bool:
        role = call.prepared.role
        ranks = self._ranks.get(role)
        if not call.joint or call.prepared.ranks is not ranks or ranks is None:
            return False
        formed = peer.generation == self._formed[role]
        return len(call.ranks) != (len(ranks) if formed else self._peers.size(role))

    def _outdated(self, call: Call, peer: Peer) -> WorkerLost:
        """The error of a joint call that was made for an earlier generation than that of `peer`: a rank was lost
        meanwhile. It reports that loss."""
        worker = "" if call.retries else self._losses.report(call.prepared.role, call.ranks)
        reason = (
            f"its role has formed generation {peer.generation}, and the call was made for {call.generation}"
        )
        return lost(worker or str(peer.address), reason, call.remedy)

    def _connection(self, peer: Peer) -> ReliableConnection:
        address = peer.address
        connection = self._connections.get(address)
        if connection is None:
            fresh = ReliableConnection(
                address,
                peer.endpoint,
                me=self._me,
                transport=self._transport,
                scheduler=self._scheduler,
                answered=self._answered,
                failed=self._settle,
            )
            with self._lock:
                connection = self._connections.setdefault(address, fresh)
            if self._peers.find(address.role, address.rank) != peer:
                # The worker was lost before this connection was there to be closed.
                self._scheduler.soon(self._look)
        return connection

    def _answered(self, call: Call, index: int, parcel: Parcel) -> None:
        if (generation := refused_for(parcel.head)) is not None:
            self._scheduler.soon(partial(self._was_refused, call, index, generation))
            return
        sent = call.parcel(index)
        if sent is not None:
            took = self._scheduler.now() - call.began
            call.prepared.count.add(call.ranks[index], sent.size, parcel.size, took)
        self._settle(call, index, parcel)

    def _was_refused(self, call: Call, index: int, generation: int) -> None:
        """A worker is in a later `generation` than the one that the call was made for. When `Peers` has heard of that
        one, it says who was lost."""
        peer = self._peers.find(call.prepared.role, call.ranks[index])
        if call.over:
            return
        if peer.generation < generation and not peer.over:
            self._refused.append((call, index, generation))
        else:
            self._settle(call, index, self._outdated(call, peer))

    def _look(self) -> None:
        """`Peers` has changed: send what waited, and give up what waits for the dead."""
        with self._lock:
            waiting = list(self._parked)
            connections = list(self._connections.values())
        held = set()
        for connection in connections:
            address = connection.address
            peer = self._peers.find(address.role, address.rank)
            if peer.held:
                held.add(address.role)
            if peer.address != address or peer.gone or peer.over:
                self._lose(connection, peer)
                if peer.address != address:
                    self._connections.pop(address, None)
        for role in held | self._debugged.keys():
            until = self._debugged.get(role, math.inf)
            self._debugged[role] = math.inf if role in held else min(until, self._scheduler.now())
        refused, self._refused = self._refused, []
        for call, index, generation in refused:
            self._was_refused(call, index, generation)
        for who in waiting:
            self._send_parked(who)

    def _lose(self, connection: ReliableConnection, peer: Peer) -> None:
        """The worker is dead, or has ended: its answers will not come. `peer` holds the rank now."""
        for call, index in connection.lose():
            if not call.retries:
                self._losses.reported(connection.address)
            self._settle(call, index, _lost(connection.address, peer, call))

    def _send_parked(self, who: tuple[str, int]) -> None:
        """Send what waits for one rank, in order; what comes meanwhile queues up behind it."""
        while True:
            peer = self._peers.find(*who)
            with self._lock:
                queue = self._parked[who]
                while queue and queue[0][0].over:
                    queue.popleft()
                if not queue:
                    del self._parked[who]
                    return
                if not _ready(peer, queue[0][0]):
                    return
                call, index = queue.popleft()
            self._send_to(peer, call, index)

    def _settle(self, call: Call, index: int, outcome: Parcel | CallError) -> None:
        call.settle(index, outcome)
        if isinstance(outcome, WorkerLost) and call.retries > 0:
            # The call is made again when the other workers have left it.
            for other, connection in enumerate(self._connections_of(call)):
                if connection is not None and not call.has(other):
                    connection.give_up(call.seq, lost=True)
        if call.settled:
            if call.failed and call.retries > 0 and call.interrupted:
                self._scheduler.soon(partial(self._again, call, call.attempt))
            else:
                self._finish(call)
        elif call.failed and not call.failing:
            call.failing = True
            self._fail_later(call)

    def _fail_later(self, call: Call) -> None:
        self._scheduler.at(self._scheduler.now() + GROUP_ERROR_DELAY, partial(self._fail, call, call.attempt))

    def _fail(self, call: Call, attempt: int) -> None:
        """A moment after the first error. Before a call is made again, all its workers must have left it."""
        if call.over or attempt != call.attempt or (call.retries > 0 and call.interrupted):
            return
        for index, connection in enumerate(self._connections_of(call)):
            if not call.has(index) and (connection is None or connection.reconnecting):
                # A worker that has not answered cannot be reached: perhaps it is dead, which would be the cause.
                self._fail_later(call)
                return
        self._finish(call)

    def _again(self, call: Call, attempt: int) -> None:
        if not call.over and attempt == call.attempt:
            call.start_again()
            self._send_all(call)

    def _trace(self, call: Call) -> None:
        """Write the span of a call that is over, if spans are on."""
        if self._spans.on:
            ended, seconds = time.time_ns(), self._scheduler.now() - call.began
            about = call.prepared, call.sent_to, call.seq, call.failed
            self._spans.keep(partial(span_of, self._name, *about, ended, seconds))

    def _finish(self, call: Call) -> None:
        self._deadlines[call.prepared.timeout].drop(call)
        self._forget(call)
        # Two answers may come at once.
        if call.finish():
            self._trace(call)

    def _expire(self, call: Call) -> None:
        if call.over:
            # It was answered in this moment.
            return
        deadlines = self._deadlines[call.prepared.timeout]
        if self._debugged.get(call.prepared.role, -math.inf) > self._scheduler.now() - deadlines.seconds:
            # Its time begins again: the worker had less of it.
            deadlines.add(call)
            return
        self._forget(call)
        if call.expire():
            self._trace(call)

    def _forget(self, call: Call) -> None:
        """Answers that still come are acked and dropped."""
        if call.settled:
            return
        for connection in self._connections_of(call):
            if connection is not None:
                connection.forget(call, lost=call.lost)

    def _connections_of(self, call: Call) -> list[ReliableConnection | None]:
        """For each rank the connection to the worker to which its part was sent; None if there is none any more."""
        return [None if worker is None else self._connections.get(worker) for worker in call.sent_to]


def _ready(peer: Peer, call: Call) -> bool:
    """Return True if a part need not wait: its worker serves, or never will again."""
    return peer.over or (bool(peer.endpoint) and (peer.whole or not call.joint))


def _lost(address: WorkerId, peer: Peer, call: Call) -> WorkerLost:
    """The error of a call whose worker, at `address`, is gone; `peer` holds its rank now."""
    if peer.over:
        return lost(str(address), "it has ended", "it takes no calls any more; call other workers")
    return lost(str(address), "it died" if peer.gone else "it was started again", call.remedy)


def _restarted(worker: str) -> WorkerLost:
    reason = f"{worker} was started again since it was called last, so its state is lost"
    return lost(worker, reason, "the next call goes to the new worker: give it what it needs")


def lost(worker: str, reason: str, remedy: str) -> WorkerLost:
    """The error of a call whose worker is gone."""
    return WorkerLost(f"{worker} was lost before it answered: {reason}", remedy, worker=worker)
