"""The model of what is not pure: spawners with their processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.network import Pipe
from tests.sim.processes import Process, StoreModel, rng_delay
from tests.sim.scenario import Behaviour
from unirun.launcher import events
from unirun.launcher.environment import FRESH, SpawnerKey
from unirun.roles.formation import LOSS_VIEW_TIMEOUT
from unirun.roles.gloo import STUCK_TIMEOUT
from unirun.values import WorkerId
from unirun.wire.messages import Hello, View, updated, whole
from unirun.wire.reports import (
    Forked,
    GroupFormed,
    GroupMeets,
    Kill,
    Message,
    Metrics,
    OpenStore,
    Reaped,
    Resilient,
    Serving,
    Spawn,
    SpawnerReady,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
    Stuck,
    ViewWanted,
    WorkerError,
)

if TYPE_CHECKING:
    from tests.sim.node import NodeModel


CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:2345"
"""The error of a rank in a collective whose peer is gone."""


class SpawnerModel:
    """Forks processes, kills them when told, reports their ends in the order in which they happen."""

    def __init__(self, node: NodeModel, key: SpawnerKey) -> None:
        self.node, self.key = node, key
        self.simulation = node.simulation
        self.alive = True
        self.ready = False
        self.processes: dict[int, Process] = {}
        clock, rng, slow = self.simulation.clock, self.simulation.rng, self.simulation.scenario.slow
        self.inbox = Pipe(clock, rng, slow, self._receive)
        self.outbox = Pipe(clock, rng, slow, lambda m: node.told_by(key, m))
        self._held: list[Message] = []
        self._frozen_until = 0.0
        self._waiting: list[Callable[[], None]] = []
        seconds = 0.01 if key == FRESH else rng.uniform(0.2, 2.0)
        clock.after(seconds, lambda: self._preloaded(seconds))

    def _preloaded(self, seconds: float) -> None:
        self._awake(lambda: self._begin(seconds))

    def _begin(self, seconds: float) -> None:
        self.ready = True
        self._tell(SpawnerReady(seconds))
        for message in self._held:
            self._handle(message)

    def hang(self, seconds: float) -> None:
        """SIGSTOP to the spawner, and SIGCONT later; its workers go on."""
        self._frozen_until = self.simulation.clock.now + seconds
        self.simulation.clock.after(seconds, self.wake)

    def wake(self) -> None:
        """SIGCONT."""
        self._frozen_until = 0.0
        waiting, self._waiting = self._waiting, []
        for do in waiting:
            self._awake(do)

    def _awake(self, do: Callable[[], None]) -> None:
        """Do something now, or when the spawner does not hang any more."""
        left = self._frozen_until - self.simulation.clock.now
        if left > 0:
            self._waiting.append(do)
        elif self.alive:
            do()

    def _tell(self, message: Message) -> None:
        self._awake(lambda: self.outbox.send(message))

    def _receive(self, message: Message) -> None:
        self._awake(lambda: self._handle(message))

    def _handle(self, message: Message) -> None:
        if not self.ready:
            self._held.append(message)
            return
        match message:
            case Spawn():
                self._spawn(message)
            case Kill(number, signum):
                if number in self.processes:
                    self._signal(number, signum)
            case OpenStore():
                self._serve_store(message)
            case _:
                raise AssertionError(f"the agent sent a spawner {message}")

    def _serve_store(self, request: OpenStore) -> None:
        role, rng = request.role, self.simulation.rng
        before = self.simulation.stores.get(role)
        # Where its node is gone, the store that nobody has met in is served on another.
        newer = before is None or before.generation < request.generation
        if before is not None and before.generation > request.generation:
            # Its node is drained.
            self._tell(StoreOpened(role, request.generation))
            return
        assert before is None or newer or self.simulation.lost(before.spawner.node.name), (
            f"{role} has {before} already"
        )
        if before is not None:
            before.alive = False
            self.simulation.disturb(role)
        store = StoreModel(self, request.generation)
        self.simulation.stores[role] = store
        if self.simulation.unlikely(0.01):
            store.alive = False
            self._tell_store_end(role, store, "no process can be forked")
            return
        for waiting in self.simulation.queues.pop(role, []):
            self.simulation.clock.after(rng.uniform(0.0, 0.02), waiting)
        self._tell(StoreOpened(role, request.generation))
        if self.simulation.unlikely(self.simulation.scenario.stores_end):
            self.simulation.clock.after(rng_delay(rng), lambda: self.store_dies(role, store))

    def store_dies(self, role: str, store: StoreModel) -> None:
        if self.alive and store.alive:
            self.simulation.trace(f"accident: the store of {role}, generation {store.generation}, ends")
            store.alive = False
            self.simulation.disturb(role)
            self._tell_store_end(role, store, "its process was killed")

    def _tell_store_end(self, role: str, store: StoreModel, why: str) -> None:
        self._tell(StoreEnded(role, store.generation, self.simulation.wall(self.node.name), why))

    def _spawn(self, request: Spawn) -> None:
        rng, clock = self.simulation.rng, self.simulation.clock
        role, _, rank = request.title.partition(":")
        if self.simulation.unlikely(0.01):
            self._tell(
                SpawnFailed(request.id, self.simulation.wall(self.node.name), "no process can be forked")
            )
            return
        who = role, int(rank), int(request.env["UNIRUN_INCARNATION"])
        generation = int(request.env["UNIRUN_GENERATION"])
        process = Process(self.simulation.next_pid(), who, self.node.name, generation)
        self.simulation.born(process)
        self.processes[request.id] = process
        self._tell(Forked(request.id, process.pid))
        behaviours = self.simulation.scenario.behaviours[role]
        if request.kind != "program":
            # The link is another stream: its hello may overtake the news of the fork.
            clock.after(rng.expovariate(200), lambda: self._hello(request, process))
        clock.after(
            rng.expovariate(1 / behaviours.lifetime), lambda: self._live(request.id, process, behaviours)
        )

    def _hello(self, request: Spawn, process: Process) -> None:
        if not process.works:
            return
        if self.node.hangs_for > 0:
            # It waits for its welcome.
            self.simulation.clock.after(self.node.hangs_for, lambda: self._hello(request, process))
            return
        rng = self.simulation.rng
        role, rank, incarnation = process.who
        assert self.node.state.view is not None, f"{process.who} is welcomed without a view"
        self.node.apply(events.LinkMessage(request.id, Hello(WorkerId(role, rank, incarnation))))
        (own,) = (seen for seen in self.node.state.view.roles if seen.name == role)
        assert own.generation >= process.generation, f"{process.who} is welcomed in the past"
        process.generation, process.view = own.generation, updated(None, whole(self.node.state.view))
        if self._survives(role):
            self.simulation.clock.after(rng.uniform(0.0, 0.5), lambda: self._enter(request.id, process))
        if self.simulation.unlikely(0.02):
            self.node.apply(events.LinkClosed(request.id))

    def _survives(self, role: str) -> bool:
        """Return True if ranks of a role form the next group when one is lost."""
        return role in self.node.state.in_place or role in self.simulation.scenario.resilient

    def _enter(self, number: int, process: Process) -> None:
        """A script enters its function that survives; workloads are in one from the start. Then it meets the others."""
        if process.works and process.who[0] in self.simulation.scenario.resilient:
            process.inside = True
            self.node.apply(events.LinkMessage(number, Resilient(inside=True)))
        self._meet(number, process)

    def _return(self, number: int, process: Process) -> None:
        """It returns from its function, which it leaves when all ranks have returned in the same generation. Until then
        it is needed if one of them is lost."""
        process.returned = process.generation
        role = process.who[0]
        store = self.simulation.stores[role]
        members = [*store.present.values()]
        returned = [peer.works and peer.returned == store.generation for _, _, peer in members]
        if len(members) == self.simulation.size(role) and all(returned):
            for spawner, peer_number, peer in members:
                delay = self.simulation.rng.choice((0.0, 0.05, 0.5))
                self.simulation.clock.after(delay, partial(spawner.leave, peer_number, peer))

    def leave(self, number: int, process: Process) -> None:
        """It knows that all have returned, leaves its function, and ends."""
        if process.works and process.inside and process.returned == process.generation:
            process.inside = False
            self.node.apply(events.LinkMessage(number, Resilient(inside=False)))
            delay = self.simulation.rng.choice((0.001, 0.5))
            self.simulation.clock.after(delay, lambda: self.end(number, 0, None))

    def _meet(self, number: int, process: Process) -> None:
        """It goes to the store of its role, and waits there until all ranks have come. Nothing else ends that wait but
        the news that the generation is over, or an error that may come of somebody's death and may not."""
        role, rank, _ = process.who
        store = self.simulation.stores.get(role)
        if not process.works or process.waits is not None:
            return
        elsewhere = store and store.spawner.node is not self.node and self.simulation.drained(self.node.name)
        if store is None or not store.alive or elsewhere:
            self.simulation.queues.setdefault(role, []).append(lambda: self._meet(number, process))
            return
        if store.generation <= process.met:
            # It has heard twice of one generation.
            return
        # It says so before it leaves anything there.
        process.met, process.waits = store.generation, store
        self.node.apply(events.LinkMessage(number, GroupMeets(store.generation)))
        assert rank not in store.present, f"{process.who} finds what {store.present[rank][2].who} has left"
        store.present[rank] = self, number, process
        if len(store.present) == self.simulation.size(role):
            for spawner, peer, member in store.present.values():
                delay = self.simulation.rng.choice((0.001, 0.05, 0.5))
                self.simulation.clock.after(delay, partial(spawner._form, peer, member, store))

    def _form(self, number: int, process: Process, store: StoreModel) -> None:
        """All have come. It can connect with those that live on."""
        if not process.works or process.waits is not store:
            return
        if all(peer.alive or peer.formed for _, _, peer in store.present.values()):
            process.waits, process.formed, process.generation = None, True, store.generation
            if process.returned >= 0:
                # It calls the function again.
                process.returned = -1
                behaviours = self.simulation.scenario.behaviours[process.who[0]]
                self.simulation.clock.after(
                    behaviours.lifetime, lambda: self._live(number, process, behaviours)
                )
            self.node.apply(events.LinkMessage(number, GroupFormed(store.generation)))
            self._serve(number, process)

    def _serve(self, number: int, process: Process) -> None:
        """It takes calls, if it has not before."""
        if process.works and not process.serving:
            role, rank, _ = process.who
            process.serving = True
            if process.inside:
                return
            recoverable = self.simulation.rng.random() < self.simulation.scenario.behaviours[role].recovers
            addresses: dict[str, str] = {self.simulation.scenario.spec.transport: f"{role}{rank}"}
            self.node.apply(events.LinkMessage(number, Serving(addresses, recoverable)))
            self.node.apply(events.LinkMessage(number, Metrics({"loss": 0.5}, self.simulation.clock.now)))

    def told(self, number: int, process: Process, news: View) -> None:
        """A worker gets a view, which has all that its agent knows or what has changed in that."""
        view = updated(process.view, news)
        if view is None:
            self.simulation.clock.after(
                0.001, lambda: self.node.apply(events.LinkMessage(number, ViewWanted()))
            )
            return
        process.view = view
        assert view == self.node.state.view, f"{process.who} does not see what its agent does"
        if self._survives(process.who[0]):
            self._sees(number, process, view)

    def _sees(self, number: int, process: Process, view: View) -> None:
        """A worker learns of a later generation of its role. What it waits for is cut; if that does not wake it, it is
        reported. One that has served forms the group again, one that has not can only start again."""
        (seen,) = (role for role in view.roles if role.name == process.who[0])
        if seen.generation <= max(process.generation, process.met):
            return
        store = self.simulation.stores[seen.name]
        assert store.generation >= seen.generation, f"{process.who} would meet in an old store"
        clock, rng, waited = self.simulation.clock, self.simulation.rng, process.waits
        if waited is not None and self.simulation.unlikely(self.simulation.scenario.stuck):
            clock.after(STUCK_TIMEOUT, lambda: self._report(number, process, waited))
            return
        process.waits = None
        if process.inside or (process.serving and process.who[0] in self.node.state.in_place):
            clock.after(rng.choice((0.01, 0.5, 2.0)), lambda: self._meet(number, process))
        elif waited is not None:
            clock.after(rng.uniform(0.0, 0.2), lambda: self.follow(number, process))

    def _report(self, number: int, process: Process, waited: StoreModel) -> None:
        if process.works and process.waits is waited:
            self.simulation.trace(f"accident: {process.who} is stuck in generation {waited.generation}")
            self.node.apply(events.LinkMessage(number, Stuck("it waits for ever", "Stack: in a wait")))

    def trips(self, number: int, process: Process) -> None:
        """Let the wait of the worker fail: a peer or the store has died. It waits for the news of that."""
        if process.works and process.waits is not None:
            met, process.waits = process.met, None
            self.simulation.clock.after(LOSS_VIEW_TIMEOUT, lambda: self._give_up(number, process, met))

    def _give_up(self, number: int, process: Process, met: int) -> None:
        """No death explains why it could not meet: it is its own failure."""
        if (
            process.met == met
            and process.waits is None
            and not (process.formed and process.generation == met)
        ):
            self.follow(number, process)

    def _live(self, number: int, process: Process, behaviours: Behaviour) -> None:
        """The process has done what it wanted to: it fails, ends well, or waits to be told."""
        if not process.alive:
            return
        if self._survives(process.who[0]) and not process.formed:
            # What ends well, or fails of itself, has been set up.
            self.simulation.clock.after(behaviours.lifetime, lambda: self._live(number, process, behaviours))
            return
        chance = self.simulation.rng.random()
        if chance < behaviours.fails:
            self._fail(number, process, "ValueError: of its own")
        elif self.simulation.rng.random() < behaviours.finishes:
            if process.inside:
                self._return(number, process)
            else:
                self.end(number, 0, None)

    def _fail(self, number: int, process: Process, words: str) -> None:
        rng = self.simulation.rng
        kind = rng.choice(("error", "code", "signal"))
        if kind == "error":
            error = WorkerError(words, f"Traceback: {words}", self.simulation.wall(self.node.name))
            self.node.apply(events.LinkMessage(number, error))
            process.failed = self.simulation.clock.now
            if rng.random() < 0.2:
                # A thread or an exit handler keeps it alive, for a while or until SIGKILL.
                process.deaf = True
                if rng.random() < 0.7:
                    self.simulation.clock.after(
                        rng.choice((1.0, 45.0, 200.0)), lambda: self._exit(number, process)
                    )
                return
            self.end(number, 1, None)
        elif kind == "code":
            self.end(number, rng.choice((1, 7, 127, 255)), None)
        else:
            self.end(number, None, rng.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)))
        self.simulation.peers_see(process)

    def _exit(self, number: int, process: Process) -> None:
        """Its exit handlers are done."""
        if process.alive:
            self.end(number, 1, None)
            self.simulation.peers_see(process)

    def follow(self, number: int, process: Process, words: str = CLOSED) -> None:
        """A peer is gone, and this one trips over it."""
        if process.works:
            error = WorkerError(words, f"Traceback: {words}", self.simulation.wall(self.node.name))
            self.node.apply(events.LinkMessage(number, error))
            self.end(number, 1, None)

    def _signal(self, number: int, signum: int) -> None:
        process, rng = self.processes[number], self.simulation.rng
        if not process.alive:
            return
        if signum == signal.SIGKILL:
            if process.failed is not None:
                self.simulation.killed_while_it_ended(self.node, number, process.failed)
            self.end(number, None, signum)
            return
        behaviours = self.simulation.scenario.behaviours[process.who[0]]
        if process.deaf or rng.random() < behaviours.stubborn:
            return
        code, by = rng.choice(((None, signum), (128 + signum, None), (0, None), (1, None)))
        self.simulation.clock.after(rng.uniform(0.0, 0.3), lambda: self.end(number, code, by))

    def end(self, number: int, code: int | None, by: int | None) -> None:
        """The process ends, its link closes, and the spawner collects it."""
        process = self.processes[number]
        if not process.alive:
            return
        process.alive = False
        if process.waits is not None:
            self.simulation.left(process, process.waits)
        self.node.apply(events.LinkClosed(number))
        if process.view is not None:
            # The agent sees the end of its link, and wants to know of its end.
            self.wake()
        self._tell(
            Reaped(number, self.simulation.wall(self.node.name), code, None if by is None else int(by))
        )

    def die(self) -> None:
        """SIGKILL: its processes go with it, and the agent sees the end of the stream."""
        if not self.alive:
            return
        self.alive = False
        for process in self.processes.values():
            process.alive = False
        for store in self.simulation.stores.values():
            store.alive = store.alive and store.spawner is not self
        self.outbox.close(lambda _: self._buried())

    def _buried(self) -> None:
        if self.node.spawners.get(self.key) is self:
            del self.node.spawners[self.key]
            self.node.apply(events.SpawnerDown(self.key, "its spawner was killed", self.simulation.clock.now))
