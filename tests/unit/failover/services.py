"""Jobs of services, and of programs that start after them."""

from __future__ import annotations

from typing import Any, Self

from msgspec.structs import replace

from tests.unit.failover.job import Job
from unirun.collocation import Inventory
from unirun.failover.draft import After, Due, ToAgent
from unirun.failover.state import WorkerState, new_job
from unirun.spec.job import Entry, Probe, RoleSpec
from unirun.values import RankAddress, WorkerId
from unirun.wire.messages import Reserve, StartRole, StopWorkers
from unirun.wire.reports import FromWorker, Health, Placed, WorkerExited


def program(name: str = "train", count: int = 1, **more: Any) -> RoleSpec:
    """A role of programs without ports."""
    return RoleSpec(name, count, Entry("program", "run"), **{"contract": "none", "slots": 0.0, **more})


def service(name: str = "engine", count: int = 1, **more: Any) -> RoleSpec:
    """A service as a job file makes it: with a port, a probe and a budget of each rank."""
    usual = {
        "service": True,
        "ports": ("http",),
        "ready": Probe("tcp"),
        "restart": "process",
        "max_restarts": 3,
        "restart_window": 100.0,
        "restart_delay": 1.0,
    }
    return program(name, count, **{**usual, **more})


class Services(Job):
    """A job of programs under test."""

    def __init__(
        self, *roles: RoleSpec, nodes: tuple[str, ...] = ("n0",), primary: tuple[str, ...] = ("train",)
    ) -> None:
        super().__init__({role.name: role.count for role in roles}, nodes=nodes, primary=("train",))
        spec = replace(self.state.spec, roles=roles, primary=primary)
        placement = self.state.placement
        self.state = new_job(spec, placement, started=self.now, logs="/logs", inventory=Inventory(()))

    def reserve(self) -> Self:
        """Agents answer the orders for ports."""
        reserved = [(c.node, c.message) for c in self.commands if isinstance(c, ToAgent)]
        events = [
            Placed(node, order.role, order.ranks, tuple(place(node, rank) for rank in order.ranks))
            for node, order in reserved
            if isinstance(order, Reserve)
        ]
        self.on(*events)
        return self

    def begin(self) -> Self:
        """All agents join, and all ranks get their ports."""
        self.launched()
        return self.reserve() if self.orders(Reserve) else self

    def ready(self, name: str = "engine", *ranks: int, ok: bool = True, why: str = "") -> Self:
        """The probes of these ranks say that they are ready; of all ranks by default, which run then."""
        if not ranks:
            self.all_run(name)
            spec = self.state.role_spec(name)
            ranks = tuple(range(0, spec.count, spec.group or 1))
        workers = [self.worker(name, rank) for rank in ranks]
        health = Health(ok, self.now, why)
        self.on(*(FromWorker(WorkerId(name, each.rank, each.incarnation), health) for each in workers))
        return self

    def up(self) -> Self:
        """A running job, of which everything is ready: role by role, as they start."""
        self.begin()
        while waits := [r for r in self.state.roles.values() if r.living and not r.settled]:
            for role in waits:
                self.ready(role.name) if role.probed else self.all_run(role.name)
        return self

    def dies(self, name: str = "engine", rank: int = 0, code: int = 1, **more: Any) -> Self:
        """A worker ends by itself."""
        who = WorkerId(name, rank, self.worker(name, rank).incarnation)
        self.on(WorkerExited(who, self.now, code, None, **more))
        return self

    def later(self, seconds: float) -> Self:
        """The time after which the job looks again."""
        self.now += seconds
        self.on(Due.START)
        return self

    def worker(self, name: str = "engine", rank: int = 0) -> WorkerState:
        return self.state.roles[name].workers[rank]

    @property
    def begun(self) -> list[tuple[str, list[int]]]:
        """The roles and ranks whose start is ordered."""
        return [(order.role, [member.rank for member in order.members]) for order in self.orders(StartRole)]

    @property
    def ended(self) -> list[tuple[str, list[int], int]]:
        """The roles and ranks that are told to end, and by which signal."""
        return [(order.role, [*order.ranks], order.signal) for order in self.orders(StopWorkers)]

    @property
    def delays(self) -> list[float]:
        """The seconds after which it looks again."""
        return [c.delay for c in self.commands if isinstance(c, After) and c.event == Due.START]


def place(node: str, rank: int, port: int = 20000) -> RankAddress:
    """The place that agents of these tests give to a rank."""
    return RankAddress(node, (port + rank,))
