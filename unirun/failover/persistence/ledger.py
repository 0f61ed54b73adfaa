"""The commands that may be carried out: those that follow from decisions in the store. A decision is written
before it is carried out. The next master knows of it then, and a master whose term is over does nothing any
more, because it cannot write.
"""

from __future__ import annotations

from collections import deque

from unirun.failover.events import Command, ToAgent, ToAgents
from unirun.failover.persistence.context import urgent
from unirun.failover.state import JobState
from unirun.wire.messages import Shutdown, StopWorkers

_ENDS = StopWorkers | Shutdown


class Ledger:
    """The steps of one master whose commands wait. `kept` is the state that is in the store.

    What has followed since then without a decision is not compared with it again at each step.
    """

    def __init__(self, kept: JobState) -> None:
        self.kept = self._latest = kept
        self._steps: deque[tuple[JobState, list[Command]]] = deque()

    def add(self, state: JobState, commands: list[Command]) -> list[Command]:
        """After a step. Returns what may be done at once."""
        if not self._steps and not urgent(self._latest, state):
            self._latest = state
            return commands
        self._steps.append((state, commands))
        return []

    @property
    def due(self) -> JobState | None:
        """The state that must be written for everything that waits; None when nothing does."""
        return self._steps[-1][0] if self._steps else None

    def written(self, state: JobState) -> list[Command]:
        """`state` is in the store. Returns what may be done now."""
        self.kept = self._latest = state
        released: list[Command] = []
        if any(step[0] is state for step in self._steps):
            reached = False
            while not reached:
                step, commands = self._steps.popleft()
                released += commands
                reached = step is state
        while self._steps and not urgent(self._latest, self._steps[0][0]):
            self._latest, commands = self._steps.popleft()
            released += commands
        return released

    def waive(self) -> list[Command]:
        """The waiting commands that may be carried out unwritten when the job ends: messages to people, and orders that
        end workers and agents. Nothing is started."""
        waiting = [command for _, commands in self._steps for command in commands]
        self._steps.clear()
        return [c for c in waiting if not isinstance(c, ToAgent | ToAgents) or isinstance(c.message, _ENDS)]
