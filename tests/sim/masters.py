"""The model of the masters' processes and of the store between them: delays, crashes around every write, time-outs
with an unknown outcome, partitions, and masters that hang while others take over."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tests.sim.node import Node
from tests.sim.world import Clock, Pipe, Plan
from unirun.errors import Fenced, OutcomeUnknown, StoreAway, StoreError
from unirun.master import JobState, step
from unirun.master.context import changes, restore, urgent
from unirun.master.events import After, AgentLost, Command, Event, Finish, ToAgent
from unirun.master.keeper import Keeper, load, read_context
from unirun.master.lead import TERM_TTL
from unirun.master.ledger import Ledger
from unirun.master.resuming import resume
from unirun.master.state import JOB_ENDS, JobPhase
from unirun.master.writing import END_PATIENCE
from unirun.rendezvous.election import Term, campaign
from unirun.rendezvous.keys import job_prefix
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, Item, Lease, Listing, Outcome, Put
from unirun.wire.messages import Message, Shutdown
from unirun.wire.reports import Join

RUN = "sim"
GOODBYE = 5.0
T = TypeVar("T")


class FencedStore(MemoryStore):
    """The store, which takes no write of an earlier term."""

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """As in `MemoryStore`; a write to the context that is done must come from the latest term."""
        outcome = super().txn(compares, puts, deletes)
        head = next((put for put in puts if put.key == f"{job_prefix(RUN)}head"), None)
        if outcome.succeeded and head is not None:
            epoch = self.get(f"{job_prefix(RUN)}epoch")
            assert epoch is not None
            assert json.loads(head.value)["epoch"] == int(epoch.value), "a write of an old term was taken"
        return outcome


class Client:
    """One process's way to the store: it may be cut off, and answers may get lost."""

    url = "memory:"

    def __init__(self, store: MemoryStore, clock: Clock, rng: random.Random, unknown: float) -> None:
        self._store, self._clock, self._rng, self._unknown = store, clock, rng, unknown
        self.away_until = 0.0

    def _here(self) -> None:
        if self._clock.now < self.away_until:
            raise StoreAway("the store cannot be reached")

    def get(self, key: str) -> Item | None:
        self._here()
        return self._store.get(key)

    def get_prefix(self, prefix: str) -> Listing:
        self._here()
        return self._store.get_prefix(prefix)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        self._here()
        if self._rng.random() < self._unknown:
            if self._rng.random() < 0.5:
                self._store.txn(compares, puts, deletes)
            raise OutcomeUnknown("no answer came")
        return self._store.txn(compares, puts, deletes)

    def grant(self, ttl: float) -> Lease:
        self._here()
        return self._store.grant(ttl)

    def keep_alive(self, lease: Lease) -> None:
        self._here()
        self._store.keep_alive(lease)

    def revoke(self, lease: Lease) -> None:
        self._here()
        self._store.revoke(lease)


class Stage(Protocol):
    """What masters need of the simulation."""

    clock: Clock
    rng: random.Random
    plan: Plan
    store: MemoryStore
    nodes: dict[str, Node]
    waived: bool
    """Whether a job has ended without that being written."""

    def client(self) -> Client:
        """A way to the store for a new process."""

    def first_state(self) -> JobState:
        """The state of the job before anything happened."""

    def trace(self, text: str) -> None:
        """Note something for a failing seed."""

    def stepped(
        self, epoch: int, before: JobState, event: Event, after: JobState, commands: list[Command]
    ) -> None:
        """Check what must hold after a step of a master's core."""

    def kept(self, state: JobState) -> None:
        """A master has written `state`."""

    def carried_out(self, master: MasterModel, command: Command) -> None:
        """A master does something."""


class MasterModel:
    """One master's process, as `lead`, `shell` and `writing` are, without their sockets and threads."""

    def __init__(self, stage: Stage, number: int, deposing: int) -> None:
        self.stage, self.number = stage, number
        self.client = stage.client()
        self.alive = True
        self.term: Term | None = None
        self.agents: dict[str, Pipe] = {}
        self.sent_away: set[str] = set()
        self.over = False
        self._frozen_until = 0.0
        self._next_write = self._trouble_since = math.inf
        try:
            self._begin(deposing)
        except StoreError as error:
            self.die(f"it cannot begin: {error}")

    def _begin(self, deposing: int) -> None:
        stage = self.stage
        term = campaign(
            self.client,
            job_prefix(RUN),
            str(self.number),
            "host",
            self.number,
            ttl=TERM_TTL,
            deposing=deposing,
        )
        if term is None:
            self.die("another leads")
            return
        self.keeper = Keeper(self.client, RUN, term)
        self._crash("before it has loaded the context", 0.01)
        state = load(self.client, RUN)
        if state is None:
            state = stage.first_state()
            self.keeper.create(state)
        self._crash("after it has loaded the context", 0.01)
        if not self.alive:
            return
        self.term = term
        self.state, commands = resume(state, self._now())
        self.ledger = Ledger(state)
        self.over = state.phase in JOB_ENDS
        stage.trace(f"master {self.number} leads in term {term.epoch}")
        self._add(commands)
        stage.clock.after(TERM_TTL / 3, self._keep_term)
        if self.over:
            stage.clock.after(GOODBYE, lambda: self.die("it is done"))

    def _now(self) -> float:
        """The wall clock, which may jump."""
        return self.stage.clock.now + self.stage.plan.skew

    @property
    def leads(self) -> bool:
        """Whether it answers, and believes that it leads."""
        return self.alive and self.term is not None

    @property
    def hangs(self) -> bool:
        """Whether it does nothing now."""
        return self.alive and self.stage.clock.now < self._frozen_until

    def hang(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self._frozen_until = self.stage.clock.now + seconds

    def _awake(self, do: Callable[[], None]) -> None:
        """Do something now, or when it does not hang any more."""
        if self.hangs:
            self.stage.clock.after(self._frozen_until - self.stage.clock.now, lambda: self._awake(do))
        elif self.alive:
            do()

    def die(self, reason: str) -> None:
        """Its process ends, and every stream with it."""
        if not self.alive:
            return
        self.alive = False
        self.stage.trace(f"master {self.number} is gone: {reason}")
        for name, pipe in list(self.agents.items()):
            node = self.stage.nodes[name]
            pipe.close(lambda _, node=node: node.stream_ended(self))  # type: ignore[misc]
        if self.over and self.term is not None and reason == "it is done":
            try:
                self.term.resign()
            except StoreError:
                return

    def _crash(self, when: str, chance: float) -> None:
        if self.alive and self.stage.rng.random() < chance * self.stage.plan.crashes:
            self.die(f"killed {when}")

    # streams

    def joined(self, join: Join, pipe: Pipe) -> None:
        """The first message of an agent has arrived."""
        self._awake(lambda: self._join(join, pipe))

    def _join(self, join: Join, pipe: Pipe) -> None:
        self.agents[join.node] = pipe
        self.sent_away.discard(join.node)
        if self.state.phase in JOB_ENDS or self.state.given_up(join.node):
            self.sent_away.add(join.node)
            pipe.send(Shutdown())
        else:
            self.apply(join)

    def heard(self, node: str, message: Message) -> None:
        """A message of an agent has arrived."""

        def hear() -> None:
            if node in self.agents and node not in self.sent_away and isinstance(message, Event):
                self.apply(message)

        self._awake(hear)

    def cut(self, node: str) -> None:
        """What is on its way to an agent is lost."""
        if node in self.agents:
            self.agents[node].cut = True

    def stream_ended(self, node: str, pipe: Pipe, reason: str) -> None:
        """The stream of an agent has ended."""

        def end() -> None:
            if self.agents.get(node) is pipe:
                del self.agents[node]
                self.apply(AgentLost(node, reason))

        self._awake(end)

    # what the shell does

    def apply(self, event: Event) -> None:
        """One step of the real core."""
        if not self.leads:
            return
        if self.hangs:
            self._awake(lambda: self.apply(event))
            return
        before = self.state
        self.stage.trace(f"master {self.number}: {event}")
        self.state, commands = step(self.state, event, self._now())
        self.state.check()
        assert self.term is not None
        self.stage.stepped(self.term.epoch, before, event, self.state, commands)
        self._add(commands)

    def _add(self, commands: list[Command]) -> None:
        self._carry_out(self.ledger.add(self.state, commands))
        delay = self.stage.rng.choice((0.001, 0.005, 0.05)) if self.ledger.due else 0.5
        when = self.stage.clock.now + delay
        if self.state is not self.ledger.kept and when < self._next_write:
            self._next_write = when
            self.stage.clock.after(delay, lambda: self._awake(lambda: self._write_planned(when)))

    def _write_planned(self, when: float) -> None:
        """An earlier plan may have come before this one."""
        if when == self._next_write:
            self._next_write = 0.0
            self._write(self.state)

    def _write(self, target: JobState) -> None:
        """Write, and then do what follows; it may be killed before and after."""
        self._crash("before a write", 0.02)
        if not self.alive:
            return
        try:
            written = self.keeper.write(self.ledger.kept, target)
            assert written, "a small job needs no second transaction"
        except Fenced as error:
            self.die(str(error))
            return
        except StoreError as error:
            self.stage.trace(f"master {self.number} cannot write: {error}")
            self._trouble_since = min(self._trouble_since, self.stage.clock.now)
            long = self.stage.clock.now > self._trouble_since + END_PATIENCE
            if self.state.verdict is not None and (self.state.verdict.phase is JobPhase.STOPPED or long):
                self.stage.waived = self.stage.waived or self.state.phase in JOB_ENDS
                self._carry_out(self.ledger.waive())
            self.stage.clock.after(0.4, lambda: self._awake(lambda: self._write(target)))
            return
        self.stage.trace(f"master {self.number} has written")
        if changes(self.ledger.kept, target):
            self._check_kept(target)
        self._crash("after a write", 0.02)
        if not self.alive:
            return
        self._next_write = self._trouble_since = math.inf
        self._carry_out(self.ledger.written(target))
        self._add([])

    def _check_kept(self, target: JobState) -> None:
        """What is in the store is the state."""
        found = restore(read_context(self.stage.store, RUN))
        assert changes(None, found) == changes(None, target), "the store holds another state"
        assert not urgent(found, target)
        self.stage.kept(target)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            self.stage.carried_out(self, command)
            match command:
                case ToAgent(node, message):
                    if node in self.agents:
                        self.stage.trace(f"  {self.number} to {node}: {message}")
                        self.agents[node].send(message)
                case After(delay, then):
                    self.stage.clock.after(delay, lambda then=then: self.apply(then))  # type: ignore[misc]
                case Finish():
                    self._finish()

    def _finish(self) -> None:
        assert not self.over, "the job ends twice"
        self.over = True
        for pipe in self.agents.values():
            pipe.send(Shutdown())
        self.stage.clock.after(GOODBYE, lambda: self.die("it is done"))

    def _keep_term(self) -> None:
        if not self.leads:
            return
        if self.hangs:
            self._awake(self._keep_term)
            return
        assert self.term is not None
        try:
            self.term.keep()
        except Fenced as error:
            self.die(str(error))
            return
        except StoreError as error:
            self.stage.trace(f"master {self.number} cannot keep its term: {error}")
        self.stage.clock.after(TERM_TTL / 3, self._keep_term)
