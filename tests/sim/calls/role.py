"""The model of a role of workloads: its processes, their process group, and the master that starts them again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.sim.calls.threads import SimulatedThread
from tests.sim.fake_clock import FakeClock
from unirun.errors import ChannelError
from unirun.roles import trainer_invocation
from unirun.roles.calls.dispatcher import Dispatcher
from unirun.roles.calls.policy import invocations
from unirun.roles.peers import Peer, Peers
from unirun.roles.transport.protocol import Connection, Handler, Parcel, Wait
from unirun.values import WorkerId

ROLE = "w"


class SimulatedWorkload:
    """The user's class. `step` adds the arguments of all ranks; `note` is for one."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker

    def step(self, number: int) -> int:
        """A collective."""
        return self._worker.all_reduce(number)

    @trainer_invocation(idempotent=True)
    def step_again(self, number: int) -> int:
        """The same, and may be repeated."""
        return self._worker.all_reduce(number)

    def two_steps(self, number: int) -> int:
        """Two collectives."""
        return self._worker.all_reduce(number) + self._worker.all_reduce(1)

    def note(self, number: int) -> int:
        """No collective."""
        self._worker.ran.append(number)
        return number


class SimulatedWorker:
    """One process: a dispatcher in a simulated thread. It is in `generation` once it has met the others there."""

    def __init__(self, role: SimulatedRole, me: WorkerId) -> None:
        self.role, self.me = role, me
        self.generation = -1
        self.told = role.generation
        """The generation that it has heard of."""
        self.steps = 0
        self.ran: list[int] = []
        self.serving = self.called = False
        self._items: deque[Any] = deque()
        workload = SimulatedWorkload(self)
        self.dispatcher = Dispatcher(workload, me, invocations(workload), self, self)
        self.channels: list[SimulatedChannel] = []
        self.thread = SimulatedThread(role.clock, role.rng, self._run, f"{me}:{me.incarnation}")

    @property
    def alive(self) -> bool:
        """True if its process runs."""
        return not self.thread.killed

    def _run(self) -> None:
        self.catch_up(self.told)
        self.serving = True
        self.role.clock.after(self.role.delay(), partial(self.role.serves, self))
        self.dispatcher.serve()

    # what a dispatcher needs: its inbox and its generations
    def put(self, item: Any, /) -> None:
        """For the serving thread."""
        self._items.append(item)
        self.thread.wake()

    def get(self) -> Any:
        """The next item."""
        self.thread.wait(lambda: self._items)
        return self._items.popleft()

    def catch_up(self, generation: int) -> None:
        """Be in `generation`, or a later one; whoever waits there for somebody who is dead goes on to the next."""
        self.thread.wait(lambda: self.told >= generation)
        while self.generation < self.told:
            wanted = self.told
            here = self.role.meeting.setdefault(wanted, {})
            here[self.me.rank] = self
            self.role.wake_all()
            self.thread.wait(partial(self._met, wanted, here))
            if len(here) == self.role.size and (self.told == wanted or self.role.rng.random() < 0.5):
                self.generation, self.steps = wanted, 0

    def explain(self, error: BaseException) -> bool:
        """A collective fails when the news of a loss are there, or on their way."""
        if str(error) == "connection closed by peer":
            self.thread.wait(lambda: self.told > self.generation)
        return self.told > self.generation

    def guard(self, call: Callable[[], Any]) -> Any:
        """Run it."""
        return call()

    def kept_away(self, by: Callable[[], bool]) -> None:
        """Do nothing, as no call of this role waits for anything but a collective."""

    def _met(self, wanted: int, here: dict[int, SimulatedWorker]) -> bool:
        """Return True if all are in `wanted`, or it is over."""
        return len(here) == self.role.size or self.told > wanted

    def hear(self, generation: int) -> None:
        """The news of the next generation."""
        if self.alive and generation > self.told:
            self.told = generation
            if self.serving:
                self.dispatcher.run_first(partial(self.catch_up, generation))
            self.thread.wake()

    def all_reduce(self, number: int) -> int:
        """Wait until all ranks of the generation are in this step. It fails when one dies, or when that is known."""
        group, generation = self.role.meeting[self.generation], self.generation
        key = generation, self.steps
        self.steps += 1
        given = self.role.collectives.setdefault(key, {})
        given[self.me.rank] = number
        self.role.wake_all()

        def over() -> bool:
            return self.told > generation or any(rank in self.role.noticed.get(key, ()) for rank in group)

        self.thread.wait(lambda: len(given) == self.role.size or over())
        if len(given) < self.role.size:
            raise RuntimeError("connection closed by peer")
        return sum(given.values())


class SimulatedChannel(Connection):
    """The caller's connection to one worker."""

    def __init__(self, worker: SimulatedWorker, broken: Callable[[str], None]) -> None:
        self._worker, self._broken, self._role = worker, broken, worker.role
        self._open = True
        self._last = [0.0, 0.0]

    def _deliver(self, way: int, do: Callable[[], None]) -> None:
        """In order, after a delay."""
        clock = self._role.clock
        self._last[way] = max(self._last[way], clock.now + self._role.delay())
        clock.after(self._last[way] - clock.now, do)

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        def arrive() -> None:
            if self._open and self._worker.alive:
                self._worker.called = True
                self._worker.dispatcher.handle(parcel, reply)

        def reply(answer: Parcel) -> None:
            if self._role.loses_an_answer():
                self.cut()
            self._deliver(1, lambda: done(answer) if self._open else None)

        self._deliver(0, arrive)
        return None

    def cut(self) -> None:
        """It breaks; the caller notices that."""
        if self._open:
            self._open = False
            self._role.clock.after(self._role.delay(), partial(self._broken, "cut"))

    def keep(self) -> None:
        """Nothing is changed after it was sent."""

    def close(self) -> None:
        self._open = False


class FakePeers(Peers):
    """The caller's knowledge of a role."""

    def __init__(self, role: SimulatedRole) -> None:
        self._role = role

    def size(self, role: str) -> int:
        """The number of ranks of the role."""
        return self._role.size

    def find(self, role: str, rank: int) -> Peer:
        """The worker that holds a rank."""
        return self._role.seen[rank]

    def view(self, role: str) -> None:
        """There are no views: roles do not grow."""

    brief = view

    def when_changed(self, listener: Callable[[], None]) -> None:
        """After each view."""
        self._role.listeners.append(listener)


class SimulatedRole:
    """The workers of a role, what their master decides, and the transport of their caller."""

    name = "simulated"

    def __init__(self, clock: FakeClock, rng: random.Random, size: int) -> None:
        self.clock, self.rng, self.size = clock, rng, size
        self.generation = 0
        self.meeting: dict[int, dict[int, SimulatedWorker]] = {}
        self.collectives: dict[tuple[int, int], dict[int, int]] = {}
        self.noticed: dict[tuple[int, int], set[int]] = {}
        self.deaths: list[int] = []
        self.losses: list[tuple[int, float]] = []
        """The times at which ranks died that had been called: the next call reports the death."""
        self.listeners: list[Callable[[], None]] = []
        self.to_lose = 0
        """The number of answers whose connection breaks before they arrive."""
        self._views: deque[dict[int, Peer]] = deque()
        self._reforming = False
        self.workers = [SimulatedWorker(self, WorkerId(ROLE, rank, 0)) for rank in range(size)]
        self.seen = {rank: Peer(WorkerId(ROLE, rank, 0)) for rank in range(size)}
        self._truth = dict(self.seen)

    def delay(self) -> float:
        """Of a message."""
        return self.rng.choice((0.0, 0.001, 0.01, 0.1)) * self.rng.random()

    def loses_an_answer(self) -> bool:
        """Return True if the next answer is lost, with its connection; one that is repeated may be lost again."""
        lost = self.to_lose > 0 and self.rng.random() < 0.5
        self.to_lose -= lost
        return lost

    def wake_all(self) -> None:
        """Something has changed that workers wait for."""
        for worker in self.workers:
            worker.thread.wake()

    # the master
    def serves(self, worker: SimulatedWorker) -> None:
        """A worker takes calls."""
        if worker.alive:
            self._tell(worker.me.rank, endpoint="here")

    def kill(self, rank: int) -> None:
        """SIGKILL, and what follows."""
        worker = self.workers[rank]
        if not worker.alive:
            return
        self.deaths.append(rank)
        if worker.called:
            self.losses.append((rank, self.clock.now))
        worker.thread.kill()
        for channel in worker.channels:
            channel.cut()
        for key, given in self.collectives.items():
            # Neighbours notice at once, others do not notice at all.
            if len(given) < self.size and key[0] == worker.generation and self.rng.random() < 0.7:
                self.clock.after(self.delay(), partial(self._notice, key, rank))
        self.clock.after(self.delay(), partial(self._dead, worker))

    def _notice(self, key: tuple[int, int], rank: int) -> None:
        self.noticed.setdefault(key, set()).add(rank)
        self.wake_all()

    def _dead(self, worker: SimulatedWorker) -> None:
        """The successor of a worker that had no address yet, and has not met the others, joins the generation that
        they are about to form. Any other death ends the generation."""
        rank = worker.me.rank
        called = bool(self._truth[rank].endpoint)
        self._tell(rank, gone=True, endpoint="")
        if self._reforming:
            return
        joins = not called and rank not in self.meeting.get(self.generation, {})
        self._reforming = not joins
        self.clock.after(self.delay() + 0.01, partial(self._replace, rank) if joins else self._open)

    def _replace(self, rank: int) -> None:
        if not self._truth[rank].gone:
            return
        fresh = WorkerId(ROLE, rank, self.workers[rank].me.incarnation + 1)
        self.workers[rank] = SimulatedWorker(self, fresh)
        self._truth[rank] = Peer(fresh)
        self._tell(None)

    def _open(self) -> None:
        """The next generation: who is dead gets a successor, all others are told."""
        self._reforming = False
        self.generation += 1
        for rank in range(self.size):
            self._replace(rank)
        self._tell(None)
        for worker in self.workers:
            self.clock.after(self.delay(), partial(worker.hear, self.generation))

    def _tell(self, rank: int | None, **changes: Any) -> None:
        """The directory changes, as the caller sees it a moment later; views come in order."""
        if rank is not None:
            place = self._truth[rank]
            self._truth[rank] = Peer(
                place.address,
                changes.get("endpoint", place.endpoint),
                gone=changes.get("gone", place.gone),
            )
        whole = not any(place.gone for place in self._truth.values())
        self._views.append(
            {
                r: Peer(p.address, p.endpoint, self.generation, gone=p.gone, whole=whole)
                for r, p in self._truth.items()
            }
        )
        self.clock.after(self.delay(), self._see)

    def _see(self) -> None:
        self.seen = self._views.popleft()
        for listener in self.listeners:
            listener()

    # the transport
    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Connection:
        worker = self.workers[peer.rank]
        if worker.me != peer or not worker.alive:
            raise ChannelError(f"{peer} is not there")
        channel = SimulatedChannel(worker, broken)
        worker.channels.append(channel)
        return channel

    def serve(self, me: WorkerId, handler: Handler) -> str:
        raise NotImplementedError

    def inbox(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to end."""
