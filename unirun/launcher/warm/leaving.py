"""The warm processes that a job uses, and those that it leaves behind with ``UNIRUN_WARM=1``."""

from __future__ import annotations

import os

from unirun.failover.offers import AgentTask
from unirun.launcher.environment import FRESH, for_workers
from unirun.launcher.orders import Orders
from unirun.launcher.warm.borrowing import VARIABLE, WarmMatch, choose, running, some_start, start
from unirun.observe.jobdir import JobDir
from unirun.spec.job import JobSpec

WARM_IDLE_TIMEOUT = 1800.0
"""Seconds without a job after which a warm process ends."""

MAX_LEFT_PROCESSES = 4
"""Maximum number of warm processes left by a user's jobs; each has 200 MB."""


def choices(job: JobDir, spec: JobSpec) -> list[WarmMatch]:
    """For each forking spawner of a job, the warm process that lends it, or why none does."""
    orders = Orders(job, AgentTask(spec, "", (), os.getcwd(), spec.master_addr), for_workers(os.environ))
    return [choose(orders.spawner_request(key)) for key in orders.spawners if key != FRESH]


def starts(choice: WarmMatch) -> str:
    """Describe how a spawner starts."""
    if choice.warm is not None:
        return f"start: warm, from process {choice.warm.description.pid}"
    return f"start: cold: {'; '.join(choice.against)}"


def leaves_behind() -> bool:
    """Return True if jobs should leave warm processes behind."""
    return os.environ.get(VARIABLE) == "1"


def leave_behind(found: list[WarmMatch]) -> None:
    """Start the warm processes that were missing, if enabled. Raises `JobError`."""
    if not leaves_behind() or some_start():
        # Of many jobs that start together, only one does it.
        return
    for choice in found:
        if choice.warm is None and len(running()) < MAX_LEFT_PROCESSES:
            start(choice.want.env, choice.want.modules, WARM_IDLE_TIMEOUT)
