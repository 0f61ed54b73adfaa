"""What a job finds, and what it leaves behind with ``UNIRUN_WARM=1``."""

from __future__ import annotations

import os

from unirun.launcher.environment import FRESH, for_workers
from unirun.launcher.orders import AgentTask, Orders
from unirun.launcher.warm.borrowing import VARIABLE, Choice, choose, running, some_start, start
from unirun.rendezvous import JobDir
from unirun.spec import JobSpec

IDLE = 1800.0
"""Seconds without a job after which a warm process ends."""

MOST = 4
"""Warm processes of a user that jobs leave behind: each has 200 MB."""


def choices(job: JobDir, spec: JobSpec) -> list[Choice]:
    """For each spawner of a job that forks workers, the warm process that lends it, or why none does."""
    orders = Orders(job, AgentTask(spec, "", (), os.getcwd(), spec.master_addr), for_workers(os.environ))
    return [choose(orders.wish(key)) for key in orders.spawners if key != FRESH]


def starts(choice: Choice) -> str:
    """How a spawner starts, in words."""
    if choice.warm is not None:
        return f"start: warm, from process {choice.warm.description.pid}"
    return f"start: cold: {'; '.join(choice.against)}"


def leaves_behind() -> bool:
    """Whether the user wants that."""
    return os.environ.get(VARIABLE) == "1"


def leave_behind(found: list[Choice]) -> None:
    """Start what was not there, if the user wants that. Raises `JobError`."""
    if not leaves_behind() or some_start():
        # Of many jobs that start together, one leaves some behind.
        return
    for choice in found:
        if choice.warm is None and len(running()) < MOST:
            start(choice.want.env, choice.want.modules, IDLE)
