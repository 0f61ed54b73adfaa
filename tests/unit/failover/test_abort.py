"""A job that no master can lead is ended by its agents, whatever the state that masters could not go on with."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.invariants import check_job
from tests.unit.failover.job import Job, plain
from tests.unit.failover.multi_node import gone, nodes
from tests.unit.failover.takeover import TWO
from unirun.errors import EXIT_FAILURE
from unirun.failover.context import decode, encode
from unirun.failover.crashes import abort_step, begin_abort
from unirun.failover.draft import (
    After,
    AgentLost,
    Command,
    Due,
    Event,
    Finish,
    OwnerLost,
    Record,
    ToAgent,
    ToWatchers,
)
from unirun.failover.state import JOB_ENDS, JobPhase, JobState, RolePhase, Verdict, WorkerPhase
from unirun.failover.takeover import REJOIN_TIMEOUT
from unirun.values import WorkerId
from unirun.wire.messages import Shutdown, Stop
from unirun.wire.reports import FromWorker, Join, Metrics, Notice, WorkerExited

VERDICT = Verdict(JobPhase.FAILED, EXIT_FAILURE, "a bug", report="all about it")
GRACE = 30.0


class Ending:
    """A job that is aborted."""

    def __init__(self, job: Job) -> None:
        self.state, self.commands = begin_abort(job.state, VERDICT, 200.0)
        check_job(self.state)

    def on(self, event: Event) -> list[Command]:
        self.state, self.commands = abort_step(self.state, event, 201.0)
        check_job(self.state)
        return self.commands

    def join(self, node: str = "n0") -> list[Command]:
        return self.on(Join(node, 1, node, {"actor": "h:1"}))

    def told(self, node: str = "n0") -> list[object]:
        return [c.message for c in self.commands if isinstance(c, ToAgent) and c.node == node]

    @property
    def end(self) -> Verdict | None:
        return next((c.verdict for c in self.commands if isinstance(c, Finish)), None)


def exits(state: JobState) -> list[str]:
    return [str(worker.exit) for worker in state.roles["actor"].workers]


def test_agents_are_told_to_end_what_they_have_and_then_it_is_over() -> None:
    ending = Ending(Job({"actor": 2}).running())
    assert plain(ending.commands) == [
        Record("stopping", "a bug"),
        ToWatchers(Notice("master", "a bug")),
        After(REJOIN_TIMEOUT, Due.REJOIN),
    ]
    assert (ending.state.phase, ending.state.roles["actor"].phase) == (JobPhase.STOPPING, RolePhase.STOPPING)
    assert (ending.state.away, ending.state.view_due) == (frozenset({"n0"}), False)
    assert plain(ending.join()) == [
        ToAgent("n0", Shutdown(GRACE)),
        After(GRACE + REJOIN_TIMEOUT, AgentLost("n0", "it has not ended in time")),
    ]
    assert (ending.state.away, list(ending.state.agents)) == (frozenset(), ["n0"])
    ending.on(WorkerExited(WorkerId("actor", 0, 0), 201.0, 0, None, "leaving", 15))
    assert ending.end is None
    assert plain(ending.on(AgentLost("n0", "it left"))) == [
        Record("agent_lost", "n0: it left"),
        Record("end", "failed: a bug (exit code 1)"),
        Finish(VERDICT),
    ]
    assert (ending.state.phase, ending.state.ended) == (JobPhase.FAILED, 201.0)
    assert ending.state.roles["actor"].phase is RolePhase.STOPPED
    assert exits(ending.state) == ["exit code 0", "killed by SIGKILL"]
    assert decode(encode(ending.state)).verdict == VERDICT


def test_whoever_does_not_come_is_gone() -> None:
    ending = Ending(Job({"actor": 2}, nodes=TWO).running())
    assert any(isinstance(c, After) and c.event == Due.REJOIN for c in ending.commands)
    ending.join("n0")
    ending.on(AgentLost("n0", "it left"))
    assert ending.end is None
    ending.on(Due.REJOIN)
    assert ending.end == VERDICT


def test_nodes_that_have_not_joined_an_earlier_master_are_waited_for_too() -> None:
    """The first `Join` may be what no master can handle."""
    ending = Ending(Job({"actor": 2}, nodes=TWO))
    assert ending.state.away == {"n0", "n1"}
    for node in TWO:
        ending.join(node)
        assert ending.told(node) == [Shutdown(GRACE)]
    ending.on(AgentLost("n0", "it left"))
    ending.on(AgentLost("n1", "it left"))
    assert ending.end == VERDICT


def test_an_agent_that_does_not_leave_does_not_keep_it() -> None:
    ending = Ending(Job({"actor": 1}).running())
    (late,) = (c for c in ending.join() if isinstance(c, After))
    assert late.delay > GRACE
    ending.on(late.event)
    assert ending.end == VERDICT


def test_a_second_wish_ends_it_at_once() -> None:
    ending = Ending(Job({"actor": 1}).running())
    ending.join()
    ending.on(Stop(signal.SIGINT, "got SIGINT"))
    assert ending.told() == [], "it ends already"
    ending.on(Stop(signal.SIGINT, "got SIGINT"))
    assert ending.told() == [Shutdown()]


def test_one_without_patience_and_the_end_of_its_owner_do_so_too() -> None:
    for event in (Stop(signal.SIGKILL, "unirun stop", 0.0), OwnerLost()):
        ending = Ending(Job({"actor": 1}).running())
        ending.join()
        ending.on(event)
        assert ending.told() == [Shutdown()]


def test_its_verdict_takes_the_place_of_any_other() -> None:
    job = Job({"actor": 1}).running().on(Stop(signal.SIGTERM, "enough"))
    ending = Ending(job)
    ending.join()
    ending.on(AgentLost("n0", "it left"))
    assert ending.end == VERDICT


def test_what_agents_say_of_others_is_passed_on() -> None:
    ending = Ending(Job({"actor": 1}).running())
    notice = Notice("actor:0", "is slow")
    assert plain(ending.on(notice)) == [Record("notice", "actor:0: is slow"), ToWatchers(notice)]


def test_who_is_not_there_is_told_nothing_and_was_wished_the_same() -> None:
    """The second kind comes while one of two agents has not come back."""
    ending = Ending(Job({"actor": 2}, nodes=TWO).running())
    ending.join("n0")
    ending.on(Stop(signal.SIGINT, "got SIGINT"))
    assert plain(ending.on(Stop(signal.SIGINT, "got SIGINT"))) == [ToAgent("n0", Shutdown())]


def test_nodes_that_were_given_up_are_not_waited_for_and_roles_that_have_ended_stay_so() -> None:
    job = Job({"actor": 2, "critic": 2}, restarts={"actor": 1, "critic": 1}, inventory=nodes(3)).running()
    job.exits("actor", 0).exits("actor", 1).on(gone("n2"))
    job.state = replace(job.state, view_due=True)
    before = job.state.roles["actor"]
    ending = Ending(job)
    assert ending.state.away == {"n0", "n1"}
    ending.join("n1")
    ending.on(AgentLost("n1", "it left"))
    assert {w.live for w in ending.state.roles["critic"].workers if w.node == "n1"} <= {False}
    assert ending.end is None
    ending.on(Due.REJOIN)
    assert ending.end == VERDICT
    assert (ending.state.away, dict(ending.state.agents)) == (frozenset(), {})
    assert ending.state.roles["actor"] == before
    assert ending.state.roles["critic"].phase is RolePhase.STOPPED


def test_a_job_of_which_nobody_is_left_is_over_at_once() -> None:
    job = Job({"actor": 1})
    job.state = replace(job.state, phase=JobPhase.RUNNING)
    ending = Ending(job)
    assert (ending.end, ending.state.ended) == (VERDICT, 200.0)


def test_what_has_ended_stays_as_it_was() -> None:
    job = Job({"actor": 1}).running().exits("actor", 0)
    assert job.state.phase in JOB_ENDS
    assert begin_abort(job.state, VERDICT, 200.0) == (job.state, [])
    assert abort_step(job.state, AgentLost("n0", "gone"), 201.0) == (job.state, [])


def test_nothing_that_is_told_of_workers_can_stop_it() -> None:
    ending = Ending(Job({"actor": 1}).running())
    for event in (
        WorkerExited(WorkerId("nobody", 0, 0), 1.0, 0, None),
        WorkerExited(WorkerId("actor", 99, 0), 1.0, 0, None),
        WorkerExited(WorkerId("actor", -1, 0), 1.0, 0, None),
        WorkerExited(WorkerId("actor", 0, 5), 1.0, 0, None),
        FromWorker(WorkerId("nobody", 0, 0), Metrics({}, 1.0)),
        AgentLost("nowhere", "gone"),
    ):
        ending.on(event)
    (worker,) = ending.state.roles["actor"].workers
    assert worker.phase is not WorkerPhase.EXITED


NODES = ("n0", "n1", "n2")


@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from(["joins", "is lost", "exits"]), st.sampled_from(NODES)), max_size=8)
)
def test_it_is_over_when_all_nodes_have_left_or_did_not_come_in_whatever_order(
    history: list[tuple[str, str]],
) -> None:
    ending = Ending(Job({"actor": 3}, inventory=nodes(3, devices=1)).running())
    away, there = {*NODES}, set[str]()

    def on(event: Event) -> None:
        if away or there:
            ending.on(event)

    for what, node in history:
        if what == "joins" and node in away:
            on(Join(node, 1, node, {"actor": "h:1"}))
            away, there = away - {node}, there | {node}
        elif what == "exits" and node in there:
            on(WorkerExited(WorkerId("actor", NODES.index(node), 0), 201.0, 0, None, "leaving", 15))
        elif what == "is lost":
            on(AgentLost(node, "it left"))
            away, there = away - {node}, there - {node}
        assert ({*ending.state.away}, {*ending.state.agents}) == (away, away | there)
        assert (ending.state.phase in JOB_ENDS) == (not away and not there)
    on(Due.REJOIN)
    away.clear()
    assert ({*ending.state.away}, {*ending.state.agents}) == (away, away | there)
    for node in sorted(there):
        on(AgentLost(node, "it left"))
    assert ending.state.phase is JobPhase.FAILED
