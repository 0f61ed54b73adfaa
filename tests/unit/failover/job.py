"""A job under test: events go in, and what they lead to can be asked for."""

from __future__ import annotations

import signal
from typing import Self, TypeVar

from tests.sim.views import told_view
from tests.unit.failover.invariants import check_job, check_types
from unirun.collocation import Assignment, Inventory, Placement, place
from unirun.collocation.graph import declared
from unirun.failover.draft import (
    After,
    Command,
    Due,
    Event,
    Finish,
    Record,
    ToAgent,
    ToAgents,
    ToWatchers,
)
from unirun.failover.state import JobPhase, new_job, ties_of
from unirun.failover.step import step
from unirun.spec.job import Entry, EntryKind, JobSpec, RoleSpec
from unirun.values import WorkerId
from unirun.wire.messages import Shutdown, StopWorkers, View, updated
from unirun.wire.reports import (
    Cause,
    Join,
    OpenStore,
    StoreOpened,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

T = TypeVar("T")

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)


class Job:
    """A job under test: events go in, and what they lead to can be asked for."""

    def __init__(
        self,
        counts: dict[str, int],
        *,
        restarts: dict[str, int] | None = None,
        primary: tuple[str, ...] | None = None,
        nodes: tuple[str, ...] = ("n0",),
        kinds: dict[str, EntryKind] | None = None,
        stores_open: bool = True,
        inventory: Inventory | None = None,
        least: dict[str, int] | None = None,
        spares: int = 0,
    ) -> None:
        kinds = kinds or {}
        self.stores_open = stores_open
        self.losses_apart = True
        limits = restarts or {}
        roles = tuple(
            RoleSpec(
                name,
                count,
                Entry(kinds.get(name, "script"), "a.py"),
                max_restarts=limits.get(name, 0),
                restart="process" if name in kinds else "role",
                least=(least or {}).get(name),
            )
            for name, count in counts.items()
        )
        spec = JobSpec("job", "job-1", roles, primary or tuple(counts), spares=spares)
        self.now = 100.0
        places = [
            Assignment(name, rank, nodes[rank % len(nodes)], 0, rank // len(nodes))
            for name, count in counts.items()
            for rank in range(count)
        ]
        placement = Placement(tuple(places), "")
        if inventory is not None:
            spec, placement = place(spec, inventory, ties=ties_of(declared(spec)))
        self.state = new_job(
            spec,
            placement,
            started=self.now,
            logs="/logs",
            inventory=inventory or Inventory(()),
        )
        self.commands: list[Command] = []
        self.seen: dict[str, View] = {}
        self.stores_at: dict[tuple[str, int], str] = {}

    def on(self, *events: Event) -> Self:
        """Apply `events`; a store that is ordered for a later generation opens, unless the test does that."""
        self.commands = []
        pending = list(events)
        while pending:
            self.now += 0.1
            self.state, commands = step(self.state, pending.pop(0), self.now)
            check_job(self.state)
            check_types(self.state, commands)
            self.check_stores(commands)
            commands = [each for command in commands for each in self.received(command)]
            self.check_views()
            self.commands += commands
            assert all(c.node in self.state.nodes for c in commands if isinstance(c, ToAgent))
            orders = [c.message for c in commands if isinstance(c, ToAgent)]
            if any(isinstance(c, After) and c.event == Due.LOSSES for c in commands):
                pending = [Due.LOSSES, *pending] if self.losses_apart else [*pending, Due.LOSSES]
            if self.stores_open:
                opened = [StoreOpened(o.role, o.generation) for o in orders if isinstance(o, OpenStore)]
                pending = [*(each for each in opened if each.generation > 0), *pending]
        return self

    def received(self, command: Command) -> list[Command]:
        """A command as the nodes see it: each its own, and the whole view that it has after changes."""
        if not isinstance(command, ToAgents):
            return [command]
        for node in command.nodes:
            if isinstance(command.message, View):
                view = updated(self.seen.get(node), command.message)
                assert view is not None, f"{node} is told changes of a view that it does not have"
                self.seen[node] = view
        return [ToAgent(node, self.seen[node]) for node in command.nodes]

    def check_stores(self, commands: list[Command]) -> None:
        """No agent leaves a job that goes on while ranks live that have met in a store of its node."""
        for command in commands:
            match command:
                case ToAgent(node, OpenStore(role, generation)):
                    self.stores_at[role, generation] = node
                case ToAgent(node, Shutdown()) if self.state.phase is JobPhase.RUNNING:
                    served = [
                        role.name
                        for role in self.state.roles.values()
                        if role.living and self.stores_at.get((role.name, role.opened)) == node
                    ]
                    assert not served, f"{node} leaves, and serves the store of {served}"

    def check_views(self) -> None:
        """Changes, put together, give the view that was told last."""
        if self.state.told is not None:
            for node in self.state.agents.keys() - self.state.uninformed:
                assert self.seen[node] == told_view(self.state)
                programs = [role for role in self.seen[node].roles if self.state.roles[role.name].is_program]
                assert not any(role.endpoint for role in programs), "a store is named that there is not"

    def launched(self) -> Self:
        return self.on(*(self.join(node) for node in self.state.nodes))

    def join(self, node: str) -> Join:
        host = "127.0.0.1" if node == "n0" else node
        stores = [role.name for role in self.state.roles.values() if not role.is_program]
        endpoints = {name: f"{host}:{n + 1}" for n, name in enumerate(stores)}
        return Join(node, 1, node, endpoints)

    def running(self) -> Self:
        self.launched()
        for name in self.state.roles:
            self.all_run(name)
        return self

    def all_run(self, name: str) -> Self:
        for worker in self.state.roles[name].workers:
            pid = 100 * worker.incarnation + worker.rank + 1
            self.on(
                WorkerStarted(WorkerId(name, worker.rank, worker.incarnation), pid),
                WorkerRunning(WorkerId(name, worker.rank, worker.incarnation), self.state.roles[name].opened),
            )
        return self

    def exits(
        self,
        name: str,
        rank: int,
        code: int | None = 0,
        by: int | None = None,
        *,
        asked: int | None = None,
        cause: Cause | None = None,
        error: WorkerError | None = None,
        incarnation: int | None = None,
        note: str = "",
    ) -> Self:
        """A worker ends; with `asked` because of an order, unless another `cause` is given."""
        cause = cause or ("own" if asked is None else "order")
        if incarnation is None:
            incarnation = self.state.roles[name].workers[rank].incarnation
        code = None if by else code
        return self.on(
            WorkerExited(WorkerId(name, rank, incarnation), self.now, code, by, cause, asked, error, note)
        )

    def obey(self) -> Self:
        """Every worker that was told to end does."""
        for order in self.orders(StopWorkers):
            for rank in order.ranks:
                self.exits(order.role, rank, by=order.signal, asked=order.signal)
        return self

    def orders(self, kind: type[T]) -> list[T]:
        return [c.message for c in self.commands if isinstance(c, ToAgent) and isinstance(c.message, kind)]

    def told(self, kind: type[T]) -> list[T]:
        return [c.message for c in self.commands if isinstance(c, ToWatchers) and isinstance(c.message, kind)]

    @property
    def records(self) -> str:
        return "\n".join(f"{c.kind}: {c.text}" for c in self.commands if isinstance(c, Record))

    @property
    def finish(self) -> Finish | None:
        return next((c for c in self.commands if isinstance(c, Finish)), None)

    @property
    def end(self) -> tuple[int, str] | None:
        """The exit code and the report with which the job has ended."""
        finish = self.finish
        return (finish.verdict.code, finish.verdict.report) if finish else None

    def phases(self) -> dict[str, str]:
        return {name: role.phase.value for name, role in self.state.roles.items()}


def plain(commands: list[Command]) -> list[Command]:
    """The commands without the events that they follow from."""
    return [
        Record(c.kind, c.text)
        if isinstance(c, Record)
        else ToAgent(c.node, c.message)
        if isinstance(c, ToAgent)
        else c
        for c in commands
    ]
