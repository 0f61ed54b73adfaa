"""The messages of tests to a master over its streams."""

from __future__ import annotations

from tests.unit.launcher.master.court import until
from unirun.values import WorkerId
from unirun.wire.aio import Stream
from unirun.wire.messages import (
    Shutdown,
)
from unirun.wire.reports import (
    WorkerExited,
)


def ended(rank: int, code: int | None = 0, by: int | None = None, sent: int | None = None) -> WorkerExited:
    return WorkerExited(WorkerId("actor", rank, 0), 1.0, code, by, "own" if sent is None else "order", sent)


async def ends_well(agent: Stream) -> None:
    for rank in (0, 1):
        agent.send(ended(rank))
    await until(agent, Shutdown)
    await agent.close()
