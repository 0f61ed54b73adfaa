"""The model of the network between hosts, and what agents and masters make of its silence."""

from __future__ import annotations

import contextlib
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.sim.fake_clock import FakeClock
from tests.sim.store import RUN, ProcessKilled
from unirun.errors import ConnectionLost, Fenced, StoreError
from unirun.failover.draft import AgentLost, Due, Event
from unirun.failover.silence import GIVE_UP_DELAY, HEARTBEAT_INTERVAL, KERNEL_KILL_DELAY, Echoes, Silence
from unirun.failover.takeover import REJOIN_TIMEOUT
from unirun.launcher.contact import (
    MASTER_RECEIVE_TIMEOUT,
    RECONNECT_TIMEOUT,
    TERM_CHECK_INTERVAL,
    Fence,
)
from unirun.rendezvous.election import is_marked, job_prefix, latest_epoch
from unirun.wire.frames import decode, encode
from unirun.wire.messages import Heartbeat
from unirun.wire.reports import Message

if TYPE_CHECKING:
    from tests.sim.masters import MasterModel
    from tests.sim.node import NodeModel

LOOK_INTERVAL = 1.0
"""Seconds between two looks of a master, as a history has fewer steps then."""

OTHERS = "*"


class Pipe:
    """One direction of a stream: in order, delayed; `close` delivers an end after all that was sent."""

    def __init__(
        self,
        clock: FakeClock,
        rng: random.Random,
        slow: float,
        receive: Callable[[Message], None],
        held: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`held` says until when nothing passes. What is sent in that time comes later, as TCP sends it again."""
        self._clock, self._rng, self._slow, self._receive = clock, rng, slow, receive
        self._held = held
        self._last = clock.now
        self._open = True
        self.cut = False

    def _at(self) -> float:
        delay = self._rng.expovariate(1 / self._slow) if self._rng.random() < 0.9 else self._slow * 20
        if (away := self._held() - self._clock.now) > 0:
            delay += away + min(away, 5.0) * self._rng.random()
        self._last = max(self._last, self._clock.now + delay)
        return self._last - self._clock.now

    def send(self, message: Message) -> None:
        """Send; what is sent into a closed pipe is lost, as on a socket."""
        if not self._open:
            return
        again = decode(json.loads(json.dumps(encode(message), allow_nan=False)))
        assert again == message, f"{message} is another after its trip: {again}"
        self._clock.after(self._at(), lambda: None if self.cut else self._receive(again))

    def close(self, then: Callable[[ConnectionLost], None]) -> None:
        """The sender is gone; the receiver hears of it after the last message."""
        if self._open:
            self._open = False
            self._clock.after(self._at(), lambda: then(ConnectionLost("the peer closed the stream")))


class Network:
    """Until when nothing passes from one host to another."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._lost: dict[tuple[str, str], float] = {}

    def lose(self, sender: str, receiver: str, seconds: float) -> None:
        """Lose what `sender` sends to `receiver`."""
        way = sender, receiver
        self._lost[way] = max(self._lost.get(way, 0.0), self._clock.now + seconds)

    def pull_cable(self, host: str, seconds: float) -> None:
        """Cut a host off from all others, and from the store."""
        self.lose(host, OTHERS, seconds)
        self.lose(OTHERS, host, seconds)

    def away(self, host: str) -> float:
        """Until when a host is cut off."""
        return self._lost.get((host, OTHERS), 0.0)

    def until(self, sender: str, receiver: str) -> float:
        """Until when nothing passes."""
        if sender == receiver:
            return 0.0
        ways = (sender, receiver), (sender, OTHERS), (OTHERS, receiver)
        return max(self._lost.get(way, 0.0) for way in ways)

    def joins(self, one: str, other: str) -> bool:
        """Return True if two hosts can connect."""
        return max(self.until(one, other), self.until(other, one)) <= self._clock.now


class ContactModel:
    """As `unirun.launcher.contact`, without sockets: beats, another stream when one is silent, and the fence."""

    def __init__(self, node: NodeModel) -> None:
        self._node, self._simulation = node, node.simulation
        self._fence = Fence()
        self._rate = self._simulation.scenario.rates.get(node.name, 1.0)
        self._heard = self._led = self._read = 0.0
        self._stream = 0
        self._watches = False

    def _now(self) -> float:
        """The agent's clock, which runs at a rate of its own."""
        return self._simulation.clock.now * self._rate

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._simulation.clock.after(seconds / self._rate, do)

    def begin(self) -> None:
        """A stream begins, with `Join`."""
        self._led = self._simulation.clock.now
        if not self._simulation.scenario.hosts:
            return
        self._fence.joins(self._now())
        self._heard = self._now()
        self._read = 0.0
        self._stream += 1
        self._beat(self._stream)
        if not self._watches:
            self._watches = True
            self._watch()
            self._look()

    def heard(self, message: Message) -> None:
        """The master has said something."""
        self._heard = self._now()
        if isinstance(message, Heartbeat):
            self._fence.answered(self._now(), message.age)
            self._read = message.at

    def leads(self, epoch: int) -> bool:
        """Return False if the master of term `epoch` has been replaced. Hosts have the fence."""
        now = self._simulation.clock.now
        if self._simulation.scenario.hosts or now - self._led < TERM_CHECK_INTERVAL:
            return True
        with contextlib.suppress(StoreError):
            if latest_epoch(self._node.client, job_prefix(RUN)) != epoch:
                return False
            self._led = now
        return True

    def _beat(self, stream: int) -> None:
        if stream == self._stream and self._node.to_master is not None:
            self._fence.beats(self._now())
            self._node.to_master.send(Heartbeat(self._read))
            self._after(HEARTBEAT_INTERVAL, lambda: self._node.awake(lambda: self._beat(stream)))

    def _watch(self) -> None:
        """The event loop ends the workers in time. If the agent is stopped, the kernel kills it, and them."""
        left = self._fence.until - self._now()
        if not self._node.alive:
            return
        if left > 0:
            self._after(left + 1e-6, self._watch)
        elif self._node.hangs_for == 0:
            self._die("its time is over")
        else:
            self._after(KERNEL_KILL_DELAY, lambda: self._die("the kernel has killed it"))

    def _die(self, reason: str) -> None:
        if self._node.alive:
            self._simulation.fenced(self._node.name)
            self._node.die(reason)

    def _look(self) -> None:
        if not self._node.alive:
            return
        now = self._now()
        if now - self._heard >= MASTER_RECEIVE_TIMEOUT:
            self._node.connect_anew()
        if self._fence.quiet_for(now) >= MASTER_RECEIVE_TIMEOUT:
            try:
                if not is_marked(self._node.client, RUN, self._node.name):
                    self._fence.unmarked(now, now)
            except StoreError:
                pass
        pause = MASTER_RECEIVE_TIMEOUT - max(now - self._heard, self._fence.quiet_for(now), 0.0)
        self._after(max(RECONNECT_TIMEOUT, pause), lambda: self._node.awake(self._look))


class BeatsModel:
    """As `unirun.launcher.master.beats`, without sockets."""

    def __init__(self, master: MasterModel) -> None:
        self._master, self._simulation = master, master.simulation
        self._rate = self._simulation.scenario.rates.get(master.node, 1.0)
        self._silence = Silence(self.now())
        self._wishes: deque[tuple[Callable[[], None], Callable[[], object]]] = deque()
        self._echoes = Echoes()
        self._joined: float | None = None
        self.renewed = self.now()

    def now(self) -> float:
        """The clock of the master's host, which runs at a rate of its own."""
        return self._simulation.clock.now * self._rate

    def begin(self) -> None:
        """Begin to look."""
        if self._simulation.scenario.hosts:
            self._in_order(self._master.contexts.unmark_silent, lambda: None)
            self._look_later()

    def joined(self) -> None:
        """A node has joined."""
        if self._joined is None:
            self._joined = self._running_time()

    def answer(self, node: str, pipe: Pipe, beat: Heartbeat) -> None:
        """Answer the beat of an agent."""
        now, ledger = self.now(), self._master.ledger
        self._silence.heard(node, now)
        self._echoes.heard(node, beat.at)
        state = self._master.state if ledger.due is None else ledger.kept
        nodes = [each for each in state.nodes if not state.given_up(each)]
        pipe.send(Heartbeat(now, self._echoes.age(now, self.renewed, nodes, ())))

    def forget(self, node: str) -> None:
        """The agent of `node` is gone."""
        self._silence.forget(node)

    def after(self, delay: float, event: Event) -> None:
        """Apply `event` in `delay` seconds, or later."""
        clock, began = self._simulation.clock, self._running_time()
        hosts = self._simulation.scenario.hosts

        def left() -> float:
            if event is not Due.REJOIN:
                return began + delay - self._running_time()
            end = began + max(delay, REJOIN_TIMEOUT) if self._joined is None else self._joined + delay
            return end - GIVE_UP_DELAY - self._running_time()

        def due() -> None:
            if not self._master.leads:
                return
            if not hosts or event not in (Due.JOIN, Due.REJOIN):
                self._master.apply(event)
                return
            self._look()
            away = sorted(self._master.ledger.kept.away | self._master.state.away)
            if (rest := left()) > 0.001:
                clock.after(min(rest, 1.0) / self._rate, lambda: self._master.awake(due))
            elif event is Due.REJOIN and away:
                self._mark(
                    away, lambda: clock.after(GIVE_UP_DELAY / self._rate, lambda: self._master.apply(event))
                )
            else:
                self._master.apply(event)

        first = max(0.0, delay - GIVE_UP_DELAY) if hosts and event is Due.REJOIN else delay
        clock.after(first / self._rate, lambda: self._master.awake(due))

    def _running_time(self) -> float:
        return self.now() - self._silence.stalled

    def _look_later(self) -> None:
        self._simulation.clock.after(LOOK_INTERVAL / self._rate, lambda: self._master.awake(self._look_on))

    def _look_on(self) -> None:
        if self._master.leads and not self._master.over:
            self._look()
            self._look_later()

    def _look(self) -> None:
        silent, lost, back = self._silence.look(self.now())
        for node in (*silent, *back):
            self._simulation.trace(
                f"master {self._master.number}: {node} is {'silent' if node in silent else 'back'}"
            )
        if silent:
            self._mark(silent, lambda: self._silence.marked(silent, self.now()))
        if back:
            self._in_order(lambda: self._master.contexts.unmark_silent(back), lambda: None)
        for node in lost:
            self._simulation.given_up_silent(node)
            self._master.abort(node)
            self._master.apply(AgentLost(node, "it is silent"))

    def _mark(self, nodes: Sequence[str], then: Callable[[], object]) -> None:
        self._in_order(lambda: self._master.contexts.mark_silent(nodes), then)

    def _in_order(self, do: Callable[[], None], then: Callable[[], object]) -> None:
        """Do something with the store, after what was asked for before."""
        self._wishes.append((do, then))
        if len(self._wishes) == 1:
            self._work()

    def _work(self) -> None:
        while self._wishes and self._master.alive:
            do, then = self._wishes[0]
            try:
                do()
            except ProcessKilled:
                return
            except Fenced as error:
                self._master.die(str(error))
                return
            except StoreError:
                self._simulation.clock.after(0.4, lambda: self._master.awake(self._work))
                return
            self._wishes.popleft()
            then()
