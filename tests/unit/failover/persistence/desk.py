"""A writer with what it needs beside it, and what has been carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.unit.failover.job import Job
from tests.unit.failover.persistence.unsteady import UnsteadyStore
from unirun.failover.events import Command, Record
from unirun.failover.persistence.context_store import ContextStore, load
from unirun.failover.state import JobState, Verdict
from unirun.launcher.master.writer import StateWriter
from unirun.rendezvous.election import campaign
from unirun.wire.address import UnixAddress

PATIENCE = 120.0


SEAT = "jobs/job-1/"


class Desk:
    """A writer with its store, and what it has let be done."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = UnsteadyStore()
        term = campaign(self.store, SEAT, UnixAddress("/x", "host"), 7, ttl=60)
        assert term is not None
        self.contexts = ContextStore(self.store, "job-1", term)
        self.contexts.create(job.state)
        self.done: list[Command] = []
        self.then: Callable[[], None] = lambda: None
        self.troubles: list[str] = []
        self.verdicts: list[Verdict] = []
        self.writer = StateWriter(
            job.state, term, self.contexts, self._do, self._changed, self.verdicts.append
        )
        self.over = asyncio.Event()

    def _do(self, commands: list[Command]) -> None:
        self.done += commands
        if commands:
            self.then()

    def _changed(self) -> None:
        self.troubles.append(self.writer.trouble)

    def decides(self, text: str) -> Record:
        """A step with a decision, from which a record follows."""
        rank = next(worker.rank for worker in self.job.state.roles["actor"].workers if worker.live)
        return self.steps(text, self.job.exits("actor", rank).state)

    def steps(self, text: str, state: JobState) -> Record:
        record = Record("test", text)
        self.writer.add(state, [record])
        return record

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not true():
                await asyncio.sleep(0.001)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def stored(desk: Desk) -> JobState:
    state = load(desk.store, "job-1")
    assert state is not None
    return state
