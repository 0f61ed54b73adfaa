"""A pool in any history: episodes that ask, end, raise and hang, versions that advance, groups that are taken and dropped.

The event loop has a clock of its own, and each episode does what the history says. A reference knows which groups are
open, and what becomes of each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.effort import examples
from tests.unit.launcher.instant_loop import InstantLoop
from tests.unit.rollout.fake_completer import FakeCompleter, made
from unirun.errors import EpisodeFailed
from unirun.rollout import pool as pools
from unirun.rollout.completing import Completion, Group
from unirun.rollout.pool import Pool, Recorder

TIMEOUT = 10.0
EVALUATION = -1
"""The prompt of an evaluation."""

TURNS = 40
"""Turns of the event loop in which everything happens that needs no time."""


@dataclass
class Played:
    """An episode: real, with what it is to do next; and in the reference, with its tokens and its end."""

    began: float
    todo: asyncio.Queue[Completion | Exception | float | None] = field(default_factory=asyncio.Queue)
    tokens: int = 0
    end: str = ""


@dataclass
class Made:
    """A group in the reference. `stays`: it is never too old."""

    prompt: int
    episodes: list[Played]
    stays: bool = False
    oldest: int | None = None

    @property
    def over(self) -> bool:
        return all(each.end for each in self.episodes)


class Pools(RuleBasedStateMachine):
    """The pool, its consumer, and the reference."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(pools, "MAX_FAILED_GROUPS", 1000)
        self._patch.setattr(pools, "report", lambda text: None)
        self.loop = InstantLoop()
        self._patch.setattr(pools, "time", SimpleNamespace(monotonic=self.loop.time))
        self.playing: dict[int, list[Played]] = {}
        self.answer = made(1)
        self.finished: list[int] = []
        """The prompts of the groups that the pool has accepted, in their order."""
        self.taken: list[Group] = []
        self.taking: asyncio.Task[Group] | None = None
        self.evaluating: asyncio.Task[list[Group]] | None = None
        # The reference.
        self.groups: list[Made] = []
        self.counts: Counter[str] = Counter()
        self.delivered: list[Made] = []
        self.dropped: set[int] = set()
        self.prompts = self.version = self.trained = self.wanted = 0
        self.idle = 0.0
        self.idle_since: float | None = self.loop.time()
        """Seconds in which no group was open; the time since when none is."""

    @initialize(
        size=st.integers(1, 3),
        most=st.integers(1, 3),
        bound=st.sampled_from([None, (1, 0), (2, 0), (2, 1)]),
    )
    def begin(self, size: int, most: int, bound: tuple[int, int] | None) -> None:
        self.size, self.most, self.bound = size, most, bound
        self.pool = Pool(
            self,
            self.play,
            group_size=size,
            batch=bound and bound[0],
            max_head_offpolicyness=bound and bound[1],
            max_concurrent_rollouts=most,
            episode_timeout=TIMEOUT,
            should_accept=lambda group: group.rewards[0] >= 0,
            dump=lambda group: self.finished.append(group.data["id"]),
        )
        self.run = self.pool.run(self.endless())
        self.want()

    def teardown(self) -> None:
        """A run that is closed leaves nothing open."""
        if not hasattr(self, "run"):
            return
        for task in (self.taking, self.evaluating):
            if task is not None:
                task.cancel()
        self.settle()
        self.loop.run_until_complete(self.run.aclose())
        assert self.playing == {}
        assert (self.pool.outcomes.open, self.pool.outcomes.episodes) == (0, 0)
        assert asyncio.all_tasks(self.loop) == set()
        self.loop.end()
        self._patch.undo()

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    # What the pool is given.

    async def endless(self) -> AsyncIterator[dict[str, Any]]:
        for number in range(10**6):
            yield {"id": number}

    async def complete(self, token_ids: Any, *, conversation: str = "", **sampling: Any) -> Completion:
        return self.answer

    async def play(self, data: Any, client: Recorder) -> float | None:
        me = Played(self.loop.time())
        self.playing.setdefault(data["id"], []).append(me)
        prompt = [0]
        try:
            while True:
                act = await me.todo.get()
                if isinstance(act, Completion):
                    self.answer = act
                    found = await client.complete(prompt)
                    prompt += found.token_ids
                elif isinstance(act, Exception):
                    raise act
                else:
                    return act
        finally:
            self.playing[data["id"]].remove(me)
            if not self.playing[data["id"]]:
                del self.playing[data["id"]]

    # The reference.

    @property
    def open(self) -> list[Made]:
        return [each for each in self.groups if each.prompt != EVALUATION]

    @property
    def untaken(self) -> int:
        return max(len(self.delivered) - self.wanted, 0)

    def admit(self, now: float) -> None:
        """Groups begin while there is room."""
        while True:
            room = min(self.most - len(self.open), 2 * self.most - len(self.open) - self.untaken)
            if self.bound is not None:
                batch, most_age = self.bound
                begun = len(self.delivered) - len(self.dropped) + len(self.open)
                room = min(room, (self.trained + most_age + 1) * batch - begun)
            if room <= 0:
                break
            self.groups.append(Made(self.prompts, [Played(now) for _ in range(self.size)]))
            self.prompts += 1
        if self.open and self.idle_since is not None:
            self.idle, self.idle_since = self.idle + now - self.idle_since, None
        elif not self.open and self.idle_since is None:
            self.idle_since = now

    def over(self, group: Made, now: float) -> None:
        """All episodes of a group have ended."""
        if not group.over:
            return
        self.groups.remove(group)
        failed = sum(each.end == "failed" for each in group.episodes)
        self.counts["failed"] += failed
        kept = [each for each in group.episodes if each.tokens and each.end not in ("failed", "none")]
        outcome = "accepted" if kept and float(kept[0].end) >= 0 else "rejected"
        if group.prompt != EVALUATION:
            self.counts[outcome] += 1
            if outcome == "accepted":
                self.delivered.append(group)
        self.admit(now)

    def grown_old(self, now: float) -> None:
        """Groups with a token that is too old are cancelled."""
        for group in [*self.open]:
            if self.is_old(group):
                self.groups.remove(group)
                self.counts["stale"] += 1
                self.counts["failed"] += sum(each.end == "failed" for each in group.episodes)
        self.admit(now)

    def want(self) -> None:
        """The consumer wants one more group. Those that have grown old since they were finished are passed over."""
        self.taking = self.loop.create_task(self.run.__anext__())
        while len(self.delivered) > self.wanted and self.is_old(self.delivered[self.wanted]):
            del self.delivered[self.wanted]
            self.counts["accepted"] -= 1
            self.counts["stale"] += 1
        self.wanted += 1
        self.admit(self.loop.time())

    def is_old(self, group: Made) -> bool:
        return bool(self.bound and group.oldest is not None and self.version - group.oldest > self.bound[1])

    # What happens.

    def one(self, which: int) -> tuple[Made, Played, Played]:
        """A group, and one of its episodes that are not over: in the reference and in the pool."""
        running = [(group, each) for group in self.groups for each in group.episodes if not each.end]
        group, each = running[which % len(running)]
        at = [other for other in group.episodes if not other.end].index(each)
        return group, each, self.playing[group.prompt][at]

    @precondition(lambda self: self.groups)
    @rule(which=st.integers(0, 8), ages=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def ask(self, which: int, ages: list[int]) -> None:
        """An engine answers with tokens of some versions, which it may know before the trainer has told of them."""
        group, each, real = self.one(which)
        versions = tuple(max(self.version + 1 - age, 0) for age in ages)
        real.todo.put_nowait(Completion((7,) * len(ages), (-0.5,) * len(ages), versions, "stop"))
        each.tokens += len(ages)
        self.counts["tokens"] += len(ages)
        group.oldest = min(versions) if group.oldest is None else min(group.oldest, *versions)
        self.version = max(self.version, *versions)
        self.grown_old(self.loop.time())

    @precondition(lambda self: self.groups)
    @rule(which=st.integers(0, 8), ages=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def ask_and_end(self, which: int, ages: list[int]) -> None:
        """An episode has its answer, and returns its reward."""
        group = self.one(which)[0]
        self.ask(which, ages)
        self.settle()
        if group in self.groups:
            self.end(which, "1.0")

    @precondition(lambda self: self.groups)
    @rule(which=st.integers(0, 8), end=st.sampled_from(["failed", "none", "1.0", "0.0", "-1.0"]))
    def end(self, which: int, end: str) -> None:
        """An episode raises, or returns its reward or None."""
        group, each, real = self.one(which)
        act = {"failed": ValueError("no"), "none": None}.get(end)
        real.todo.put_nowait(act if end in ("failed", "none") else float(end))
        each.end = end
        self.over(group, self.loop.time())

    @rule(seconds=st.sampled_from([*[1.0] * 6, TIMEOUT]))
    def wait(self, seconds: float) -> None:
        """Episodes that take too long have failed."""
        until, before = self.loop.time() + seconds, len(self.delivered)
        self.loop.wait(seconds)
        self.settle()
        while late := [
            e.began for g in self.groups for e in g.episodes if not e.end and e.began + TIMEOUT <= until
        ]:
            now = min(late) + TIMEOUT
            for group in [*self.groups]:
                for each in group.episodes:
                    if not each.end and each.began + TIMEOUT <= now:
                        each.end = "failed"
            for group in [*self.groups]:
                if group in self.groups:
                    self.over(group, now)
        # Those whose time ends at the same moment finish in any order.
        latest = self.delivered[before:]
        self.delivered[before:] = sorted(latest, key=lambda group: self.finished.index(group.prompt))

    @rule(by=st.integers(0, 2))
    def advance(self, by: int) -> None:
        """Weights are trained. An older version than the last one changes nothing."""
        version = max(self.trained + by, 0)
        self.pool.advance(version)
        self.trained, self.version = max(self.trained, version), max(self.version, version)
        self.grown_old(self.loop.time())

    @precondition(lambda self: self.taking is None)
    @rule()
    def take(self) -> None:
        self.want()

    @precondition(lambda self: {*range(len(self.taken))} - self.dropped)
    @rule(which=st.integers(0, 8))
    def reject(self, which: int) -> None:
        """The trainer drops a group that it has taken."""
        left = sorted({*range(len(self.taken))} - self.dropped)
        number = left[which % len(left)]
        self.pool.reject(self.taken[number])
        self.dropped.add(number)
        self.counts["accepted"] -= 1
        self.counts["rejected"] += 1
        self.admit(self.loop.time())

    @precondition(lambda self: self.evaluating is None)
    @rule()
    def evaluate(self) -> None:
        """An evaluation takes no place, and does not grow old."""
        self.evaluating = self.loop.create_task(self.pool.evaluate([{"id": EVALUATION}]))
        now = self.loop.time()
        self.groups.append(Made(EVALUATION, [Played(now) for _ in range(self.size)], stays=True))

    @invariant()
    def the_pool_is_as_the_reference(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.settle()
        running = {group.prompt: [e for e in group.episodes if not e.end] for group in self.groups}
        assert {prompt: len(each) for prompt, each in self.playing.items()} == {
            prompt: len(each) for prompt, each in running.items() if each
        }
        found = self.pool.outcomes
        assert found.open == len(self.open)
        idle = self.idle if self.idle_since is None else self.idle + self.loop.time() - self.idle_since
        assert self.pool.idle_seconds == pytest.approx(idle)
        told = {name: getattr(found, name) for name in ("accepted", "rejected", "stale", "failed", "tokens")}
        assert told == {name: self.counts[name] for name in told}
        self._taken()
        if self.evaluating is not None and self.evaluating.done():
            assert not any(group.prompt == EVALUATION for group in self.groups)
            assert len(self.evaluating.result()) <= 1
            self.evaluating = None

    def _taken(self) -> None:
        """The consumer has the groups in the order in which they have finished, each once."""
        if self.taking is not None and self.taking.done():
            self.taken.append(self.taking.result())
            self.taking = None
        assert len(self.taken) == min(len(self.delivered), self.wanted)
        if self.taken:
            group, wanted = self.taken[-1], self.delivered[len(self.taken) - 1]
            assert group.data == {"id": wanted.prompt}
            assert group.version == wanted.oldest
            assert group.rewards == tuple(
                float(each.end)
                for each in wanted.episodes
                if each.tokens and each.end not in ("failed", "none")
            )


TestPools = Pools.TestCase
TestPools.settings = settings(examples(100, shrunk=False), stateful_step_count=30)


@examples(100)
@given(st.lists(st.booleans(), max_size=20))
def test_a_run_ends_when_so_many_groups_in_a_row_have_failed_and_not_before(fails: list[bool]) -> None:
    async def agent(data: Any, client: Recorder) -> float:
        await client.complete([0])
        if data["fails"]:
            raise ValueError("no")
        return 1.0

    async def groups() -> int:
        pool = Pool(FakeCompleter(), agent, max_concurrent_rollouts=1)
        return len([group async for group in pool.run({"fails": each} for each in fails)])

    row = "".join("x" if each else "." for each in fails)
    with mock.patch.object(pools, "MAX_FAILED_GROUPS", 3), mock.patch.object(pools, "report"):
        if "xxx" in row:
            with pytest.raises(EpisodeFailed, match="all episodes of 3 prompts"):
                asyncio.run(groups())
        else:
            assert asyncio.run(groups()) == row.count(".")
