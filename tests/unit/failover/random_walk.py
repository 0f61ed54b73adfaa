"""A job to which anything happens that can, for tests of what holds in every history."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from msgspec.structs import replace

from tests.unit.failover.job import KILL, TERM, Job
from unirun.collocation import Device, Inventory, Node
from unirun.failover.draft import AgentLost, Due, Event
from unirun.failover.state import JOB_ENDS, JobState
from unirun.values import WorkerId
from unirun.wire.messages import Stop
from unirun.wire.reports import (
    CommitJob,
    FromWorker,
    GroupFormed,
    Join,
    Metrics,
    Notice,
    OpenStore,
    Serving,
    StoreEnded,
    StoreOpened,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

THREE = Inventory(tuple(Node(f"n{n}", (0,), (Device("0", ""), Device("1", ""))) for n in range(3)))


class RandomWalk:
    """A job to which anything happens that can."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.job = Job(
            {"actor": 3, "trainer": 1, "reward": 2},
            kinds={"actor": "workload", "trainer": "trainer"},
            restarts={"actor": 30, "trainer": 2, "reward": 20},
            primary=("trainer",),
            nodes=("n0", "n1"),
            stores_open=False,
            inventory=self.rng.choice([None, THREE]),
            least={"actor": 1, "reward": 1},
        )
        owned = self.rng.choice([False, True])
        self.job.state = replace(self.job.state, uid="0a1b", owned=owned)
        self.stores: list[StoreOpened] = []

    def states(self, steps: int) -> list[JobState]:
        """The states one after another, from the first."""
        return [self.job.state, *(state for _, state in self.steps(steps - 1))]

    def steps(self, most: int) -> Iterator[tuple[Event, JobState]]:
        """Events, each with the state after it; `job.commands` are those of the latest."""
        for node in self.job.state.nodes:
            endpoints = {name: f"{node}:{n}" for n, name in enumerate(self.job.state.roles)}
            join = Join(node, 1, node, endpoints)
            yield join, self.do(join)
        for _ in range(most - len(self.job.state.nodes)):
            if self.job.state.phase in JOB_ENDS:
                return
            event = self.event()
            yield event, self.do(event)

    def do(self, event: Event) -> JobState:
        self.job.on(event)
        self.stores += [StoreOpened(o.role, o.generation) for o in self.job.orders(OpenStore)]
        return self.job.state

    def event(self) -> Event:
        rng, state = self.rng, self.job.state
        role = rng.choice(list(state.roles.values()))
        worker = rng.choice(role.workers)
        who = WorkerId(role.name, worker.rank, worker.incarnation)
        if rng.random() < 0.02:
            ends: list[Event] = [
                Stop(TERM, "enough", rng.choice([None, 1.0])),
                AgentLost(rng.choice(state.nodes), "gone"),
            ]
            return rng.choice(ends)
        if self.stores and rng.random() < 0.3:
            return self.stores.pop(0)
        told: list[Event] = [Due.VIEW, Notice("n0", "hm"), StoreEnded(role.name, role.generation, 1.0, "x")]
        if worker.live:
            news: list[Event] = [WorkerStarted(who, 100), WorkerRunning(who, role.opened)]
            told += 4 * news
            told += 4 * [
                FromWorker(who, Serving({"socket": "a"}, True)),
                FromWorker(who, GroupFormed(role.opened)),
            ]
            told += [FromWorker(who, Metrics({"loss": 0.5}, 1.0)), self.exit(who), self.exit(who)]
            told += 2 * [FromWorker(who, CommitJob(1, rng.randrange(3)))]
        return rng.choice(told)

    def exit(self, who: WorkerId) -> WorkerExited:
        rng = self.rng
        error = rng.choice([None, WorkerError("ValueError: ü\udcff\x00", "Traceback …\n", 5.0)])
        code, by = rng.choice([(0, None), (1, None), (None, KILL), (None, TERM)])
        stopping = self.job.state.roles[who[0]].phase in ("stopping", "restarting")
        if stopping:
            return WorkerExited(who, 6.0, None, TERM, "order", TERM)
        return WorkerExited(who, 6.0, code, by, "own", None, error, "a note", "the end")
