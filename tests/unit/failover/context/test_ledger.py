"""Commands wait until what they follow from is in the store, and are done once, in their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.random_walk import RandomWalk
from unirun.failover.context import Ledger, urgent
from unirun.failover.draft import Command, Record, ToAgent
from unirun.failover.state import JobState
from unirun.values import WorkerId
from unirun.wire.messages import ExitAck, Shutdown, Stop, StopWorkers
from unirun.wire.reports import OpenStore, WorkerRunning


def note(text: str) -> list[Command]:
    return [Record("test", text)]


def ends(job: Job, rank: int) -> JobState:
    return job.exits("actor", rank).state


def looks_different(state: JobState) -> JobState:
    """A later state of which nothing is urgent."""
    return replace(state, view_due=not state.view_due)


def test_what_follows_from_news_is_done_at_once() -> None:
    job = Job({"actor": 3}).launched()
    ledger = Ledger(job.state)
    job.on(WorkerRunning(WorkerId("actor", 0, 0), 0))
    assert ledger.add(job.state, note("news")) == note("news")
    assert ledger.due is None


def test_what_follows_from_a_decision_waits_until_it_is_written() -> None:
    job = Job({"actor": 3}).running()
    ledger = Ledger(job.state)
    state = ends(job, 0)
    assert ledger.add(state, note("decision")) == []
    assert ledger.due is state
    assert ledger.kept is not state
    assert ledger.written(state) == note("decision")
    assert ledger.kept is state
    assert ledger.due is None
    assert ledger.written(state) == []


def test_news_after_a_decision_wait_behind_it() -> None:
    job = Job({"actor": 3}).running()
    ledger = Ledger(job.state)
    decided = ends(job, 0)
    later = looks_different(decided)
    ledger.add(decided, note("decision"))
    assert ledger.add(later, note("news")) == []
    assert ledger.due is later
    assert ledger.written(decided) == [*note("decision"), *note("news")], "it needs no write of its own"
    assert ledger.due is None


def test_of_two_decisions_the_second_waits_on() -> None:
    job = Job({"actor": 3}).running()
    ledger = Ledger(job.state)
    one, two = ends(job, 0), ends(job, 1)
    ledger.add(one, note("one"))
    ledger.add(two, note("two"))
    assert ledger.due is two
    assert ledger.written(one) == note("one")
    assert ledger.due is two
    assert ledger.written(two) == note("two")


def test_one_write_of_the_last_state_releases_all() -> None:
    job = Job({"actor": 3}).running()
    ledger = Ledger(job.state)
    states = [ends(job, rank) for rank in range(3)]
    for number, state in enumerate(states):
        ledger.add(state, note(str(number)))
    assert ledger.written(states[-1]) == [*note("0"), *note("1"), *note("2")]


def test_a_step_that_changed_nothing_does_not_hide_one_that_did() -> None:
    job = Job({"actor": 3}).running()
    ledger = Ledger(job.state)
    state = ends(job, 0)
    ledger.add(state, note("one"))
    ledger.add(state, note("again"))
    assert ledger.written(state) == [*note("one"), *note("again")]


def test_what_follows_when_a_decision_is_undone_does_not_overtake_it() -> None:
    """Compared with what is in the store nothing is urgent any more."""
    job = Job({"actor": 3}).running()
    start = job.state
    ledger = Ledger(start)
    ledger.add(ends(job, 0), note("decision"))
    undone = looks_different(start)
    assert not urgent(ledger.kept, undone)
    assert ledger.add(undone, note("undone")) == []
    assert ledger.due is undone
    assert ledger.written(undone) == [*note("decision"), *note("undone")]


def test_a_write_of_what_came_before_releases_no_decision() -> None:
    job = Job({"actor": 3}).running()
    before = looks_different(job.state)
    ledger = Ledger(job.state)
    assert ledger.add(before, note("news")) == note("news")
    decided = ends(job, 0)
    ledger.add(decided, note("decision"))
    assert ledger.written(before) == []
    assert ledger.due is decided


def test_what_ends_the_job_can_be_done_unwritten_and_nothing_else_that_agents_are_told() -> None:
    job = Job({"actor": 3}).running()
    start = job.state
    ledger = Ledger(start)
    ledger.add(ends(job, 0), [*note("one"), ToAgent("n0", ExitAck(WorkerId("actor", 0, 0)))])
    stop = ToAgent("n0", StopWorkers("actor", (1, 2), TERM, 30.0))
    leave = ToAgent("n0", Shutdown(30.0))
    store = ToAgent("n0", OpenStore("actor", 1))
    ledger.add(job.on(Stop(TERM, "enough")).state, [*note("stop"), stop, store, leave])
    assert ledger.waive() == [*note("one"), *note("stop"), stop, leave]
    assert ledger.due is None
    assert ledger.kept is start, "it is not in the store"
    assert ledger.add(job.exits("actor", 1, by=TERM, asked=TERM).state, note("end")) == []


@examples(40)
@given(st.integers(0, 2**32), st.data())
def test_in_any_order_of_steps_and_writes_each_command_is_done_once_and_nothing_too_early(
    seed: int, data: st.DataObject
) -> None:
    """Writes take their time: what is written is a state that was due when the write began."""
    states = RandomWalk(seed).states(40)
    ledger = Ledger(states[0])
    done: list[int] = []
    under_way: int | None = None
    kept = 0

    def do(commands: list[Command]) -> None:
        for command in commands:
            assert isinstance(command, Record)
            number = int(command.text)
            assert number <= kept or not urgent(states[kept], states[number]), "it is not in the store"
            done.append(number)

    def due() -> int:
        return next(number for number, state in enumerate(states) if state is ledger.due)

    for number, state in enumerate(states):
        do(ledger.add(state, note(str(number))))
        if under_way is not None and data.draw(st.booleans()):
            kept, under_way = under_way, None
            do(ledger.written(states[kept]))
        if under_way is None and ledger.due is not None:
            under_way = due()
    while ledger.due is not None:
        kept = due()
        do(ledger.written(states[kept]))
    assert done == list(range(len(states)))
