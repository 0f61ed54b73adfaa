"""`Job`: workers in one thread, with real hubs, channels and queues, whose time passes when they wait.

A history says what happens meanwhile: at each request, at each answer, and wherever a worker waits.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from unirun.errors import ChannelError
from unirun.roles.peers import Peers, role_infos
from unirun.roles.transport.protocol import Handler, Lent, Parcel
from unirun.values import WorkerId
from unirun.weights import admitting, channel, hub, queue, sources
from unirun.wire.messages import RoleView, View, WorkerView
from unirun.wire.reports import Listening, Message, Metrics

Event = Callable[[], object]


class Job:
    """The workers by rank of each role, and the connections between them."""

    current: ClassVar[Job]

    def __init__(self, **roles: int) -> None:
        Job.current = self
        self.now = 100.0
        self.meanwhile: deque[Event] = deque()
        """Events for the next moments at which something can happen."""
        self.happened = 0
        self._inside = False
        self.roles = roles
        self.workers: dict[tuple[str, int], Worker] = {}
        self.links: list[Link] = []
        self.timers: list[Timer] = []
        self.stalled: set[Worker] = set()
        """Those that answer nothing, and nothing tells why."""
        self.me: Worker | None = None
        """The worker whose code runs, as far as `unirun.init` is asked."""
        self._patches = ExitStack()
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        threads = SimpleNamespace(Lock=threading.Lock, Timer=partial(Timer, self))
        entrances = SimpleNamespace(
            Lock=threading.Lock, Thread=partial(Thread, self), get_ident=threading.get_ident
        )
        for module, changes in (
            (
                channel,
                {"time": clock, "at_exit": lambda _: None, "init": lambda: self.me, "threading": threads},
            ),
            (queue, {"time": clock, "init": lambda: self.me, "Future": Answer}),
            (admitting, {"time": clock, "Future": Answer, "threading": entrances}),
            (sources, {"Future": Answer}),
        ):
            self._patches.enter_context(mock.patch.multiple(module, **changes))
        for module, name in (
            (channel, "Receiver"),
            (queue, "Consumer"),
            *((hub, name) for name in ("Publisher", "Holder", "Producer")),
        ):
            timed = partial(getattr(module, name), now=lambda: self.now)
            self._patches.enter_context(mock.patch.object(module, name, timed))

    def close(self) -> None:
        """End all workers."""
        self.meanwhile.clear()
        for worker in [*self.workers.values()]:
            self.dies(worker)
        self._patches.close()
        del Job.current

    def happens(self) -> bool:
        """Let the next thing happen; False when there is none, or one is happening."""
        if self._inside or not self.meanwhile:
            return False
        self._inside = True
        try:
            self.meanwhile.popleft()()
        finally:
            self._inside = False
        return True

    def passes(self, seconds: float) -> None:
        """Somebody waits for so long, unless something happens."""
        if not self.happens():
            self.now += seconds

    def later(self, seconds: float) -> None:
        """So much time passes in which nothing happens but what was to be done then."""
        self.now += seconds
        due = [timer for timer in self.timers if timer.when <= self.now]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            timer.action()

    def starts(self, role: str, rank: int, node: str) -> Worker:
        """A new worker holds this rank."""
        before = self.workers.get((role, rank))
        incarnation = before.who.incarnation + 1 if before is not None else 0
        made = self.workers[role, rank] = Worker(self, WorkerId(role, rank, incarnation), node)
        self.tells()
        return made

    def dies(self, worker: Worker, *, told: bool = True) -> None:
        """It is gone; the job tells it at once, or with the next news."""
        worker.phase = "lost"
        for link in [*self.links]:
            if worker in (link.client, link.server):
                link.breaks(f"{worker.who} is gone")
        worker.ends()
        if told:
            self.tells()

    def breaks(self, client: Worker, server: Worker) -> None:
        """All connections from one worker to another end."""
        for link in [*self.links]:
            if (link.client, link.server) == (client, server):
                link.breaks("the network is gone")

    def view(self) -> View:
        """The view of the master."""
        found = []
        for role, count in self.roles.items():
            there = [self.workers[role, rank] for rank in range(count) if (role, rank) in self.workers]
            workers = (WorkerView(w.who.rank, w.who.incarnation, w.phase, w.addresses) for w in there)
            found.append(RoleView(role, count, 0, "", "running", tuple(workers)))
        return View(tuple(found))

    def tells(self) -> None:
        """All that live learn of all the others."""
        view = self.view()
        for worker in [*self.workers.values()]:
            if worker.phase != "lost":
                worker.peers.update(view)


class Thread:
    """A `threading.Thread` that does all that it has to do at the next moment at which something can happen."""

    def __init__(self, job: Job, target: Event, **_: object) -> None:
        self.start = partial(job.meanwhile.append, target)


class Timer:
    """A `threading.Timer` of the job's time."""

    def __init__(self, job: Job, seconds: float, action: Event) -> None:
        self.when, self.action = job.now + seconds, action
        self._job = job

    def start(self) -> None:
        self._job.timers.append(self)


class Worker:
    """A process, as `unirun.init` describes it to itself: a context with its session."""

    def __init__(self, job: Job, who: WorkerId, node: str) -> None:
        self.job, self.who, self.node = job, who, node
        self.role, self.rank = who.role, who.rank
        self.phase, self.addresses = "running", dict[str, str]()
        self.peers = JobPeers(job, who, self._hear)
        self.sockets = Sockets(job, self)
        self.me, self.synced = who, dict[str, Any]()
        self.told = dict[str, float | None]()
        """The figures that it has told last, by name."""
        self.session, self.hub = self, None

    def _hear(self, message: Message) -> None:
        if isinstance(message, Listening):
            self.addresses = {**self.addresses, **message.addresses}
            self.job.tells()
        elif isinstance(message, Metrics):
            self.told |= message.values

    def makes(self, kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A channel or a queue of this worker."""
        self.job.me = self
        return kind(*args, **options)

    def own_hub(self) -> hub.Hub:
        """Its hub."""
        return hub.hub_of(self)  # type: ignore[arg-type]

    def ends(self) -> None:
        """The kernel closes its descriptors."""
        for publisher in self.own_hub()._publishers.values():
            publisher.close()
        for producer in self.own_hub()._producers.values():
            producer._blocks.close()
        self.sockets.handlers.clear()


class JobPeers(Peers):
    """Peers whose waits end with the next thing that happens."""

    def __init__(self, job: Job, who: WorkerId, send: Callable[[Message], None]) -> None:
        view = job.view()
        super().__init__(who.role, who.rank, role_infos(view), send=send)
        self._job = job
        self.update(view)

    def wait(self, since: int, timeout: float) -> None:
        """As `Peers.wait`."""
        if self.updates <= since:
            self._job.passes(timeout)


class Sockets:
    """The transport of one worker."""

    name = "sockets"

    def __init__(self, job: Job, worker: Worker) -> None:
        self._job, self._worker = job, worker
        self.handlers: dict[str, Handler] = {}

    def serve(self, me: WorkerId, handler: Handler, name: str) -> str:
        self.handlers[name] = handler
        return f"{self._worker.node} {me.role} {me.rank} {me.incarnation}"

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None], name: str) -> Link:
        server = self._job.workers[peer.role, peer.rank]
        if server.who != peer or self._worker.phase == "lost":
            raise ChannelError(f"nobody answers for {peer}")
        return Link(self._job, self._worker, server, name, broken)

    def is_here(self, endpoint: str) -> bool:
        return endpoint.split()[0] == self._worker.node


class Link:
    """A connection of one worker to another."""

    def __init__(
        self, job: Job, client: Worker, server: Worker, name: str, broken: Callable[[str], None]
    ) -> None:
        self._job, self.client, self.server, self._name, self._broken = job, client, server, name, broken
        self._loans: list[weakref.finalize[..., Any]] = []
        self._over = False
        job.links.append(self)

    def call(self, parcel: Parcel, done: Callable[[Parcel], None]) -> None:
        self._job.happens()
        if self.server.phase == "lost":
            # The server had died before this connected, and the view does not tell it yet.
            self.breaks(f"{self.server.who} does not answer")
        if not (self._over or self.server in self._job.stalled):
            self.server.sockets.handlers[self._name](parcel, partial(self._answered, done))
            self._job.happens()

    def _answered(self, done: Callable[[Parcel], None], parcel: Parcel) -> None:
        if parcel.lent is not None or parcel.buffers:
            # Another thread sends it, and the memory may be written to meanwhile if nobody guards it.
            self._job.happens()
        if self._over:
            if parcel.lent is not None:
                parcel.lent.released()
            return
        if parcel.lent is not None:
            done(Parcel(parcel.head, (self._mapped(parcel.lent),)))
        else:
            done(Parcel(parcel.head, tuple(memoryview(bytearray(each)) for each in parcel.buffers)))

    def _mapped(self, lent: Lent) -> memoryview:
        memory = mmap.mmap(lent.handle, lent.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        loan = weakref.finalize(memory, lent.released)
        loan.atexit = False
        self._loans.append(loan)
        return memoryview(memory)

    @property
    def loans(self) -> int:
        """The blocks that are lent and in use."""
        return sum(loan.alive for loan in self._loans)

    def breaks(self, reason: str) -> None:
        """Both ends see that it has ended."""
        if not self._over:
            self.close()
            self._broken(reason)

    def close(self) -> None:
        if not self._over:
            self._over = True
            self._job.links.remove(self)
            for loan in self._loans:
                loan()


class Answer(Future[Any]):
    """An answer, or news, that comes while others do something, or not at all."""

    def result(self, timeout: float | None = None) -> Any:
        job = Job.current
        while not self.done():
            if not job.happens():
                job.now += timeout or 0.0
                raise TimeoutError
        found = super().result(0)
        job.happens()
        return found
