"""The model of the masters' processes: crashes around every write and within it, errors of their own, and masters that
hang while others take over."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

from tests.sim.network import BeatsModel, Pipe
from tests.sim.protocols import SimulationOfMasters
from tests.sim.scenario import PlantedBug
from tests.sim.store import RUN, ProcessKilled
from tests.unit.failover.context.states import kept
from tests.unit.failover.invariants import check_job
from unirun.errors import EXIT_FAILURE, Fenced, StoreError
from unirun.failover.context import ContextStore, Ledger, load, urgent
from unirun.failover.crashes import (
    abort_step,
    begin_abort,
    crash_of,
    fatal,
    read_crashes,
    reason_of,
    record_crash,
    report_of,
)
from unirun.failover.draft import After, AgentLost, Command, Event, Finish, ToAgent, ToAgents
from unirun.failover.restart_or_end import shutdown_order
from unirun.failover.silence import REJOIN_SECONDS
from unirun.failover.state import JOB_ENDS, JobPhase, JobState, Verdict
from unirun.failover.step import step
from unirun.failover.takeover import REJOIN_TIMEOUT, resume
from unirun.launcher.master.lead import TERM_TTL
from unirun.launcher.master.writer import END_WRITE_TIMEOUT, STOP_WRITE_TIMEOUT
from unirun.rendezvous.election import Term, campaign, job_prefix, latest_epoch
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Heartbeat, Shutdown, View
from unirun.wire.reports import Join, Message

GOODBYE_SECONDS = 5.0


class MasterModel:
    """One master's process, as `lead`, `shell` and `writing` are, without their sockets and threads."""

    def __init__(self, simulation: SimulationOfMasters, number: int, deposing: int) -> None:
        self.simulation, self.number = simulation, number
        self.node = simulation.rng.choice([*simulation.nodes])
        self.client = simulation.client(self.node)
        self.beats = BeatsModel(self)
        self.client.interrupt = self._crash_in_write
        self.alive = True
        self.term: Term | None = None
        self.agents: dict[str, Pipe] = {}
        self.sent_away: set[str] = set()
        self.over = self.ends = False
        self.unwritten = self.writes = False
        self._began = simulation.clock.now
        self._frozen_until = 0.0
        self._next_write = self._stuck_since = math.inf
        try:
            self._begin(deposing)
        except StoreError as error:
            self.die(f"it cannot begin: {error}")
        except ProcessKilled:
            pass

    def _begin(self, deposing: int) -> None:
        simulation = self.simulation
        term = campaign(
            self.client,
            job_prefix(RUN),
            UnixAddress(f"/{self.number}", "host"),
            self.number,
            ttl=TERM_TTL,
            deposing=deposing,
        )
        if term is None:
            self.die("another leads")
            return
        self.contexts = ContextStore(self.client, RUN, term)
        self._crash("before it has loaded the context", 0.01)
        state = load(self.client, RUN)
        if state is None:
            state = simulation.first_state()
            self.contexts.create(state)
        self._crash("after it has loaded the context", 0.01)
        if not self.alive:
            return
        self.term = term
        self.state, self.ledger = state, Ledger(state)
        self.writes = True
        crash = fatal(read_crashes(self.client, RUN))
        self.ends = self.unwritten = crash is not None
        simulation.trace(
            f"master {self.number} on {self.node} {'leads' if not crash else 'ends the job'}: {term.epoch}"
        )
        try:
            if crash is not None:
                verdict = Verdict(
                    JobPhase.FAILED, EXIT_FAILURE, reason_of(crash), report=report_of(crash, "log")
                )
                self.state, commands = begin_abort(state, verdict, self._now())
                simulation.aborting(term.epoch, self.state)
            else:
                simulation.scenario.break_at("begin")
                rejoin = REJOIN_SECONDS if simulation.scenario.hosts else REJOIN_TIMEOUT
                self.state, commands = resume(state, self._now(), rejoin)
        except PlantedBug as error:
            self._hit_bug(error, "begin")
            return
        self.over = state.phase in JOB_ENDS
        self.beats.begin()
        self._add(commands)
        simulation.clock.after(TERM_TTL / 3, self._keep_term)
        if state.phase in JOB_ENDS:
            simulation.clock.after(GOODBYE_SECONDS, lambda: self.die("it is done"))

    def _now(self) -> float:
        """The wall clock of its node."""
        return self.simulation.wall(self.node)

    @property
    def leads(self) -> bool:
        """True if it answers, and believes that it leads."""
        return self.alive and self.term is not None

    @property
    def hangs(self) -> bool:
        """True if it does nothing now."""
        return self.alive and self.simulation.clock.now < self._frozen_until

    def hang(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self._frozen_until = self.simulation.clock.now + seconds

    def awake(self, do: Callable[[], None]) -> None:
        """Do something now, or when it does not hang any more."""
        if self.hangs:
            self.simulation.clock.after(
                self._frozen_until - self.simulation.clock.now, lambda: self.awake(do)
            )
        elif self.alive:
            do()

    def die(self, reason: str) -> None:
        """Its process ends, and every stream with it."""
        if not self.alive:
            return
        self.alive = False
        self.simulation.trace(f"master {self.number} is gone: {reason}")
        for name, pipe in list(self.agents.items()):
            node = self.simulation.nodes[name]
            pipe.close(lambda _, node=node: node.stream_ended(self))  # type: ignore[misc]
        if self.over and self.term is not None and reason == "it is done":
            with contextlib.suppress(StoreError, ProcessKilled):
                self.term.resign()

    def _hit_bug(self, error: PlantedBug, event: object) -> None:
        """An error of its own: it is kept, and the process ends."""
        assert self.term is not None
        self.simulation.hit_bug()
        with contextlib.suppress(StoreError, ProcessKilled):
            lasted = self.simulation.clock.now - self._began
            record_crash(self.client, RUN, self.term, crash_of(error, self.term.epoch, lasted, [event]))
        self.die(f"{error!r} at {event}")

    def _crash_in_write(self) -> None:
        self._crash("in a write", 0.002)
        if not self.alive:
            raise ProcessKilled

    def _crash(self, when: str, chance: float) -> None:
        if self.alive and self.simulation.rng.random() < chance * self.simulation.scenario.crashes:
            self.simulation.crashed()
            self.die(f"killed {when}")

    # streams

    def joined(self, join: Join, pipe: Pipe) -> None:
        """The first message of an agent has arrived."""
        self.awake(lambda: self._join(join, pipe))

    def _join(self, join: Join, pipe: Pipe) -> None:
        self.agents[join.node] = pipe
        self.sent_away.discard(join.node)
        lost = self.state.given_up(join.node) or join.node in self.state.losses
        if self.state.phase in JOB_ENDS or lost:
            self.sent_away.add(join.node)
            pipe.send(Shutdown())
            return
        self.apply(join)
        self.beats.joined()
        if self.unwritten and not self.ends and join.node in self.agents:
            self._shut_down(join.node)

    def _shut_down(self, node: str) -> None:
        """The end of the job cannot be written."""
        assert self.state.verdict is not None
        self.agents[node].send(shutdown_order(self.state, self.state.verdict))

    def heard(self, node: str, message: Message, pipe: Pipe) -> None:
        """A message of an agent has arrived; `pipe` is the way back to it."""

        def hear() -> None:
            if self.agents.get(node) is not pipe or node in self.sent_away:
                return
            if isinstance(message, Heartbeat):
                self.beats.answer(node, pipe, message)
            elif isinstance(message, Event):
                self.apply(message)

        self.awake(hear)

    def abort(self, node: str) -> None:
        """Close the stream of an agent that is given up."""
        if node in self.agents:
            self.agents.pop(node).close(lambda _: self.simulation.nodes[node].stream_ended(self))

    def cut(self, node: str) -> None:
        """Lose all messages that are on their way to an agent."""
        if node in self.agents:
            self.agents[node].cut = True

    def stream_ended(self, node: str, pipe: Pipe, reason: str) -> None:
        """The stream of an agent has ended."""

        def end() -> None:
            if self.agents.get(node) is pipe:
                del self.agents[node]
                self.beats.forget(node)
                self.apply(AgentLost(node, reason))

        self.awake(end)

    # what the shell does

    def apply(self, event: Event) -> None:
        """One step of the real core."""
        if not self.leads:
            return
        if self.hangs:
            self.awake(lambda: self.apply(event))
            return
        before = self.state
        self.simulation.trace(f"master {self.number}:", event)
        assert self.term is not None
        if self.ends:
            self.state, commands = abort_step(self.state, event, self._now())
            check_job(self.state)
            self.simulation.aborting(self.term.epoch, self.state)
            self._add(commands)
            return
        try:
            self.state, commands = step(self.state, event, self._now())
        except PlantedBug as error:
            self._hit_bug(error, event)
            return
        check_job(self.state)
        self.simulation.stepped(self.term.epoch, before, event, self.state, commands)
        self._add(commands)

    def _add(self, commands: list[Command]) -> None:
        if self.ledger.due is None:
            self._stuck_since = self.simulation.clock.now
        self._carry_out(self.ledger.add(self.state, commands))
        if self.unwritten:
            self._carry_out(self.ledger.waive())
        if not self.writes:
            return
        delay = self.simulation.rng.choice((0.001, 0.005, 0.05)) if self.ledger.due else 0.5
        when = self.simulation.clock.now + delay
        if self.state is not self.ledger.kept and when < self._next_write:
            self._next_write = when
            self.simulation.clock.after(delay, lambda: self.awake(lambda: self._write_planned(when)))

    def _write_planned(self, when: float) -> None:
        """An earlier plan may have come before this one."""
        if when == self._next_write:
            self._next_write = 0.0
            self._write(self.state)

    def _write(self, target: JobState) -> None:
        """Write, and then do what follows; it may be killed before, within and after."""
        self._crash("before a write", 0.02)
        if not self.alive:
            return
        try:
            self.simulation.scenario.break_at("write")
            self.contexts.write(target)
        except ProcessKilled:
            return
        except Fenced as error:
            self.die(str(error))
            return
        except PlantedBug as error:
            self.writes = False
            if not self.unwritten:
                self._hit_bug(error, "write")
            return
        except StoreError as error:
            self.simulation.trace(f"master {self.number} cannot write: {error}")
            self._end_unwritten()
            self.simulation.clock.after(0.4, lambda: self.awake(lambda: self._write(target)))
            return
        self.simulation.trace(f"master {self.number} has written")
        # A text that has not changed is not written, and not fenced.
        latest = latest_epoch(self.simulation.store, job_prefix(RUN))
        if self.ledger.kept != target and self.term is not None and self.term.epoch == latest:
            self._check_kept(target)
        self._crash("after a write", 0.02)
        if not self.alive:
            return
        self._next_write, self._stuck_since = math.inf, self.simulation.clock.now
        self._carry_out(self.ledger.written(target))
        self._add([])

    def _end_unwritten(self) -> None:
        """Carry out an end of the job that has waited too long."""
        state = self.state
        patience = STOP_WRITE_TIMEOUT if state.asked_to_stop else END_WRITE_TIMEOUT
        waited = self.simulation.clock.now > self._stuck_since + patience
        if state.verdict is None or self.unwritten or self.ledger.due is None or not waited:
            return
        self.unwritten = True
        self.simulation.waived = True
        self._carry_out(self.ledger.waive())
        for node in self.agents:
            self._shut_down(node)

    def _check_kept(self, target: JobState) -> None:
        """Check that the content of the store is the state."""
        found = load(self.simulation.store, RUN)
        assert found is not None
        assert found == kept(target), "the store holds another state"
        assert not urgent(found, target)
        self.simulation.kept(target)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            self.simulation.carried_out(self, command)
            match command:
                case ToAgent(node, message):
                    if node in self.agents:
                        self.simulation.trace(f"  {self.number} to {node}:", message)
                        self.agents[node].send(message)
                case ToAgents(nodes, message):
                    self.simulation.trace(f"  {self.number} to {', '.join(nodes)}:", message)
                    for node in nodes:
                        if node in self.agents:
                            self._send_view(node, message)
                case After(delay, then):
                    self.beats.after(delay, then)
                case Finish():
                    self._finish()

    def _send_view(self, node: str, view: Message) -> None:
        """Send a view; in some histories one of changes comes twice now and then, at once or later."""
        rng, agent = self.simulation.rng, self.agents[node]
        changes = isinstance(view, View) and view.since is not None
        if changes and self.simulation.scenario.disorder and rng.random() < self.simulation.scenario.disorder:
            self.simulation.clock.after(rng.choice((0.0, 1.0)), lambda: agent.send(view))
        agent.send(view)

    def _finish(self) -> None:
        assert not self.over, "the job ends twice"
        self.over = True
        for pipe in self.agents.values():
            pipe.send(Shutdown())
        self.simulation.clock.after(GOODBYE_SECONDS, lambda: self.die("it is done"))

    def _keep_term(self) -> None:
        if not self.leads:
            return
        if self.hangs:
            self.awake(self._keep_term)
            return
        assert self.term is not None
        began = self.beats.now()
        try:
            self.term.keep()
            self.beats.renewed = began
        except Fenced as error:
            self.die(str(error))
            return
        except ProcessKilled:
            return
        except StoreError as error:
            self.simulation.trace(f"master {self.number} cannot keep its term: {error}")
        self.simulation.clock.after(TERM_TTL / 3, self._keep_term)
