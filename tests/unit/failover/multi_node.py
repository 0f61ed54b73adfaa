"""Jobs on several nodes, and what tests ask of them when nodes are lost."""

from __future__ import annotations

from tests.unit.failover.job import Job
from unirun.collocation import Device, Inventory, Node
from unirun.failover.draft import AgentLost, ToAgent, ToGuest
from unirun.values import WorkerId
from unirun.wire.messages import StartRole
from unirun.wire.reports import FromWorker, Serving


def nodes(count: int, devices: int = 2) -> Inventory:
    there = tuple(Device(str(number), "") for number in range(devices))
    return Inventory(tuple(Node(f"n{number}", (0,), there) for number in range(count)))


def scripts(count: int = 4, *, of: int = 3, restarts: int = 2, **more: object) -> Job:
    return Job({"actor": count}, restarts={"actor": restarts}, inventory=nodes(of), **more)  # type: ignore[arg-type]


def workloads(
    restarts: int = 2, *, of: int = 4, recoverable: bool = False, least: dict[str, int] | None = None
) -> Job:
    """Four actors on two nodes, two critics on another, a trainer beside them."""
    job = Job(
        {"actor": 4, "critic": 2, "trainer": 1},
        restarts={"actor": restarts, "critic": restarts, "trainer": restarts},
        kinds={"actor": "workload", "critic": "workload", "trainer": "trainer"},
        primary=("trainer",),
        inventory=nodes(of),
        least=least,
    ).running()
    for role in job.state.roles.values():
        for worker in role.workers:
            who = WorkerId(role.name, worker.rank, worker.incarnation)
            ready = role.kind != "trainer" or recoverable
            job.on(FromWorker(who, Serving({"socket": f"{role.name}{worker.rank}"}, ready)))
    return job


def gone(node: str) -> AgentLost:
    return AgentLost(node, "the peer closed the stream")


def places(job: Job, role: str = "actor") -> list[str]:
    return [place.node for place in job.state.placement.of_role(role)]


def ranks(job: Job) -> dict[str, list[int]]:
    """By node, who was ordered to start."""
    found: dict[str, list[int]] = {}
    for command in job.commands:
        if isinstance(command, ToAgent | ToGuest) and isinstance(command.message, StartRole):
            found.setdefault(command.node, []).extend(member.rank for member in command.message.members)
    return found
