"""The master's side of hangs: the questions to the agents of a role with a late rank. And the steps of a role that runs
again.

None of it is an event of the master's state machine, and nothing is stored: another master is told again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial

from unirun.failover.hangs import NOTICE_SECONDS, HangTimeouts, is_late, judge
from unirun.observe.events import EventLog
from unirun.spec.job import RoleSpec
from unirun.values import Value
from unirun.wire.aio import Stream
from unirun.wire.messages import AskProgress, EndHung
from unirun.wire.reports import Late, Progress, RankProgress, StepsAgain

ANSWER_TIMEOUT = 1.0
"""Seconds in which agents answer; one that does not is silent, and its ranks are not judged."""


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
        # How long a rank of a role was late when that was said last, in seconds.
        self._said: dict[str, float] = {}

    def late(self, report: Late) -> None:
        """A rank of a role is late: ask for all of them, unless that is under way."""
        if report.role not in self._questions:
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
        """Take the answer of a node. The last one is followed by the verdict."""
        question = self._questions.get(answer.role)
        if question is None or answer.node not in question.missing:
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
        verdict = judge(ranks, limits) if limits.timeout else None
        if verdict is not None and verdict.hung and not question.evidence:
            self._ask(role, evidence=True)
            return
        if verdict is not None and verdict.hung:
            self._said.pop(role, None)
            for node, rank in question.ranks:
                if rank.worker in verdict.hung and node in self._agents:
                    self._agents[node].send(EndHung(rank.worker, verdict.hung[rank.worker]))
            return
        notice = HangTimeouts(NOTICE_SECONDS, spec.first_step_timeout)
        late = [rank.quiet for rank in ranks if is_late(rank, notice)]
        if not late:
            self._said.pop(role, None)
        elif max(late) >= 2 * self._said.get(role, 0.0) or max(late) < self._said[role]:
            # After one minute, two, four, and so on.
            self._said[role] = max(late)
            self._say(role, judge(ranks, notice).text)


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
