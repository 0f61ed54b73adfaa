"""`Hub`: what one worker has for others, its lines to them, and the versions that it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from weakref import WeakSet

import msgspec
import torch
from msgspec.json import encode

from unirun.errors import ChannelError, FrameError, GroupError, PeerLost
from unirun.roles.context import Context
from unirun.roles.formation import store_of
from unirun.roles.process_groups import dist
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import WorkerId
from unirun.weights.admitting import Entrance, Gate
from unirun.weights.gate import Enter
from unirun.weights.messages import (
    WEIGHTS,
    Describe,
    Described,
    Fetch,
    Fetched,
    Origin,
    Peek,
    Release,
    Released,
    Request,
)
from unirun.weights.pairing import PairGroup
from unirun.weights.producing import Demand, Producer, Take
from unirun.weights.publishing import Publisher, buffers_of
from unirun.weights.sources import Copy, PeerConnection, RemoteSource, Sent
from unirun.weights.tensors import Box, Layout, Part
from unirun.wire.reports import Listening

# `Holder`: a receiver keeps what it has received, so that others get it when its publisher is gone.
#
# It costs no copy: memory of a publisher on this host stays mapped and is not released until the next version is there,
# and what came from another host is in memory of this process already.

Lease = tuple[RemoteSource, int | None]
"""A block of a publisher on this host that is not written to before it is released; None: before it is freed."""


class HeldVersion:
    """A version, the copies that it is in, and the blocks that are held for it. `number` is that of its layout;
    `origins` are all publishers that it is of, also those of which no part is here: versions of one number are the same
    only if these are."""

    def __init__(
        self,
        version: int,
        number: int,
        copies: Sequence[Copy],
        leases: Sequence[Lease],
        origins: Sequence[Origin],
    ) -> None:
        self.version, self.number, self.origins = version, number, tuple(origins)
        self.copies, self.leases = tuple(copies), tuple(leases)
        self.users = 0

    def layout(self) -> Layout:
        """The pieces of all copies."""
        found: Layout = {}
        for copy in self.copies:
            for name, part in copy.layout.items():
                known = found.get(name)
                pieces = part.pieces if known is None else (*known.pieces, *part.pieces)
                found[name] = Part(part.tensor, pieces)
        return found


class Holder:
    """The versions that one receiver holds of one channel. `handle` is called in a thread of the transport."""

    def __init__(self, gone: Callable[[WorkerId], bool], now: Callable[[], float] = time.monotonic) -> None:
        """`gone`: the worker has ended, so that it does not write to its memory any more."""
        self._gone, self._now = gone, now
        self._lock = threading.RLock()
        self._held: HeldVersion | None = None
        self._number = 0
        # What publishers have sent for all receivers of this host, and who waits for it.
        self._got: list[tuple[Origin, int, Sent]] = []
        self._waiting: list[tuple[Fetch, Reply, float]] = []

    def got(self, sent: Sequence[tuple[Origin, int, Sent]]) -> None:
        """Publishers have sent this, of these versions. Others on this host may have it now."""
        with self._lock:
            self._got = list(sent)
            now = self._now()
            waiting = [each for each in self._waiting if each[2] > now]
            answers = [(reply, self._parts(request)) for request, reply, _ in waiting]
            self._waiting = [each for each, (_, found) in zip(waiting, answers, strict=True) if found is None]
        for reply, found in answers:
            if found is not None:
                reply(found)

    def _parts(self, request: Fetch) -> Parcel | None:
        """The answer to a receiver on this host. None: the parts are not here yet."""
        for origin, version, sent in self._got:
            if origin == request.origin and version >= request.at_least:
                try:
                    views = [sent.view(part.name, part.box) for part in request.parts or ()]
                except (KeyError, ValueError):
                    continue
                return Parcel(encode(Fetched(version, 0, 0)), buffers_of(views, lambda: None))
        return None

    def hold(
        self, version: int, copies: Sequence[Copy], leases: Sequence[Lease], origins: Sequence[Origin]
    ) -> list[tuple[RemoteSource, Future[Parcel]]]:
        """Hold this version in place of the one before. Returns the answers of publishers to come: they have back what
        is not needed any more."""
        with self._lock:
            self._number += 1
            return self._replace(HeldVersion(version, self._number, copies, leases, origins))

    def give_back(self, leases: Sequence[Lease]) -> list[tuple[RemoteSource, Future[Parcel]]]:
        """These blocks are not needed. What is held stays. Returns the answers of publishers to come."""
        with self._lock:
            return self._give_back(leases)

    def _replace(self, held: HeldVersion | None) -> list[tuple[RemoteSource, Future[Parcel]]]:
        before, self._held = self._held, held
        return self._give_back(before.leases) if before is not None and not before.users else []

    def _give_back(self, leases: Sequence[Lease]) -> list[tuple[RemoteSource, Future[Parcel]]]:
        """Release the blocks that nobody needs any more."""
        kept = self._held.leases if self._held is not None else ()
        found = []
        for source, block in leases:
            if block is not None and (source, block) not in kept and not source.line.lost:
                try:
                    found.append((source, source.release(block)))
                except PeerLost:
                    # It is released with the connection.
                    continue
        return found

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer at once, or when the parts are here that publishers send for all receivers of this host."""
        if isinstance(request, Fetch) and not request.layout:
            with self._lock:
                found = self._parts(request)
                if found is None:
                    self._waiting.append((request, reply, self._now() + request.patience))
            if found is not None:
                reply(found)
            return
        with self._lock:
            held = self._valid()
        if isinstance(request, Release):
            reply(Parcel(encode(Released(held is not None and held.number == request.block))))
        elif held is None:
            nothing = Described(0, {}, {}) if isinstance(request, Describe) else Fetched(0, 0, 0)
            reply(Parcel(encode(nothing)))
        elif isinstance(request, Describe):
            reply(Parcel(encode(Described(held.number, held.layout(), {}))))
        else:
            reply(self._fetched(held, request))

    def _fetched(self, held: HeldVersion, request: Peek | Fetch) -> Parcel:
        head = encode(Fetched(held.version, held.number, held.number, origins=held.origins))
        if isinstance(request, Peek) or request.layout != held.number or request.parts is None:
            return Parcel(head)
        with self._lock:
            try:
                views = [_view(held, part.name, part.box) for part in request.parts]
            except ValueError:
                return Parcel(encode(Fetched(0, 0, 0)))
            held.users += 1
        return Parcel(head, buffers_of(views, lambda: self._used(held)))

    def _valid(self) -> HeldVersion | None:
        """The version that is held, unless its connection has ended and a living publisher may have written to it."""
        held = self._held
        return held if held is not None and all(self.is_intact(source) for source, _ in held.leases) else None

    def is_intact(self, source: RemoteSource) -> bool:
        """Return False if the connection of a living publisher has ended, so that it may have written to what it had
        lent."""
        return not source.line.lost or self._gone(source.who)

    def _used(self, held: HeldVersion) -> None:
        """Note that a piece that was asked for has been sent."""
        with self._lock:
            held.users -= 1
            if held is not self._held and not held.users:
                self._give_back(held.leases)

    def close(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._got.clear()
            self._waiting.clear()
            self._replace(None)


def _view(held: HeldVersion, name: str, box: Box) -> torch.Tensor:
    for copy in held.copies:
        try:
            return copy.view(name, box)
        except (KeyError, ValueError):
            continue
    raise ValueError(f"{box} of {name} is not here")


_demands = msgspec.json.Decoder(Request | Demand | Enter)


def request_of(head: bytes) -> Request | Demand | Enter:
    """Decode the request in a parcel. Raises `FrameError` for anything else."""
    try:
        found: Request | Demand | Enter = _demands.decode(head)
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
        self._transport = context.session.sockets
        self._lock = threading.Lock()
        # Others may ask for what this process makes only later.
        self._publishers: dict[str, Publisher] = {}
        self._holders: dict[str, Holder] = {}
        self._producers: dict[str, Producer] = {}
        self._entrances: dict[str, Entrance] = {}
        self._gates: dict[str, Gate] = {}
        self._listens = False
        # With a lock of their own: where workers are threads, what this process tells comes back at once.
        self._lines: WeakSet[PeerConnection] = WeakSet()
        self._of_lines = threading.Lock()
        context.peers.when_changed(self._look)

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

    def entrance(self, queue: str, consumer: str) -> Entrance:
        """The way of this process to the gate of `queue` in rank 0 of `consumer`. There is one, however often the queue
        is made, as the gate knows the latest request of a process by its number."""
        producer, me = self.producer(queue), self._context.session.me

        def reach(known: PeerConnection | None, connect: bool) -> PeerConnection | None:
            return self.line(consumer, 0, known, connect=connect)

        with self._lock:
            if queue not in self._entrances:
                made = Entrance(queue, me, producer.admissions, producer.counts, reach, consumer)
                self._entrances[queue] = made
                producer.counted = made.changed
                self._context.peers.when_changed(made.wake)
            return self._entrances[queue]

    def gate(self, queue: str) -> Gate:
        """The gate that lets producers of `queue` begin."""
        self._listen()
        with self._lock:
            return self._gates.setdefault(queue, Gate(self._gone))

    def _look(self) -> None:
        """Note which workers are gone."""
        self._end_lines()
        # Without the lock, as for the lines.
        for producer in tuple(self._producers.values()):
            producer.lost(self._gone)
        for gate in tuple(self._gates.values()):
            gate.look()

    def _listen(self) -> None:
        with self._lock:
            if not self._listens:
                endpoint = self._transport.serve(self._context.session.me, self._handle, WEIGHTS)
                self._listens = True
                self._context.peers.tell(Listening({WEIGHTS: endpoint}))

    def _handle(self, parcel: Parcel, reply: Reply) -> None:
        try:
            request = request_of(parcel.head)
        except FrameError:
            reply(Parcel(b""))
            return
        if isinstance(request, Enter):
            self.gate(request.queue).handle(request, reply)
        elif isinstance(request, Demand):
            producer = self.producer(request.queue)
            producer.handle(request, reply)
            if isinstance(request, Take) and self._gone(request.taker):
                # It has come after the news of its sender's end.
                producer.lost(self._gone)
        else:
            holder = self._holders.get(request.channel)
            (holder or self.publisher(request.channel)).handle(request, reply)

    def line(
        self, role: str, rank: int, known: PeerConnection | None, *, connect: bool = True
    ) -> PeerConnection | None:
        """`known`, or a new connection when the rank has another worker now, or the connection has ended; None in place
        of a new one if this shall not `connect`, which may take seconds.

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
        if worker.phase == "ended":
            raise PeerLost(f"{who} has ended", "ask before its end", worker=str(who))
        if not connect:
            return None
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


_making = threading.Lock()


def hub_of(context: Context) -> Hub:
    """The hub of this worker, which lives as long as its context."""
    # Threads may make their first channels at the same time.
    with _making:
        if context.hub is None:
            context.hub = Hub(context)
        hub: Hub = context.hub
        return hub
