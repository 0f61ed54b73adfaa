"""The beats of a master: it answers those of agents and commands on other hosts, and looks at who has become silent."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from unirun.errors import WireError
from unirun.failover.draft import AgentLost, Due, Event
from unirun.failover.hangs import STOPPED
from unirun.failover.silence import (
    GIVE_UP_DELAY,
    HEARTBEAT_INTERVAL,
    SILENCE_POLL_INTERVAL,
    SILENCE_TIMEOUT,
    Echoes,
    Silence,
)
from unirun.failover.takeover import REJOIN_TIMEOUT
from unirun.launcher.master.writer import StateWriter
from unirun.launcher.stacks import state_of
from unirun.rendezvous.election import Term
from unirun.rendezvous.store.protocol import clock
from unirun.wire.aio import Stream, frame_of
from unirun.wire.messages import Heartbeat

_BEAT = frame_of(Heartbeat())

OWNER_TIMEOUT = 60.0
"""Seconds in which the command that owns the job attaches to a master, and after which a command that beats and has
become silent counts as gone. One that is stopped (Ctrl-Z) cannot attach, and does not beat."""

STOPPED_POLL_INTERVAL = 0.5
"""Seconds between two looks at whether somebody has stopped an agent of a job that is to end."""


async def wake_stopped(agents: Callable[[], Mapping[str, int]], say: Callable[[str, str], None]) -> None:
    """Let agents on this host go on that somebody has stopped (SIGSTOP), as the job is to end. They do not beat, so
    none of them would be given up. `agents` gives their pids by node; `say` is called with a node and a text."""
    held = set[str]()
    while True:
        for node, pid in agents().items():
            state, traced = state_of(pid)
            if state in STOPPED and not traced:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                say(node, f"the agent of {node} was stopped (SIGSTOP); it goes on, as the job is to end")
            elif traced and node not in held:
                held.add(node)
                say(node, f"a debugger holds the agent of {node} (pid {pid}); the job ends when it lets go")
        await asyncio.sleep(STOPPED_POLL_INTERVAL)


class HeartbeatMonitor:
    """Watches the agents and the commands that beat; those on the master's host do not.

    `agents` are the streams of the nodes. `say` is called with a node and a text about it, and `lose` with a node that
    is given up.
    """

    def __init__(
        self,
        term: Term,
        writer: StateWriter,
        agents: dict[str, Stream],
        say: Callable[[str, str], None],
        lose: Callable[[AgentLost], object],
    ) -> None:
        self._term, self._writer, self._agents = term, writer, agents
        self._say, self._lose = say, lose
        self._silence = Silence(time.monotonic())
        self._echoes = Echoes()
        # The running time at which the first node has joined.
        self._joined: float | None = None
        self._origins: dict[str, str] = {}
        self._watchers: dict[Stream, float] = {}
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to look. Not called in a job on one host."""
        self._silence = Silence(time.monotonic())
        self._looking = asyncio.ensure_future(self._look_on())
        # What a master before this one has marked may be with this one.
        self._writer.unmark()

    def close(self) -> None:
        """Stop looking."""
        if self._looking is not None:
            self._looking.cancel()

    def watches(self, node: str) -> bool:
        """Return True if the agent of `node` beats."""
        return self._silence.watches(node)

    def hears(self, node: str) -> bool:
        """Return True if the agent of `node` is there, and not silent."""
        return node in self._agents and not self._silence.is_silent(node)

    def token_proved(self, node: str, origin: str) -> None:
        """Take the proof of the token by `node` for a message from it: it may send no other before it is
        given up. Without TLS only its address `origin` is known."""
        for each, known in self._origins.items():
            if (each == node if node else known == origin) and self._silence.watches(each):
                self._silence.heard(each, time.monotonic())

    def forget(self, node: str) -> None:
        """The agent of `node` is gone."""
        self._silence.forget(node)

    def joined(self) -> None:
        """Note that a node has joined this master."""
        if self._joined is None:
            self._joined = self._running_time()

    def answer(self, node: str, stream: Stream, beat: Heartbeat) -> None:
        """Answer the beat of the agent of `node`."""
        self._silence.heard(node, time.monotonic())
        self._origins[node] = stream.origin
        self._echoes.heard(node, beat.at)
        now, state = clock(), self._writer.certain
        nodes = [each for each in state.nodes if not state.given_up(each)]
        here = [each for each in self._agents if not self._silence.watches(each)]
        stream.send(Heartbeat(now, self._echoes.age(now, self._term.renewed, nodes, here)))

    def follow(self, watcher: Stream) -> None:
        """A command has sent a beat. It gets some, until it is silent for `OWNER_TIMEOUT`, or gone for so long."""
        self._watchers[watcher] = self._running_time()

    def after(self, delay: float, event: Event, apply: Callable[[Event], object]) -> None:
        """Apply `event` in `delay` seconds. If nodes have to join in that time, it does not count while this master
        does not run. For those of another master it begins when the first node has joined, if that comes in time, and
        they are marked `GIVE_UP_DELAY` seconds before they are given up."""
        loop, began = asyncio.get_running_loop(), self._running_time()

        def left() -> float:
            if event is not Due.REJOIN:
                return began + delay - self._running_time()
            end = began + max(delay, REJOIN_TIMEOUT) if self._joined is None else self._joined + delay
            return end - GIVE_UP_DELAY - self._running_time()

        def give_up(away: Sequence[str]) -> None:
            apply(event)
            # Nothing else removes the marks of those that have joined in the meantime.
            if joined := [node for node in away if self.hears(node)]:
                self._writer.unmark(joined)

        def due() -> None:
            if self._looking is None or event not in (Due.JOIN, Due.REJOIN):
                apply(event)
                return
            self._look()
            if (rest := left()) > 0.001:
                # Another node may be the first to join meanwhile.
                loop.call_later(min(rest, SILENCE_POLL_INTERVAL) + 0.001, due)
            elif event is Due.REJOIN and (away := sorted(self._writer.certain.away)):
                self._writer.mark(away, partial(loop.call_later, GIVE_UP_DELAY, give_up, away))
            else:
                apply(event)

        looks = self._looking is not None and event is Due.REJOIN
        loop.call_later(max(0.0, delay - GIVE_UP_DELAY) if looks else delay, due)

    async def _look_on(self) -> None:
        beat = 0.0
        while True:
            await asyncio.sleep(SILENCE_POLL_INTERVAL)
            self._look()
            now = self._running_time()
            if now >= beat + HEARTBEAT_INTERVAL:
                beat = now
                self._beat_watchers(now)

    def _look(self) -> None:
        """Report nodes that are silent or back, and give up those that are lost."""
        silent, lost, back = self._silence.look(time.monotonic())
        for node in silent:
            rest = f"its ranks start elsewhere in {GIVE_UP_DELAY:g} s unless it is heard"
            self._say(node, f"node {node} has been silent for {SILENCE_TIMEOUT:g} s; {rest}")
        if silent:
            self._writer.mark(silent, lambda: self._silence.marked(silent, time.monotonic()))
        for node in back:
            self._say(node, f"node {node} is heard again")
        if back:
            self._writer.unmark(back)
        for node in lost:
            if node in self._agents:
                self._agents.pop(node).abort()
            self._lose(
                AgentLost(node, f"it has been silent for more than {SILENCE_TIMEOUT + GIVE_UP_DELAY:g} s")
            )

    def _beat_watchers(self, now: float) -> None:
        for watcher, heard in list(self._watchers.items()):
            if now > heard + OWNER_TIMEOUT:
                del self._watchers[watcher]
                watcher.abort()
            else:
                watcher.send_frame(_BEAT)

    def _running_time(self) -> float:
        """Seconds, without those in which the master did not run."""
        return time.monotonic() - self._silence.stalled


def unheard(error: WireError) -> bool:
    """Return True if a stream has ended because nothing arrives any more: its peer may live, unlike one whose
    kernel has closed the stream."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ConnectionError)
