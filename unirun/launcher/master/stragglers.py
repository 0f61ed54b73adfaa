"""The master's side of stragglers: it compares the times at which ranks have begun the same collectives.

None of it is an event of the master's state machine but the wish to move a rank, and nothing is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from unirun.failover.draft import Straggles
from unirun.failover.state import JobState, WorkerState
from unirun.failover.stragglers import Lateness, Windows, late_ranks
from unirun.values import WorkerId
from unirun.wire.reports import Arrivals

GATHER_SECONDS = 2.0
"""Seconds in which the ranks of a group tell the times of one window: the clocks of hosts differ a little."""

Group = tuple[str, str, str, int]
"""The ranks whose times are compared: their role, the name and the ranks of their group, and the window."""


class StragglerWatch:
    """Follows the arrivals of the ranks of one job.

    `state` gives the job's state. `say` is called with a rank and a text about it, and `move` with a rank whose role
    wants its stragglers elsewhere.
    """

    def __init__(
        self,
        state: Callable[[], JobState],
        say: Callable[[WorkerId, str, str], None],
        move: Callable[[Straggles], object],
    ) -> None:
        self._state, self._say, self._move = state, say, move
        self._arrived: dict[Group, dict[WorkerId, dict[int, float]]] = {}
        self._windows = Windows()
        # How late they were when that was said.
        self._late: dict[WorkerId, Lateness] = {}
        self._moved: set[tuple[str, int]] = set()

    def arrived(self, who: WorkerId, report: Arrivals) -> None:
        """A rank tells when it has begun collectives."""
        group = who.role, report.group, report.ranks, report.window
        if group not in self._arrived:
            self._arrived[group] = {}
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._judge, group)
        self._arrived[group][who] = dict(report.times)

    def stragglers(self) -> tuple[str, ...]:
        """The present stragglers, in words."""
        found = []
        for who in self._windows.stragglers:
            worker = self._worker(who)
            if worker is not None:
                found.append(_words(who, worker, self._late[who]))
        return tuple(found)

    def _worker(self, who: WorkerId) -> WorkerState | None:
        """The worker, if it is the one that has its rank now."""
        role = self._state().roles.get(who.role)
        known = role.workers[who.rank : who.rank + 1] if role is not None else ()
        return next((each for each in known if each.live and each.incarnation == who.incarnation), None)

    def _judge(self, group: Group) -> None:
        arrivals = self._arrived.pop(group)
        late = late_ranks(arrivals)
        gone = [who for who in self._windows.late if self._worker(who) is None]
        self._windows = self._windows.after([*arrivals, *gone], late)
        self._late = {who: each for who, each in {**self._late, **late}.items() if who in self._windows.late}
        for who in self._windows.told():
            worker = self._worker(who)
            if worker is None or who not in late:
                continue
            text = _words(who, worker, late[who])
            self._say(who, worker.node, text)
            rank = who.role, who.rank
            # Of a rank that is late elsewhere, too, the node is not the reason.
            if self._state().role_spec(who.role).stragglers == "replace" and rank not in self._moved:
                self._moved.add(rank)
                self._move(Straggles(who, text))


def _words(who: WorkerId, worker: WorkerState, late: Lateness) -> str:
    slots = f", slot {', '.join(worker.own)}" if worker.own else ""
    return (
        f"{who} on {worker.node}{slots} is a straggler: the other ranks wait for it in collectives "
        f"{late.share:.0%} of the time (z-score {late.score:.0f})"
    )
