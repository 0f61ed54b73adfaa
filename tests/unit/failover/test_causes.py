"""Each event says which one it follows from, over several steps; and each order which event it was given for."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import TERM, Job
from unirun.errors import IllegalTransition
from unirun.failover.draft import Record, ToAgent
from unirun.values import WorkerId
from unirun.wire.messages import Stop, StopWorkers
from unirun.wire.reports import StoreOpened, WorkerExited, WorkerRunning, WorkerStarted


class Log:
    """The events of a job by their ids, as the log has them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.events: dict[str, Record] = {}

    def on(self, event: object) -> None:
        """One event of the job, with everything that it leads to."""
        self.job.on(event)  # type: ignore[arg-type]
        for command in self.job.commands:
            if isinstance(command, Record):
                assert command.id not in self.events
                self.events[command.id] = command

    def kinds(self, kind: str) -> list[str]:
        """The kinds of the last event of this `kind` and of what it follows from, the latest first."""
        at: Record | None = [event for event in self.events.values() if event.kind == kind][-1]
        found = []
        while at is not None:
            found.append(at.kind)
            at = self.events.get(at.cause)
        return found


def test_a_role_that_runs_again_does_so_because_a_worker_has_failed() -> None:
    """1. A worker fails. 2. The policy restarts the role. 3. Its store is there. 4. All ranks run."""
    log = Log(Job({"actor": 2}, restarts={"actor": 1}, stores_open=False).running())
    log.on(WorkerExited(WorkerId("actor", 0, 0), 5.0, 1, None))
    log.on(WorkerExited(WorkerId("actor", 1, 0), 6.0, None, TERM, "order", TERM))
    assert log.kinds("exit") == ["exit", "decision", "exit"], "it ended because of the decision"
    log.on(StoreOpened("actor", 1))
    assert log.kinds("restart") == ["restart", "exit", "decision", "exit"]
    for rank in range(2):
        log.on(WorkerRunning(WorkerId("actor", rank, 1), 1))
    assert log.kinds("running") == ["running", "restart", "exit", "decision", "exit"]


def test_what_ends_with_the_job_ends_because_of_who_asked() -> None:
    log = Log(Job({"actor": 1}).running())
    log.on(Stop(TERM, "enough"))
    (order,) = [c for c in log.job.commands if isinstance(c, ToAgent) and isinstance(c.message, StopWorkers)]
    assert log.events[order.cause].kind == "stopping"
    log.on(WorkerExited(WorkerId("actor", 0, 0), 5.0, None, TERM, "order", TERM))
    assert log.kinds("end") == ["end", "stopping", "stop"]


def test_an_illegal_transition_has_the_event_that_the_state_follows_from() -> None:
    job = Job({"actor": 1}).running()
    with pytest.raises(IllegalTransition) as raised:
        job.on(WorkerStarted(WorkerId("actor", 0, 7), 5))
    assert raised.value.cause == job.state.roles["actor"].cause != ""
