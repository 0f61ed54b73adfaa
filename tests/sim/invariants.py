"""The invariants of every history, after each step and at its end."""

from __future__ import annotations

import signal
from collections import Counter
from functools import partial

from msgspec.structs import replace

from tests.sim.fake_clock import FakeClock
from tests.sim.masters import MasterModel
from tests.sim.node import NodeModel
from tests.sim.processes import Process, StoreModel
from tests.sim.scenario import Scenario
from tests.sim.store import FencedStore
from tests.sim.views import ViewChecks, told_view
from tests.unit.failover.context.states import kept
from unirun.errors import EXIT_BUDGET, EXIT_FAILURE, EXIT_PLACEMENT, EXIT_RENDEZVOUS
from unirun.failover.context import load
from unirun.failover.crashes import MAX_MASTERS_PER_ERROR
from unirun.failover.draft import (
    VIEW_DELAY,
    Absent,
    Command,
    Due,
    Event,
    Finish,
    Straggles,
    ToAgents,
    leader,
)
from unirun.failover.state import (
    JOB_ENDS,
    NEVER,
    ROLE_ENDS,
    ROLE_WORKS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    WorkerPhase,
)
from unirun.launcher import events
from unirun.launcher.core import WORKER_EXIT_TIMEOUT
from unirun.launcher.events import AgentState
from unirun.wire.messages import Drain, Grow, StartRole, StopWorkers, View
from unirun.wire.reports import Boundary, FromWorker, Join, Message, StoreEnded, StoreOpened, WorkerExited

LOSS_EVENTS = (Due.LOSSES, Due.JOIN, Due.REJOIN)
"""The events by which any nodes are given up."""


def loses(event: Event) -> bool:
    """Return True for the events by which nodes are given up."""
    return event in LOSS_EVENTS or isinstance(event, Absent)


def moves(event: Event) -> bool:
    """Return True for the events by which ranks move though nothing has failed."""
    return isinstance(event, Drain | Straggles) or grows(event)


def grows(event: Event) -> bool:
    """Return True for the events by which roles grow."""
    boundary = isinstance(event, FromWorker) and isinstance(event.message, Boundary)
    return boundary or isinstance(event, Grow) or event is Due.GROWTH


BETWEEN = (RolePhase.RESTARTING, RolePhase.REFORMING)

DEAD = (RolePhase.FAILED, RolePhase.STOPPED)

WRITE_SECONDS = 0.5
"""Seconds that a few writes take at most."""

EXCHANGE_SECONDS = 12.0
"""Seconds that all messages of one exchange take at most."""


def role_of(event: WorkerExited | StoreEnded) -> str:
    """The role that an end is about."""
    return event.role if isinstance(event, StoreEnded) else event.worker.role


class Invariants:
    """The checks of a history; what they look at is made and moved on by `Simulation`."""

    scenario: Scenario
    clock: FakeClock
    stores: dict[str, StoreModel]
    opened: dict[str, int]
    viewed: float
    processes: list[Process]
    troubled: float
    store: FencedStore
    state: JobState
    finish: Finish | None
    end: JobState | None
    waived: bool
    bugs: int
    aborted: bool
    masters: list[MasterModel]
    nodes: dict[str, NodeModel]
    views: ViewChecks
    orderly: Counter[str]
    """By role, how often it was started again as nodes have come or left."""
    _began: float
    _orders_lost: bool

    def trace(self, text: str, *about: object) -> None:
        """Note something for a failing seed."""
        raise NotImplementedError

    def _check_master(self, before: JobState, event: Event) -> None:
        after = self.state
        if before.phase in JOB_ENDS:
            assert after == before, "a job that has ended has changed"
        if before.verdict is not None:
            assert after.verdict is not None
            assert after.verdict.phase is before.verdict.phase, "the verdict has changed"
        for name, role in after.roles.items():
            old = before.roles[name]
            if old.phase in ROLE_ENDS and not (
                old.phase is RolePhase.SUCCEEDED and after.restarts > before.restarts
            ):
                assert role == old, f"role {name} was {old.phase} and has changed"
            if not isinstance(event, Join) and event is not Due.REJOIN:
                # A node that comes back may tell of several things at once, and so may the loss of the last one.
                assert role.restarts in (old.restarts, old.restarts + 1)
                assert role.generation in (old.generation, old.generation + 1)
                assert role.opened in (old.opened, role.generation)
            assert role.restarts >= old.restarts
            assert role.opened >= old.opened
            if moves(event):
                assert (role.restarts, after.failures) == (old.restarts, before.failures), (
                    "that is no failure"
                )
                self.orderly[name] += role.phase is RolePhase.RESTARTING and old.phase in ROLE_WORKS
            if len(role.workers) > len(old.workers):
                # A companion has a rank on each node that its engines have moved to.
                beside = after.role_spec(name).beside is not None and (
                    loses(event) or isinstance(event, Drain)
                )
                assert beside or grows(event), f"{event} makes {name} larger"
            elif len(role.workers) != len(old.workers) and old.phase is not RolePhase.WAITING:
                assert loses(event) or isinstance(event, StoreOpened | Drain), f"{event} makes {name} smaller"
                assert len(after.placement.of_role(name)) == len(role.workers) < len(old.workers)
            if not self._survives(role):
                # A rank of which an order was lost on the way has started less often.
                assert len({w.incarnation for w in role.workers}) == 1 or self._orders_lost or self.orderly
                # It costs nothing when another process has the port of a program.
                paid = role.restarts + after.restarts + self.orderly[name]
                assert role.is_program or role.generation <= paid
            surplus = (w for w in old.workers[len(role.workers) :] if w.phase is not WorkerPhase.WAITING)
            dropped = max((w.incarnation for w in surplus), default=-1)
            for worker, earlier in zip(role.workers, old.workers, strict=False):
                if isinstance(event, Join):
                    continue
                again = (
                    max(old.dropped, dropped) if earlier.phase is WorkerPhase.WAITING else earlier.incarnation
                )
                assert worker.incarnation in (earlier.incarnation, again + 1)
                if worker.incarnation != earlier.incarnation and role.is_program:
                    # When it is due, after whatever event.
                    ended = isinstance(event, WorkerExited) and event.worker[:2] == (name, worker.rank)
                    fell = loses(event) and after.given_up(earlier.node)
                    assert ended or fell or not earlier.live, f"{name}:{worker.rank} starts while it lives"
                elif worker.incarnation != earlier.incarnation:
                    joins = isinstance(event, WorkerExited) and event.worker[:2] == (
                        name,
                        worker.rank,
                    )
                    # When the last one is back, or given up, who was not started is started in the store that is open.
                    opens = event is Due.REJOIN or isinstance(event, StoreOpened)
                    assert joins or opens, f"{event} starts {name}:{worker.rank}"
                    assert joins or not earlier.live, f"{name}:{worker.rank} is started while it lives"
                    assert worker.generation > earlier.generation
            if role.generation != old.generation and not isinstance(event, Join):
                allowed = loses(event) or isinstance(event, WorkerExited | StoreEnded) or moves(event)
                assert allowed, f"{event} starts one of {name}"
                if isinstance(event, WorkerExited | StoreEnded) and after.restarts == before.restarts:
                    assert role_of(event) == name, f"{event} starts a new generation of {name}"
        if after.phase is JobPhase.SUCCEEDED:
            assert all(after.roles[n].phase is RolePhase.SUCCEEDED for n in after.spec.primary)

    def _survives(self, role: RoleState) -> bool:
        """Return True if ranks of a role may form the next group when one is lost."""
        return role.restart == "process" or role.name in self.scenario.resilient

    def _check_budgets(self, before: JobState, event: Event) -> None:
        """A failure spends one restart: of a rank, of its role or of the job. A lost node spends one of each role."""
        spent = self.state.restarts - before.restarts
        for name, role in self.state.roles.items():
            if role is before.roles[name]:
                continue
            spent += role.restarts - before.roles[name].restarts
            for earlier, worker in role.workers.since(before.roles[name].workers):
                if earlier is not None and worker.paid != earlier.paid:
                    once = (*earlier.paid, worker.paid[-1])[-len(worker.paid) :]
                    assert worker.paid == once, f"{event} spends restarts of {name}:{worker.rank}"
        if isinstance(event, WorkerExited | StoreEnded):
            assert spent <= 1, f"{event} spends {spent} restarts"
        elif not loses(event) and not isinstance(event, Join):
            assert spent == 0, f"{event} spends {spent} restarts"

    def _check_places(self, before: JobState, event: Event) -> None:
        """Nobody is where nobody can be; and a lost node changes nothing for roles that had nothing there."""
        state = self.state
        for name, role in state.roles.items():
            lost = [w.rank for w in role.live if state.given_up(w.node)]
            assert not lost, f"{name}:{lost} lives on a node that was given up"
            # A service that ends while the job runs is given up.
            if state.phase is JobPhase.RUNNING and role.phase not in (*ROLE_ENDS, RolePhase.STOPPING):
                places = state.placement.of_role(name)
                # Who has done its work keeps its place, if there is no other.
                wanted = zip(role.workers, places, strict=False)
                nowhere = [w.rank for w, place in wanted if state.given_up(place.node) and not w.ended_well]
                assert not nowhere, f"{name}:{nowhere} have no place"
                gone = {*state.placement.lost} - {*before.placement.lost}
                was = before.placement.of_role(name)
                told = event is Due.LOSSES and before.phase is JobPhase.RUNNING
                # Its store may have been there though nobody of it lived there any more.
                if role.is_program or role.phase is not before.roles[name].phase:
                    continue
                if state.restarts > before.restarts:
                    continue
                if gone and told and was == places and leader(before, name) not in gone:
                    old = before.roles[name]
                    here = [worker for worker in old.live if worker.node in gone]
                    # Only those were there whose ranks have another place already; they were told to end.
                    assert all(before.misplaced(old, worker) for worker in here)
                    # It may have waited for the end of the last worker there.
                    same = role == replace(old, due=role.due)
                    assert here or same, f"{event} changes {name}, which had nothing there"
        assert not state.away & {*state.placement.lost}, "somebody is waited for who was given up"
        if state.phase is JobPhase.RUNNING and len(state.nodes) > 1:
            ended = [name for name in state.spec.primary if state.roles[name].phase in DEAD]
            assert not ended, f"the job runs on without {ended}"
        gone = {*state.placement.lost} - {*before.placement.lost}
        asked = {*before.draining, event.node} if isinstance(event, Drain | Absent) else {*before.draining}
        assert event in LOSS_EVENTS or gone <= asked, f"{event} makes {gone} leave"

    def _check_optional(self, before: JobState, event: Event) -> None:
        """A job goes on without an optional service: no end of a rank of one ends it, and no loss of nodes on which the
        other roles have nothing."""
        state = self.state
        if before.verdict is not None or state.verdict is None or state.verdict.phase is not JobPhase.FAILED:
            return
        if all(role.phase in ROLE_ENDS for role in state.roles.values()) and not state.spec.primary:
            return
        if isinstance(event, WorkerExited):
            ended = before.roles[event.worker.role]
            own = not ended.living or event.cause == "leaving" or event.worker.role in state.spec.primary
            assert own or not state.role_spec(ended.name).optional, f"{event} ends the job"
        elif loses(event):
            gone = {*before.losses, *before.away}
            if event is Due.JOIN:
                gone = {*before.nodes} - ({*before.agents} - before.away)
            needed = {
                name
                for name, role in before.roles.items()
                if not state.role_spec(name).optional and role.phase not in ROLE_ENDS
                for node in (*(w.node for w in role.live), *(p.node for p in before.placement.of_role(name)))
                if node in gone
            }
            assert needed or not before.without(gone), f"{event} ends the job, which needs nothing of {gone}"

    def _check_reforming(self, before: JobState, event: Event) -> None:
        """Check that the fate of one worker of a role that lives on changes nothing for its peers."""
        if self.state.phase is not JobPhase.RUNNING or not isinstance(event, WorkerExited | StoreEnded):
            return
        for name, role in self.state.roles.items():
            if before.roles[name].in_place and not role.is_program and before.roles[name].wave:
                hit = (
                    event.worker.rank
                    if isinstance(event, WorkerExited) and event.worker.role == name
                    else None
                )
                for worker, earlier in zip(role.workers, before.roles[name].workers, strict=True):
                    # Ports of a rank that goes elsewhere are asked for when its role is looked at again.
                    same = worker == (earlier if earlier.live else replace(earlier, ports=worker.ports))
                    assert same or worker.rank == hit, f"{event} changes {name}:{worker.rank}"

    def _check_news(self, before: JobState, event: Event, commands: list[Command]) -> None:
        """Check that an own death of a process is reported at once, and an ordered one after a moment."""
        views = [c.message for c in commands if isinstance(c, ToAgents) and isinstance(c.message, View)]
        if views:
            self.viewed = self.clock.now
        if not isinstance(event, WorkerExited) or before.phase in JOB_ENDS or before.away:
            return
        worker = before.roles[event.worker.role].workers[event.worker.rank]
        if not worker.live or worker.incarnation != event.worker.incarnation or event.code == 0:
            return
        if event.cause == "leaving" and before.without({worker.node}):
            # It is told with all that its agent takes with it.
            return
        if event.cause in ("own", "lost_dependency"):
            roles = [role for role in views[0].roles if role.name == event.worker.role]
            seen = [w for role in roles for w in role.workers if w.rank == event.worker.rank]
            lost = [("lost", event.worker.incarnation)]
            assert [(w.phase, w.incarnation) for w in seen] == lost, f"{event} is not told"
        else:
            self.clock.after(VIEW_DELAY + WRITE_SECONDS, partial(self._must_have_told, self.clock.now))

    def _must_have_told(self, since: float) -> None:
        assert self.viewed >= since or self.state.phase in JOB_ENDS or self._troubled_since(since), "no news"

    def _troubled_since(self, when: float) -> bool:
        """Return True if a master, or its way to the store, has been away since then."""
        return self.troubled >= when or self.scenario.unknown > 0 or self.scenario.crashes > 0

    def _watch_promptness(self, before: JobState) -> None:
        """Check that each process that was told to end has ended when its grace is over and the last message has arrived."""
        soon = self.scenario.spec.shutdown_timeout + EXCHANGE_SECONDS
        now = self.clock.now
        if self.state.phase is JobPhase.STOPPING and before.phase is not JobPhase.STOPPING:
            # Services end one after the other.
            services = sum(role.service for role in self.scenario.spec.roles)
            self.clock.after(soon * (1 + services), lambda: self._must_be_over(now))
        for name, role in self.state.roles.items():
            # A program may be not ready for as long as it has time for that.
            between = role.phase in BETWEEN or (role.phase is RolePhase.STARTING and not role.is_program)
            if between and _stage(role) != _stage(before.roles[name]):
                self.clock.after(soon, partial(self._must_have_gone_on, role, now))

    def _must_be_over(self, since: float) -> None:
        assert self.state.phase in JOB_ENDS or self._troubled_since(since), "the job does not end"

    def _must_have_gone_on(self, old: RoleState, since: float, *, waited: bool = True) -> None:
        """Check that a role comes to rest, and look again as long as it `waited` for something at the last look."""
        role, now = self.state.roles[old.name], self.clock.now
        if _stage(role) != _stage(old) or self.state.phase is not JobPhase.RUNNING or self._hopeless:
            return
        waits = self._troubled_since(since) or self._has_to_wait(role)
        assert waits or waited, f"{role.name} is {role.phase} in generation {role.generation} for too long"
        self.clock.after(EXCHANGE_SECONDS, partial(self._must_have_gone_on, old, now, waited=waits))

    def _has_to_wait(self, role: RoleState) -> bool:
        """Return True if a role is not due yet, waits for what still ends after its failure, or starts after another
        one that is not up or has not ended."""
        if any(
            each.alive and each.failed is not None and each.who[0] == role.name for each in self.processes
        ):
            return True
        others = [self.state.roles[name] for name in self.state.role_spec(role.name).after]
        turn = all(other.running == len(other.workers) for other in others)
        turn &= not any(r.living for r in self.state.roles.values() if r.phase is RolePhase.RESTARTING)
        backs_off = any(worker.due > self.clock.now for worker in role.workers)
        return role.due > self.clock.now or backs_off or (role.due > 0 and not turn)

    def _must_have_stores(self) -> None:
        """Ranks of a role that runs can meet: the store of its generation is served.

        Once no worker of the role is left on the node of its store, an end of the store goes unnoticed; and once a
        worker has ended well, those that live on are not disturbed by it. Where masters die all the time, there may be none
        that has led for long enough.
        """
        if self.troubled >= self.clock.now - EXCHANGE_SECONDS:
            return
        for role in self.state.roles.values():
            if not self._hopeless and self.state.phase is JobPhase.RUNNING and role.is_program:
                self._must_have_programs(role)
            elif role.due and role.phase is RolePhase.REFORMING:
                assert role.forming, f"{role.name} waits for no start"
            elif not self._hopeless and self.state.phase is JobPhase.RUNNING and role.live:
                broken = [w.rank for w in role.workers if w.exit and not w.exit.ok]
                assert not broken, f"{role.name} runs on without its ranks {broken}"
                if all(worker.node != leader(self.state, role.name) for worker in role.live):
                    continue
                if self._survives(role) and any(worker.ended_well for worker in role.workers):
                    continue
                store = self.stores.get(role.name)
                assert store is not None, f"no store was opened for {role.name}"
                assert store.alive, f"the store of {role.name} is gone"
                assert store.generation == role.generation, f"the store of {role.name} is an old one"
                here = [p for p in self.processes if p.alive and p.who[0] == role.name]
                assert {p.generation for p in here} == {role.generation}, f"{role.name} is not in one group"

    def _must_have_programs(self, role: RoleState) -> None:
        """Every rank of a service runs, or will soon; a role that waits has to."""
        state, spec = self.state, self.state.role_spec(role.name)
        if self._troubled_since(self.clock.now - 2 * EXCHANGE_SECONDS) or state.away:
            return
        if role.phase is RolePhase.WAITING:
            others = [state.roles[name] for name in spec.after]
            assert any(other.running < len(other.workers) for other in others), f"{role.name} never starts"
        elif spec.service and role.phase in ROLE_WORKS:
            if spec.group is not None:
                # The others of its group may still have their grace period.
                return
            down = [
                w.rank
                for w in role.workers
                if not w.live and w.due != NEVER and w.due <= self.clock.now - EXCHANGE_SECONDS
            ]
            assert not down, f"{role.name} goes on without its ranks {down}"

    def _check_order(self, before: JobState, event: Event, message: Message) -> None:
        """A worker is stopped when its own role restarts or the job ends, never for another role."""
        if isinstance(message, StopWorkers) and self.state.phase is JobPhase.RUNNING:
            if self.state.restarts > before.restarts:
                return
            assert loses(event) or isinstance(event, WorkerExited | Join) or moves(event)
            assert not isinstance(event, WorkerExited) or event.worker.role == message.role
            role = self.state.roles[message.role]
            state_spec = self.state.role_spec(message.role)
            alone = role.restart == "process" and role.phase is not RolePhase.STOPPING
            alone |= before.roles[message.role].in_place and role.phase is RolePhase.REFORMING
            # A rank with a budget of its own that is spent.
            alone &= state_spec.rank_restarts is None or role.phase is not RolePhase.RESTARTING
            grouped = state_spec.group is not None
            orderly = isinstance(event, Join) or moves(event)
            assert not alone or grouped or loses(event) or orderly, "it is stopped for its peer"
        if isinstance(message, StartRole):
            # A node that comes back may tell, too, that the job is over.
            assert self.state.phase is JobPhase.RUNNING or isinstance(event, Join)
            assert self._can_meet(message.role, message.generation), "nobody could meet"
            self.views.started(message)
            workers = before.roles[message.role].workers
            ended = event.worker.rank if isinstance(event, WorkerExited) else None
            again = isinstance(event, Join) or (loses(event) and before.roles[message.role].is_program)
            assert again or not any(workers[m.rank].live for m in message.members if m.rank != ended)
        if isinstance(message, View):
            assert all(self._can_meet(role.name, role.generation) for role in message.roles)

    def _can_meet(self, role: str, generation: int) -> bool:
        """Return True if the store of a generation was opened. Programs have none."""
        return self.state.roles[role].is_program or generation <= self.opened.get(role, 0)

    def killed_while_it_ended(self, node: NodeModel, number: int, since: float) -> None:
        """An exit that has begun by itself has its time, unless somebody wants it to end."""
        worker = node.state.workers.get(number)
        if worker is None or worker.sent is not None or worker.cause != "own":
            return
        alone = node.state.survives(worker.who.role)
        limit = self.scenario.spec.shutdown_timeout if alone else WORKER_EXIT_TIMEOUT
        assert self.clock.now - since > limit - 0.001, f"{worker.who} is killed while its exit handlers run"

    def checked_agent(self, node: NodeModel, before: AgentState, event: events.Event) -> None:
        """Check what must hold after a step of an agent's core."""
        self.trace(f"{node.name}:", _brief(event))
        state = node.state
        if isinstance(event, events.Order) and state.view is not before.view and state.view is not None:
            self.views.seen(node.name, event.epoch, state.view)
        if state.leaving and not before.leaving:
            # A grace period may be what its workers still have.
            soon = EXCHANGE_SECONDS + (
                self.scenario.spec.shutdown_timeout if self.aborted or state.ending else 0.0
            )
            now = self.clock.now
            self.clock.after(soon, lambda: self._must_have_left(node, now))
        ranks = [w.who[:2] for w in state.workers.values()]
        assert len(set(ranks)) == len(ranks), f"two workers hold one rank: {ranks}"
        assert len(set(node.exits)) == len(node.exits), f"{node.exits} tells one end twice"
        for worker in state.workers.values():
            who = worker.who
            assert who not in node.exits, f"{who} has ended and is kept"
            assert (worker.pid is not None) == (worker.phase is events.Phase.ALIVE)
            assert worker.spawner in state.spawners, f"{who} waits for a spawner that is not there"
            is_ready = worker.health is not None and worker.health.ready
            weighted = worker.current or not worker.companion
            assert is_ready == (worker.was_ready and weighted), f"{who} is ready too early or too late"
            if worker.phase is events.Phase.QUEUED:
                assert not state.spawners[worker.spawner], f"{who} waits for a spawner that is ready"
        for store in state.stores.values():
            ready = state.spawners.get(store.spawner)
            assert state.leaving or store.ended or store.sent == ready, (
                "a store waits for a spawner that is ready"
            )

    def _must_know(self) -> None:
        """Check that every agent and every worker that listens has the latest view when nothing happens any more."""
        told = self.state.told
        if self._hopeless or self.state.phase is not JobPhase.RUNNING or self.state.away or told is None:
            return
        if self.state.view_due or self._troubled_since(self.clock.now - 2 * EXCHANGE_SECONDS):
            return
        for name in self.state.agents.keys() - self.state.uninformed:
            assert self.nodes[name].state.view == told_view(self.state), f"{name} does not know how all stand"

    def _must_have_left(self, node: NodeModel, since: float) -> None:
        assert not node.alive or self.troubled >= since, f"the agent of {node.name} does not leave"

    @property
    def _hopeless(self) -> bool:
        """True if no process is left that could go on, or start one that can."""
        here = (node for name, node in self.nodes.items() if name not in self.scenario.absent)
        return not any(node.alive for node in here) and not any(m.leads for m in self.masters)

    def _check_end(self) -> None:
        lives = [process.who for process in self.processes if process.alive]
        assert not lives, f"{lives} live on"
        joined = [node for name, node in self.nodes.items() if name not in self.scenario.absent]
        assert not any(node.alive for node in joined), "an agent has not left"
        assert not any(master.leads for master in self.masters), "a master has not left"
        self._check_history()
        # Without other trouble each crash is kept, and so many are enough; the first one may have come another way.
        quiet = not (self.scenario.crashes or self.scenario.unknown or self.scenario.accidents)
        assert self.bugs <= (MAX_MASTERS_PER_ERROR + 1 if quiet else 4 * MAX_MASTERS_PER_ERROR), (
            f"{self.bugs} masters have crashed"
        )
        if self.finish is not None:
            self._check_verdict(self.finish)

    def _check_history(self) -> None:
        """Check that the changes, one after the other, give the present content."""
        there: dict[str, str] = {}
        changed = self.store.watch("", 0).changes(0.0)
        assert isinstance(changed, tuple)
        for change in changed:
            if change.kind == "put":
                there[change.key] = change.value
            else:
                del there[change.key]
        assert there == {item.key: item.value for item in self.store.get_prefix("").items}
        if self.end is not None:
            assert load(self.store, "sim") == kept(self.end)

    def _check_verdict(self, finish: Finish) -> None:
        phase, code = finish.verdict.phase, finish.verdict.code
        assert phase in JOB_ENDS
        if self.aborted:
            assert (phase, code) == (JobPhase.FAILED, EXIT_FAILURE)
            assert f"a bug in {self.scenario.planted}" in finish.verdict.report
            return
        end = self.end or self.state
        statuses = {failure.exit.status for failure in end.failures}
        if phase is JobPhase.SUCCEEDED:
            assert code == 0
        elif phase is JobPhase.STOPPED:
            assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
        else:
            own = {EXIT_BUDGET, EXIT_RENDEZVOUS, 128 + signal.SIGKILL}
            own |= {EXIT_PLACEMENT} if self.scenario.inventory.nodes else set()
            # An end that was not written may be that of a master before the one whose state this is.
            unwritten = self.waived and self.end is None
            assert unwritten or code in statuses | own, f"{code} of {statuses}"
            assert code != 0
            assert finish.verdict.report
        if code == EXIT_BUDGET and EXIT_BUDGET not in statuses:
            spent = [(end.restarts, end.spec.max_job_restarts)]
            for role in end.roles.values():
                spec = end.role_spec(role.name)
                spent.append((role.restarts, spec.max_restarts))
                spent += ((len(worker.paid), spec.rank_restarts or 0) for worker in role.workers)
            assert any(restarts >= limit > 0 for restarts, limit in spent)
        if code == EXIT_RENDEZVOUS and EXIT_RENDEZVOUS not in statuses:
            never = any("was not ready within" in failure.note for failure in end.failures)
            assert never or self.scenario.absent or self._troubled_since(self._began)


def _stage(role: RoleState) -> tuple[RolePhase, int, int]:
    return role.phase, role.generation, role.restarts


def _brief(event: events.Event) -> object:
    if isinstance(event, events.Launch):
        return f"Launch({', '.join(f'{w.who}#{w.who.incarnation}' for w in event.workers)})"
    return event
