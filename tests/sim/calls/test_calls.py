"""A trainer calls a role of workloads whose methods meet in collectives, and ranks die at every moment.

A failing history is replayed with ``UNIRUN_SIM_SEED=<seed> pytest tests/sim/calls``; ``UNIRUN_SIM_SEEDS=5000`` runs more.
"""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import pytest

from tests.sim.calls.role import ROLE, FakePeers, SimulatedRole, SimulatedWorkload
from tests.sim.calls.threads import FakeScheduler, SimulatedThread
from tests.sim.fake_clock import FakeClock
from unirun.errors import WorkerLost
from unirun.roles.calls.call import InvocationRef
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.group import role_group
from unirun.roles.calls.policy import IDEMPOTENT_RETRIES, invocations
from unirun.values import WorkerId

BLOCK = 100
SEEDS = int(os.environ.get("UNIRUN_SIM_SEEDS", "600"))
ONE = os.environ.get("UNIRUN_SIM_SEED")
CALL_TIMEOUT = 1000.0


class History:
    """The history that a seed stands for. `run` raises AssertionError when something is wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.role = SimulatedRole(self.clock, self.rng, self.rng.randint(2, 4))
        self.caller = Caller(
            WorkerId("trainer", 0, 0),
            FakePeers(self.role),
            self.role,
            call_timeout=CALL_TIMEOUT,
            scheduler=FakeScheduler(self.clock),
        )
        self.group = role_group(self.caller, ROLE, self.role.size, invocations(SimulatedWorkload))
        self.told: dict[int, float] = {}
        """The time at which a loss was last told by a call to a rank."""
        self.log: list[str] = []
        self.last_death = self.clock.now
        self.trainer = SimulatedThread(self.clock, self.rng, self._train, "trainer")
        for _ in range(self.rng.choice((0, 1, 1, 2, 3, 5))):
            rank, when = (
                self.rng.randrange(self.role.size),
                self.rng.uniform(0.0, self.rng.choice((0.3, 3.0))),
            )
            self.last_death = max(self.last_death, self.clock.now + when)
            self.clock.after(when, partial(self._kill, rank))
        self.clock.after(self.last_death - self.clock.now + 0.01, self.trainer.wake)
        for _ in range(self.rng.choice((0, 0, 1, 4))):
            self.clock.after(self.rng.uniform(0.0, 1.0), self._cut)
        self.role.to_lose = self.rng.choice((0, 0, 3, 20))

    def _kill(self, rank: int) -> None:
        self.log.append(f"{self.clock.now:.4f} {ROLE}:{rank} is killed")
        self.role.kill(rank)

    def _cut(self) -> None:
        worker = self.rng.choice(self.role.workers)
        for channel in worker.channels:
            channel.cut()

    def _train(self) -> None:
        open_refs: list[tuple[str, int, list[int], InvocationRef[Any], float]] = []
        for number in range(1, 20):
            method = self.rng.choice(("step", "step", "step", "two_steps", "step_again", "note"))
            ranks = [self.rng.randrange(self.role.size)] if method == "note" else [*range(self.role.size)]
            group = self.group[ranks[0]] if method == "note" else self.group
            ref = getattr(group, method).call_async(number)
            self.log.append(f"{self.clock.now:.4f} {method}({number}) on {ranks}")
            ref.wake_with(lambda _: self.trainer.wake())
            open_refs.append((method, number, ranks, ref, self.clock.now))
            while open_refs and self.rng.random() < 0.6:
                self._take(*open_refs.pop(0))
        while open_refs:
            self._take(*open_refs.pop(0))
        self.trainer.wait(lambda: self.clock.now > self.last_death)
        # Each loss is told once: one call after the other, none fails more often than ranks have died.
        for _ in range(len(self.role.deaths) + 1):
            ref = self.group.step.call_async(7)
            ref.wake_with(lambda _: self.trainer.wake())
            if self._take("step", 7, [*range(self.role.size)], ref, self.clock.now):
                return
        raise AssertionError("a loss was told twice")

    def _take(self, method: str, number: int, ranks: list[int], ref: InvocationRef[Any], made: float) -> bool:
        """Wait for a result, and compare it with the reference. False when a worker was lost."""
        self.trainer.wait(ref.done)
        again = method == "step_again"
        try:
            result = ref.result(0)
        except WorkerLost as lost:
            self.log.append(f"{self.clock.now:.4f} {method}({number}): {lost}")
            assert not again or len(self.role.deaths) > IDEMPOTENT_RETRIES, "a call was not repeated"
            self.told.update(dict.fromkeys(ranks, self.clock.now))
            return False
        size = self.role.size
        expected: Any = [number * size] * size
        if method == "two_steps":
            expected = [number * size + size] * size
        assert result == (number if method == "note" else expected), f"{method}({number}) returned {result}"
        self.log.append(f"{self.clock.now:.4f} {method}({number}) = {result}")
        for rank, when in self.role.losses:
            told = again or rank not in ranks or when > made or self.told.get(rank, 0.0) >= when
            assert told, f"{method}({number}) returned, and did not tell that {ROLE}:{rank} was lost"
        return True

    def run(self) -> None:
        """Let everything happen."""
        limit = self.clock.now + CALL_TIMEOUT - 1.0
        while not self.trainer.over and self.clock.run_next():
            assert self.clock.now < limit, "a call hangs"
        assert self.trainer.over, "the trainer waits for what never comes"
        if self.trainer.error is not None:
            raise self.trainer.error
        for worker in self.role.workers:
            assert worker.thread.error is None, worker.thread.error
            assert worker.ran == sorted(set(worker.ran)), (
                f"{worker.me} ran {worker.ran}: not in order, or twice"
            )
            worker.thread.kill()
        connected = [address.rank for address in self.caller._connections]
        assert len({*connected}) == len(connected), "a connection to a worker that has a successor is kept"


def histories() -> list[range]:
    if ONE is not None:
        return [range(int(ONE), int(ONE) + 1)]
    return [range(first, min(first + BLOCK, SEEDS)) for first in range(0, SEEDS, BLOCK)]


@pytest.mark.parametrize("seeds", histories(), ids=lambda seeds: f"seeds {seeds.start} to {seeds.stop - 1}")
def test_calls_give_what_they_should_or_say_who_was_lost(seeds: range) -> None:
    for seed in seeds:
        history = History(seed)
        try:
            history.run()
        except (AssertionError, LookupError, TypeError) as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}\n" + "\n".join(history.log[-40:]))
