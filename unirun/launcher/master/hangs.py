"""The master's side of hangs: the questions to the agents of a role with a late rank. The steps of a role that runs
again, and stragglers.

Only the wish to move a straggler is an event of the master's state machine. Nothing is stored: agents and ranks report
to the next master anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial

from unirun.failover.draft import Straggles
from unirun.failover.hangs import NOTICE_SECONDS, HangTimeouts, Lateness, Windows, judge, late_ranks, notice
from unirun.failover.state import JobState, WorkerState
from unirun.observe.events import EventLog
from unirun.spec.job import RoleSpec
from unirun.values import Value, WorkerId
from unirun.wire.aio import Stream
from unirun.wire.messages import AskProgress, EndHung
from unirun.wire.reports import Arrivals, Late, Progress, RankProgress, StepsAgain

ANSWER_TIMEOUT = 1.0
"""Seconds in which agents answer; one that does not is silent, and its ranks are not judged."""


QUESTION_INTERVAL = 5.0
"""Seconds between two questions about a role without a time-out: all of its agents tell of the same wait."""


class _Question(Value):
    """The question `number`, about a role: the nodes that have not answered, and the ranks of the others, with their
    nodes."""

    number: int
    evidence: bool
    missing: frozenset[str]
    ranks: tuple[tuple[str, RankProgress], ...] = ()


class HangWatch:
    """Follows the progress of the ranks of one job.

    `agents` are the streams of the nodes. `nodes_of` gives the nodes that have ranks of a role, `spec_of` its spec.
    `say` is called with a role and a text about it.
    """

    def __init__(
        self,
        agents: Mapping[str, Stream],
        nodes_of: Callable[[str], Collection[str]],
        spec_of: Callable[[str], RoleSpec],
        say: Callable[[str, str], None],
    ) -> None:
        self._agents, self._nodes_of, self._spec_of, self._say = agents, nodes_of, spec_of, say
        self._questions: dict[str, _Question] = {}
        self._asked = 0
        # The time of the event loop from which on a role is asked about again.
        self._next: dict[str, float] = {}
        # How long a rank of a role was late when that was said last, in seconds.
        self._said: dict[str, float] = {}

    def late(self, report: Late) -> None:
        """A rank of a role is late: ask for all of them, unless that is under way, or was done just now."""
        now = asyncio.get_running_loop().time()
        if report.role not in self._questions and now >= self._next.get(report.role, 0.0):
            self._ask(report.role, evidence=False)

    def _ask(self, role: str, *, evidence: bool) -> None:
        nodes = [node for node in self._nodes_of(role) if node in self._agents]
        if not nodes:
            return
        self._asked += 1
        self._questions[role] = _Question(self._asked, evidence, frozenset(nodes))
        for node in nodes:
            self._agents[node].send(AskProgress(role, evidence))
        asyncio.get_running_loop().call_later(ANSWER_TIMEOUT, self._time_out, role, self._asked)

    def answered(self, answer: Progress) -> None:
        """Take the answer of a node. The last one is followed by the verdict. An answer to the question before the one
        for evidence may come late."""
        question = self._questions.get(answer.role)
        if question is None or answer.node not in question.missing or answer.evidence != question.evidence:
            return
        ranks = (*question.ranks, *((answer.node, rank) for rank in answer.ranks))
        missing = question.missing - {answer.node}
        self._questions[answer.role] = _Question(question.number, question.evidence, missing, ranks)
        if not missing:
            self._decide(answer.role)

    def _time_out(self, role: str, number: int) -> None:
        question = self._questions.get(role)
        if question is not None and question.number == number:
            self._decide(role)

    def _decide(self, role: str) -> None:
        """Let all ranks leave evidence if some hang, and order the end of those that still do then. Otherwise say
        which are late, if that has not been said lately."""
        question = self._questions.pop(role)
        spec, ranks = self._spec_of(role), [rank for _, rank in question.ranks]
        limits = HangTimeouts(spec.hang_timeout, spec.first_step_timeout)
        hung = judge(ranks, limits) if limits.timeout else {}
        if hung and not question.evidence:
            self._ask(role, evidence=True)
            return
        if hung:
            self._said.pop(role, None)
            for node, rank in question.ranks:
                if rank.worker in hung and node in self._agents:
                    self._agents[node].send(EndHung(rank.worker, hung[rank.worker]))
            return
        if not limits.timeout:
            self._next[role] = asyncio.get_running_loop().time() + QUESTION_INTERVAL
        late = notice(ranks, HangTimeouts(NOTICE_SECONDS, spec.first_step_timeout))
        if late is None:
            self._said.pop(role, None)
        elif late.seconds >= 2 * self._said.get(role, 0.0) or late.seconds < self._said[role]:
            # After one minute, two, four, and so on.
            self._said[role] = late.seconds
            self._say(role, late.text)


class StepsWatch:
    """Writes to the event log at which step a role goes on after a failure, and when it has come as far as before. The
    first agent that tells it counts."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._told: dict[str, tuple[int, bool]] = {}

    def again(self, report: StepsAgain) -> None:
        """An agent has seen steps of a role that runs again."""
        told, past = self._told.get(report.role, (0, False))
        if report.generation < told or (report.generation == told and (past or not report.past)):
            return
        self._told[report.role] = report.generation, report.past
        role, first, furthest = report.role, report.first, report.furthest
        write = partial(self._log.write, about=(role,), first=first, furthest=furthest)
        if report.generation > told:
            behind = f"it had come to step {furthest} before the failure"
            write("resumed", f"role {role} goes on at step {first}; {behind}")
        if report.past:
            write("caught_up", f"role {role} has come further than step {furthest}")


# Stragglers: the times at which ranks have begun the same collectives are compared.

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
