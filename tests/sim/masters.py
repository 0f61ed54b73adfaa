"""The model of the masters' processes: crashes around every write and within it, errors of their own, and masters that
hang while others take over."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

from tests.sim.network import BeatsModel
from tests.sim.stage import Stage
from tests.sim.store import RUN, Killed
from tests.sim.world import Pipe, Planted
from tests.unit.failover.invariants import check_job
from tests.unit.failover.persistence.documents import kept
from unirun.errors import EXIT_FAILURE, Fenced, StoreError
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
from unirun.failover.events import After, AgentLost, Command, Event, Finish, ToAgent, ToAgents
from unirun.failover.persistence.context import changed_documents, restore, urgent
from unirun.failover.persistence.context_store import ContextStore, Ledger, read_context
from unirun.failover.restart_or_end import shutdown_order
from unirun.failover.state import JOB_ENDS, JobPhase, JobState, Verdict
from unirun.failover.step import step
from unirun.failover.takeover import resume
from unirun.launcher.master.lead import TERM_TTL
from unirun.launcher.master.writer import END_WRITE_TIMEOUT, STOP_WRITE_TIMEOUT
from unirun.rendezvous.election import Term, campaign, job_prefix
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Heartbeat, Message, Shutdown, View
from unirun.wire.reports import Join

GOODBYE = 5.0


class MasterModel:
    """One master's process, as `lead`, `shell` and `writing` are, without their sockets and threads."""

    def __init__(self, stage: Stage, number: int, deposing: int) -> None:
        self.stage, self.number = stage, number
        self.node = stage.rng.choice([*stage.nodes])
        self.client = stage.client(self.node)
        self.beats = BeatsModel(self)
        self.client.interrupt = self._crash_in_write
        self.alive = True
        self.term: Term | None = None
        self.agents: dict[str, Pipe] = {}
        self.sent_away: set[str] = set()
        self.over = self.ends = False
        self.unwritten = self.writes = False
        self._began = stage.clock.now
        self._frozen_until = 0.0
        self._next_write = self._stuck_since = math.inf
        try:
            self._begin(deposing)
        except StoreError as error:
            self.die(f"it cannot begin: {error}")
        except Killed:
            pass

    def _begin(self, deposing: int) -> None:
        stage = self.stage
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
        state = self.contexts.take_over()
        if state is None:
            state = stage.first_state()
            self.contexts.create(state)
        self._crash("after it has loaded the context", 0.01)
        if not self.alive:
            return
        self.term = term
        self.state, self.ledger = state, Ledger(state)
        self.writes = True
        crash = fatal(read_crashes(self.client, RUN))
        self.ends = self.unwritten = crash is not None
        stage.trace(
            f"master {self.number} on {self.node} {'leads' if not crash else 'ends the job'}: {term.epoch}"
        )
        try:
            if crash is not None:
                verdict = Verdict(
                    JobPhase.FAILED, EXIT_FAILURE, reason_of(crash), report=report_of(crash, "log")
                )
                self.state, commands = begin_abort(state, verdict, self._now())
                stage.aborting(term.epoch, self.state)
            else:
                stage.plan.break_at("begin")
                self.state, commands = resume(state, self._now())
        except Planted as error:
            self._hit_bug(error, "begin")
            return
        self.over = state.phase in JOB_ENDS
        self.beats.begin()
        self._add(commands)
        stage.clock.after(TERM_TTL / 3, self._keep_term)
        if state.phase in JOB_ENDS:
            stage.clock.after(GOODBYE, lambda: self.die("it is done"))

    def _now(self) -> float:
        """The wall clock of its node."""
        return self.stage.wall(self.node)

    @property
    def leads(self) -> bool:
        """True if it answers, and believes that it leads."""
        return self.alive and self.term is not None

    @property
    def hangs(self) -> bool:
        """True if it does nothing now."""
        return self.alive and self.stage.clock.now < self._frozen_until

    def hang(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self._frozen_until = self.stage.clock.now + seconds

    def awake(self, do: Callable[[], None]) -> None:
        """Do something now, or when it does not hang any more."""
        if self.hangs:
            self.stage.clock.after(self._frozen_until - self.stage.clock.now, lambda: self.awake(do))
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
            with contextlib.suppress(StoreError, Killed):
                self.term.resign()

    def _hit_bug(self, error: Planted, event: object) -> None:
        """An error of its own: it is kept, and the process ends."""
        assert self.term is not None
        self.stage.hit_bug()
        with contextlib.suppress(StoreError, Killed):
            lasted = self.stage.clock.now - self._began
            record_crash(self.client, RUN, self.term, crash_of(error, self.term.epoch, lasted, [event]))
        self.die(f"{error!r} at {event}")

    def _crash_in_write(self) -> None:
        self._crash("in a write", 0.002)
        if not self.alive:
            raise Killed

    def _crash(self, when: str, chance: float) -> None:
        if self.alive and self.stage.rng.random() < chance * self.stage.plan.crashes:
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
                self.beats.answer(node, pipe)
            elif isinstance(message, Event):
                self.apply(message)

        self.awake(hear)

    def abort(self, node: str) -> None:
        """Close the stream of an agent that is given up."""
        if node in self.agents:
            self.agents.pop(node).close(lambda _: self.stage.nodes[node].stream_ended(self))

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
        self.stage.trace(f"master {self.number}: {event}")
        assert self.term is not None
        if self.ends:
            self.state, commands = abort_step(self.state, event, self._now())
            check_job(self.state)
            self.stage.aborting(self.term.epoch, self.state)
            self._add(commands)
            return
        try:
            self.state, commands = step(self.state, event, self._now())
        except Planted as error:
            self._hit_bug(error, event)
            return
        check_job(self.state)
        self.stage.stepped(self.term.epoch, before, event, self.state, commands)
        self._add(commands)

    def _add(self, commands: list[Command]) -> None:
        if self.ledger.due is None:
            self._stuck_since = self.stage.clock.now
        self._carry_out(self.ledger.add(self.state, commands))
        if self.unwritten:
            self._carry_out(self.ledger.waive())
        if not self.writes:
            return
        delay = self.stage.rng.choice((0.001, 0.005, 0.05)) if self.ledger.due else 0.5
        when = self.stage.clock.now + delay
        if self.state is not self.ledger.kept and when < self._next_write:
            self._next_write = when
            self.stage.clock.after(delay, lambda: self.awake(lambda: self._write_planned(when)))

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
            self.stage.plan.break_at("write")
            self.contexts.write(self.ledger.kept, target)
        except Killed:
            return
        except Fenced as error:
            self.die(str(error))
            return
        except Planted as error:
            self.writes = False
            if not self.unwritten:
                self._hit_bug(error, "write")
            return
        except StoreError as error:
            self.stage.trace(f"master {self.number} cannot write: {error}")
            self._end_unwritten()
            self.stage.clock.after(0.4, lambda: self.awake(lambda: self._write(target)))
            return
        self.stage.trace(f"master {self.number} has written")
        if changed_documents(self.ledger.kept, target):
            self._check_kept(target)
        self._crash("after a write", 0.02)
        if not self.alive:
            return
        self._next_write, self._stuck_since = math.inf, self.stage.clock.now
        self._carry_out(self.ledger.written(target))
        self._add([])

    def _end_unwritten(self) -> None:
        """Carry out an end of the job that has waited too long."""
        state = self.state
        patience = STOP_WRITE_TIMEOUT if state.asked_to_stop else END_WRITE_TIMEOUT
        waited = self.stage.clock.now > self._stuck_since + patience
        if state.verdict is None or self.unwritten or self.ledger.due is None or not waited:
            return
        self.unwritten = True
        self.stage.waived = True
        self._carry_out(self.ledger.waive())
        for node in self.agents:
            self._shut_down(node)

    def _check_kept(self, target: JobState) -> None:
        """Check that the content of the store is the state."""
        found = restore(read_context(self.stage.store, RUN))
        assert found == kept(target), "the store holds another state"
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
                case ToAgents(nodes, message):
                    self.stage.trace(f"  {self.number} to {', '.join(nodes)}: {message}")
                    for node in nodes:
                        if node in self.agents:
                            self._send_view(node, message)
                case After(delay, then):
                    self.beats.after(delay, then)
                case Finish():
                    self._finish()

    def _send_view(self, node: str, view: Message) -> None:
        """Send a view; in some histories one of changes comes twice now and then, at once or later."""
        rng, agent = self.stage.rng, self.agents[node]
        changes = isinstance(view, View) and view.since is not None
        if changes and self.stage.plan.disorder and rng.random() < self.stage.plan.disorder:
            self.stage.clock.after(rng.choice((0.0, 1.0)), lambda: agent.send(view))
        agent.send(view)

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
        except Killed:
            return
        except StoreError as error:
            self.stage.trace(f"master {self.number} cannot keep its term: {error}")
        self.stage.clock.after(TERM_TTL / 3, self._keep_term)
