"""The figures of a job in a status, in a summary, and in the view of an attached process."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import KILL, TERM, Job
from tests.unit.failover.multi_node import gone, nodes
from unirun.failover.context import summary_of
from unirun.failover.draft import AgentLost
from unirun.failover.status_views import FIRST_LINE, farewell, present, status_of
from unirun.observe.status import (
    FAILURES,
    CallStatus,
    FailureStatus,
    JobStatus,
    RoleStatus,
    Summary,
    WorkerStatus,
)
from unirun.values import WorkerId
from unirun.wire.messages import Ended, RoleChanged, Stop, WorkerOutput
from unirun.wire.reports import (
    DEBUGGER,
    CallCount,
    Calls,
    FromWorker,
    Listening,
    Metrics,
    Serving,
    WorkerError,
    WorkerStarted,
)


@pytest.fixture
def job() -> Job:
    """Two actors of which one is started again, a trainer that has called them, a lost node and a spare one."""
    job = Job(
        {"actor": 2, "trainer": 1},
        kinds={"actor": "workload", "trainer": "trainer"},
        restarts={"actor": 3, "trainer": 1},
        primary=("trainer",),
        inventory=nodes(4),
        spares=2,
    )
    job.state = replace(job.state, uid="0a1b")
    job.running()
    for rank in (0, 1):
        job.on(FromWorker(WorkerId("actor", rank, 0), Serving({"socket": f"a{rank}"}, True)))
    train = CallCount("actor", "train", 20, 4000, 400, 0.5, ((0, 1),))
    job.on(
        FromWorker(WorkerId("trainer", 0, 0), Calls((train,))),
        FromWorker(WorkerId("trainer", 0, 0), Metrics({"loss": 0.25}, 105.0)),
    )
    error = WorkerError("  ValueError: nan\nin step 3", "Traceback", 106.0)
    return job.exits("actor", 1, 3, error=error).on(gone("n3"))


def test_the_status_of_a_job_has_all_that_is_known(job: Job) -> None:
    memory, cpu = {"actor:0": 500, "actor:1": 600, "trainer:0": 700}, {"actor:0": 1.5, "trainer:0": 2.5}
    status = status_of(job.state, memory, cpu, epoch=4, trouble="it is away")
    actors = (
        WorkerStatus(0, "serving", "n0", 0, 1, "", 500, 1.5, 0, {}, slots=("0",)),
        WorkerStatus(1, "starting", "n0", 1, None, "", 600, None, 1, {}, slots=("1",)),
    )
    trainer = WorkerStatus(0, "running", "n0", 0, 1, "", 700, 2.5, 0, {"loss": 0.25})
    assert status == JobStatus(
        run_id="job-1",
        name="job",
        phase="running",
        reason="",
        started=100.0,
        ended=None,
        code=None,
        roles=(
            RoleStatus("actor", "reforming", 1, 1, 3, actors),
            RoleStatus("trainer", "running", 0, 0, 1, (trainer,)),
        ),
        epoch=4,
        trouble="it is away",
        failures=(
            FailureStatus(
                "actor",
                1,
                0,
                "n0",
                106.0,
                "exit code 3",
                "ValueError: nan",
                "actor:1 ended with exit code 3; restart 1 of 3: actor:1 alone, "
                "actor's other rank keeps its memory and forms generation 1",
                kind="exception",
                cause="ValueError: nan",
                rule="exit",
                noticed=job.state.failures[0].noticed,
                slots=job.state.failures[0].slots,
                affected=job.state.failures[0].affected,
                log="/logs/actor/1/0",
            ),
        ),
        failed=1,
        calls=(
            CallStatus("trainer", "actor", "train", "broadcast", "forward", False, 440.0, 20, 4000, 400, 0.5),
        ),
        spares=("n2",),
        lost=("n3",),
        waiting=("trainer:0 waits for actor:1 (trainer → actor: train)",),
    )


def test_a_rank_that_a_debugger_holds_is_named_until_it_is_let_go(job: Job) -> None:
    who = WorkerId("actor", 0, 0)
    job.on(FromWorker(who, Listening({DEBUGGER: "is held by unirun debug"})))
    assert status_of(job.state, {}, {}).waiting[0] == "actor:0 is held by unirun debug"
    job.on(FromWorker(who, Listening({DEBUGGER: ""})))
    assert not [text for text in status_of(job.state, {}, {}).waiting if "debug" in text]


def test_the_summary_and_the_farewell_are_there_as_the_job_ends(job: Job) -> None:
    before = Summary("job-1", "0a1b", "job", "running", 100.0, None, None, {"actor": 2, "trainer": 1})
    assert summary_of(job.state) == before
    assert farewell(job.state) is None
    job.on(Stop(TERM, "enough"))
    assert summary_of(job.state) == replace(before, phase="stopping")
    assert farewell(job.state) is None
    job.on(AgentLost("n0", "it left"), AgentLost("n1", "it left"), AgentLost("n2", "it left"))
    ended = job.state.ended
    assert ended is not None
    assert 101.5 < ended < job.now
    assert summary_of(job.state) == replace(before, phase="stopped", ended=ended, code=143)
    assert farewell(job.state) == Ended(143, "stopped", "enough", "")
    status = status_of(job.state, {"actor:0": 500}, {"actor:0": 1.5})
    assert (status.phase, status.code, status.reason, status.ended) == ("stopped", 143, "enough", ended)
    worker = status.roles[0].workers[0]
    assert (worker.pid, worker.memory, worker.cpu, worker.exit) == (None, None, None, "killed by SIGKILL")


def test_a_status_has_the_last_failures_and_of_each_the_first_line() -> None:
    job = Job({"actor": 1}, restarts={"actor": 400}).running()
    for number in range(FAILURES + 5):
        job.exits("actor", 0, by=KILL, note="x" * 1000 if number % 2 else "")
    status = status_of(job.state, {}, {})
    assert status.failed == FAILURES + 5
    assert [each.incarnation for each in status.failures] == list(range(5, FAILURES + 5))
    assert {each.message for each in status.failures} == {"", "x" * FIRST_LINE}
    job.state = replace(job.state, forgotten=7)
    assert status_of(job.state, {}, {}).failed == FAILURES + 12


def test_who_attaches_is_told_of_roles_and_processes(job: Job) -> None:
    assert present(job.state) == [
        RoleChanged("actor", "reforming", 1, 1, 2),
        WorkerOutput(WorkerId("actor", 0, 0), 0, "n0"),
        RoleChanged("trainer", "running", 0, 1, 1),
        WorkerOutput(WorkerId("trainer", 0, 0), 0, "n0"),
    ]
    job.on(WorkerStarted(WorkerId("actor", 1, 1), 44))
    assert WorkerOutput(WorkerId("actor", 1, 1), 1, "n0") in present(job.state)
