"""The questions about a role in any history: reports of late ranks, answers in any order, again, or never."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from tests.unit.launcher.instant_loop import InstantLoop
from unirun.failover.hangs import HangTimeouts, judge, notice
from unirun.launcher.master.hangs import ANSWER_TIMEOUT, QUESTION_INTERVAL, HangWatch
from unirun.spec.job import Entry, RoleSpec
from unirun.values import WorkerId
from unirun.wire.messages import AskProgress, EndHung
from unirun.wire.reports import Late, Progress, RankProgress

NODES = ("n0", "n1")
QUIET = st.sampled_from([0.0, 6.0, 61.0, 100.0, 130.0])


class Agent:
    """The stream of a node."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def send(self, message: Any) -> None:
        self.got.append(message)


class Questions(RuleBasedStateMachine):
    """A role with a rank on each of two nodes, with a time-out or without one. The reference: the question that is
    open, and when it was last said which ranks are late."""

    limit = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.loop = InstantLoop()
        self.agents: dict[str, Any] = {node: Agent() for node in NODES}
        self.said: list[str] = []
        role = RoleSpec(
            "actor", 2, Entry("script", "a.py"), hang_timeout=self.limit, first_step_timeout=950.0
        )
        self.watch = HangWatch(
            self.agents, lambda _: NODES, lambda _: role, lambda _, text: self.said.append(text)
        )
        self.limits = HangTimeouts(role.hang_timeout, role.first_step_timeout)
        self.open: dict[str, RankProgress | None] | None = None
        self.asked = self.again = 0.0
        self.evidence = False
        self.orders: dict[str, list[Any]] = {node: [] for node in NODES}
        self.words: list[str] = []
        self.last = 0.0

    def teardown(self) -> None:
        self.loop.end()

    def asks(self, now: float, *, evidence: bool) -> None:
        self.open, self.evidence, self.asked = dict.fromkeys(NODES), evidence, now
        for orders in self.orders.values():
            orders.append(AskProgress("actor", evidence))

    @rule(pause=st.booleans())
    def late(self, pause: bool) -> None:
        if pause and self.open is None:
            self.loop.wait(QUESTION_INTERVAL + 0.07)
        self.call(self.watch.late, Late("n0", "actor"))
        if self.open is None and self.loop.time() >= self.again:
            self.asks(self.loop.time(), evidence=False)

    @rule(node=st.sampled_from(NODES), quiet=QUIET, count=st.sampled_from([1, 1, 1, 0]))
    def answer(self, node: str, quiet: float, count: int = 1) -> None:
        """An answer counts once, and only while it is waited for. A rank that has reported no step has more time."""
        rank = RankProgress(WorkerId("actor", NODES.index(node), 0), count=count, quiet=quiet, age=900.0)
        self.call(self.watch.answered, Progress(node, "actor", (rank,), self.evidence))
        if self.open is not None and self.open[node] is None:
            self.open[node] = rank
            if None not in self.open.values():
                self.decides(self.loop.time())

    @precondition(lambda self: self.evidence)
    @rule(node=st.sampled_from(NODES), quiet=QUIET)
    def late_answer(self, node: str, quiet: float) -> None:
        """One to the question before that for evidence has left none."""
        rank = RankProgress(WorkerId("actor", NODES.index(node), 0), count=1, quiet=quiet, age=900.0)
        self.call(self.watch.answered, Progress(node, "actor", (rank,)))

    @rule(quiet=QUIET, seconds=st.sampled_from([0.41, 0.0]), count=st.sampled_from([1, 1, 0]))
    def all_answer(self, quiet: float, seconds: float, count: int) -> None:
        """Another question may follow before the time of this one is over."""
        for node in NODES:
            self.answer(node, quiet, count)
        if self.open is None:
            self.loop.wait(seconds)
            self.late(pause=False)

    @rule(times=st.lists(QUIET, min_size=2, max_size=4))
    def all_answer_each_question(self, times: list[float]) -> None:
        """A role may be late, not late, and late again."""
        for quiet in times:
            self.late(pause=True)
            for node in NODES:
                self.answer(node, quiet)

    @rule(seconds=st.sampled_from([0.41, ANSWER_TIMEOUT + 0.07]))
    def nobody_answers(self, seconds: float) -> None:
        """The ranks of nodes that do not answer in time are not judged."""
        for _ in range(2):
            # The sum is at no time the end of a pause.
            self.loop.wait(seconds)
            if self.open is not None and self.loop.time() >= self.asked + ANSWER_TIMEOUT:
                self.decides(self.asked + ANSWER_TIMEOUT)

    def call(self, function: Any, message: Any) -> None:
        async def called() -> None:
            function(message)

        self.loop.run_until_complete(called())

    def decides(self, now: float) -> None:
        assert self.open is not None
        ranks = [rank for rank in self.open.values() if rank is not None]
        self.open = None
        hung = judge(ranks, self.limits) if self.limit else {}
        if hung and not self.evidence:
            self.asks(now, evidence=True)
        elif hung:
            self.last = 0.0
            for who, why in hung.items():
                self.orders[NODES[who.rank]].append(EndHung(who, why))
        else:
            self.again = 0.0 if self.limit else now + QUESTION_INTERVAL
            longest = max((rank.quiet for rank in ranks if rank.quiet >= 60.0 and rank.count), default=0.0)
            if longest and not 0.0 < self.last <= longest < 2 * self.last:
                late = notice(ranks, HangTimeouts(60.0, self.limits.first_step))
                assert late is not None
                self.words.append(late.text)
                self.last = longest
            elif not longest:
                self.last = 0.0

    @invariant()
    def all_is_asked_ordered_and_said_once(self) -> None:
        assert {node: agent.got for node, agent in self.agents.items()} == self.orders
        assert self.said == self.words
        assert bool(self.watch._questions) == (self.open is not None)


class QuestionsWithATimeOut(Questions):
    """Ranks that hang are ended."""

    limit = 5.0


TestQuestions = Questions.TestCase
TestQuestions.settings = settings(examples(60), stateful_step_count=20)
TestQuestionsWithATimeOut = QuestionsWithATimeOut.TestCase
TestQuestionsWithATimeOut.settings = settings(examples(60), stateful_step_count=20)
