"""`Hub`: what the channels and queues of one worker share: the listener for others, and the lines to others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from unirun.errors import ChannelError, FrameError, GroupError, PeerLost
from unirun.roles.context import Context
from unirun.roles.formation import store_of
from unirun.roles.process_groups import dist
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import WorkerId
from unirun.weights.holding import Holder
from unirun.weights.messages import Query, Request
from unirun.weights.pairing import PairGroup, PeerConnection
from unirun.weights.producing import Begun, Demand, Enter, Gate, Producer
from unirun.weights.publishing import Publisher
from unirun.wire.reports import Listening

WEIGHTS: Final = "weights"
"""The name of the listener among the addresses of a worker."""

_demands = msgspec.json.Decoder(Request | Demand | Enter | Begun | Query)

Answering = Callable[[bytes, Reply], None]
"""Answers a question, now or later, with one parcel."""


def request_of(head: bytes) -> Request | Demand | Enter | Begun | Query:
    """Decode the request in a parcel. Raises `FrameError` for anything else."""
    try:
        found: Request | Demand | Enter | Begun | Query = _demands.decode(head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"this is no request: {error}") from error
    return found


MAX_WAIT_SECONDS = threading.TIMEOUT_MAX / 2
"""The longest wait for another process, in seconds: Python's locks take no longer one, and not inf."""


class Hub:
    """One per worker."""

    def __init__(self, context: Context) -> None:
        """Raises `UsageError` without a launcher."""
        self._context = context
        self._transport = context.session.listener(WEIGHTS)
        self._lock = threading.Lock()
        # Others may ask for what this process makes only later.
        self._publishers: dict[str, Publisher] = {}
        self._holders: dict[str, Holder] = {}
        self._producers: dict[str, Producer] = {}
        self._gates: dict[str, Gate] = {}
        self._answering: dict[str, Answering] = {}
        self._listens = False
        # With a lock of their own: where workers are threads, what this process tells comes back at once.
        self._lines: WeakSet[PeerConnection] = WeakSet()
        self._of_lines = threading.Lock()
        context.peers.when_changed(self._end_lines)

    def _end_lines(self) -> None:
        """End the connections to processes that are gone: from a host without power, nothing tells the end."""
        with self._of_lines:
            ended = [line for line in self._lines if self._gone(line.who)]
        for line in ended:
            line.close("the job has lost it")

    def publisher(self, channel: str) -> Publisher:
        """The publisher of this process in `channel`."""
        self._listen()
        with self._lock:
            made = Publisher(channel, pairing=partial(self._paired, channel))
            return self._publishers.setdefault(channel, made)

    def _paired(self, channel: str, reader: str, link: str, patience: float) -> PairGroup:
        role = reader.rpartition(":")[0]
        name = f"{reader} {self._context.rank} {link}"
        return self.pair(channel, self._context.role, role, 0, name, patience)

    def pair(
        self, channel: str, publisher: str, receiver: str, rank: int, name: str, patience: float
    ) -> PairGroup:
        """A process group of two, which meet under `name` in the store of the role `publisher`, in its generation and
        that of the role `receiver`; both ends know it by the backend, the second last word of the name.

        Raises `GroupError`. It ends with either generation.
        """
        peers = self._context.peers
        roles = [peers.known(role) for role in (publisher, receiver)]

        def over() -> bool:
            return roles != [peers.roles().get(role.name) for role in roles]

        generations = ".".join(str(role.generation) for role in roles)
        try:
            store = dist.PrefixStore(f"unirun/weights/{channel}/{generations}/{name}", store_of(roles[0]))
        except dist.DistError as error:
            raise GroupError(f"the store of {publisher} cannot be reached: {error}") from error
        return PairGroup(store, rank, name.split()[-2], patience, over)

    def holder(self, channel: str) -> Holder:
        """The holder of this process in `channel`."""
        self._listen()
        with self._lock:
            return self._holders.setdefault(channel, Holder(self._gone))

    def _gone(self, who: WorkerId) -> bool:
        peer = self._context.peers.find(who.role, who.rank)
        return peer.gone or peer.over or peer.address.incarnation > who.incarnation

    def producer(self, queue: str) -> Producer:
        """The producer of this process for `queue`."""
        self._listen()
        with self._lock:
            return self._producers.setdefault(queue, Producer(queue))

    def gate(self, queue: str) -> Gate:
        """The gate that lets producers of `queue` begin."""
        self._listen()
        with self._lock:
            return self._gates.setdefault(queue, Gate())

    def answer(self, name: str, answering: Answering) -> None:
        """Have `answering` take what other processes `Query` under this name, in a thread of the transport."""
        self._listen()
        with self._lock:
            self._answering[name] = answering

    def _listen(self) -> None:
        with self._lock:
            if not self._listens:
                self._listens = True
                endpoint = self._transport.serve(self._context.session.me, self._handle)
                self._context.peers.tell(Listening({WEIGHTS: endpoint}))

    def _handle(self, parcel: Parcel, reply: Reply) -> None:
        try:
            request = request_of(parcel.head)
        except FrameError:
            reply(Parcel(b""))
            return
        if isinstance(request, Enter | Begun):
            self.gate(request.queue).handle(request, reply)
        elif isinstance(request, Demand):
            self.producer(request.queue).handle(request, reply)
        elif isinstance(request, Query):
            answering = self._answering.get(request.name)
            if answering is None:
                reply(Parcel(b""))
            else:
                answering(bytes(request.body), reply)
        else:
            holder = self._holders.get(request.channel)
            (holder or self.publisher(request.channel)).handle(request, reply)

    def line(self, role: str, rank: int, known: PeerConnection | None) -> PeerConnection | None:
        """`known`, or a new connection when the rank has another worker now, or the connection has ended.

        None as long as the worker cannot be reached: it has not begun to listen, or has died. Raises `PeerLost` when it
        has ended for good.
        """
        view = self._context.peers.view(role)
        worker = view.workers[rank] if view is not None and rank < len(view.workers) else None
        if worker is None:
            return None
        who = WorkerId(role, rank, worker.incarnation)
        if known is not None and known.who == who and not known.lost:
            return known
        if known is not None:
            known.close()
        if worker.phase == "ended":
            raise PeerLost(f"{who} has ended", "ask before its end", worker=str(who))
        endpoint = worker.addresses.get(WEIGHTS, "")
        if not endpoint or worker.phase == "lost":
            return None
        try:
            made = PeerConnection(who, self._transport, endpoint)
        except ChannelError:
            # It has died, and the news of it come.
            return None
        with self._of_lines:
            self._lines.add(made)
        return made

    def is_here(self, line: PeerConnection) -> bool:
        """Return True if the other end is on this host, so that memory can be shared with it."""
        return self._transport.is_here(line.endpoint)


_hubs: WeakKeyDictionary[Context, Hub] = WeakKeyDictionary()


def hub_of(context: Context) -> Hub:
    """The hub of this worker."""
    if context not in _hubs:
        _hubs[context] = Hub(context)
    return _hubs[context]
