"""How workers have ended is told in one message, however many they are and whatever they have said."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.launcher.agent import TORCH, Agent
from unirun.job.failures import MESSAGE, NOTE, TAIL, TRACEBACK
from unirun.launcher.ends import WHOLE, fitting, short_error
from unirun.launcher.events import FromSpawner, LinkMessage
from unirun.launcher.state import AgentState, holdings
from unirun.values import WorkerId
from unirun.wire import FrameReader, decode
from unirun.wire.aio import frame_of
from unirun.wire.reports import CallCount, Held, Join, Span, WorkerError, WorkerExited
from unirun.wire.spawning import Reaped

TRACE = "Traceback (most recent call last)\n" + "é\x1b" * 150_000 + "\nValueError: in the end"
"""300 KB, and six times as much in JSON."""

ERROR = WorkerError("m" * 60_000, TRACE, 1.0)


def joined(state: AgentState) -> Join:
    """What the next master gets."""
    workers, stores = holdings(state)
    frame = frame_of(Join("n0", 1, "host", {"actor": "127.0.0.1:29500"}, workers, stores))
    (payload,) = FrameReader().feed(frame)
    message = decode(payload)
    assert isinstance(message, Join)
    return message


def failed(rank: int, error: WorkerError) -> Held:
    """A worker that has ended, with everything that an agent may know of one."""
    end = WorkerExited(WorkerId("actor", rank, 3), 1.0 + rank, 1, None, error=replace(error, time=1.0 + rank))
    addresses = {"socket": f"/home/someone/.local/state/unirun/jobs/{'j' * 63}/calls/actor.{rank}.3"}
    calls = (CallCount("critic", "evaluate_the_batch", 10**9, 10**12, 10**12, 123.4, (Span(0, 9999),)),)
    return Held(WorkerId("actor", rank, 3), 100_000 + rank, True, 3, addresses, True, end, calls)


def test_what_a_worker_says_is_cut_when_it_is_taken_in() -> None:
    agent = Agent().alive(1).on(LinkMessage(1, ERROR))
    kept = agent.state.workers[1].error
    assert kept is not None
    assert len(kept.message) <= MESSAGE
    assert len(kept.traceback) <= TRACEBACK
    assert kept.traceback.endswith("ValueError: in the end")
    (told,) = agent.spawner(Reaped(1, 2.0, 1, None)).told(WorkerExited)
    assert told.error == kept


def test_the_last_lines_of_a_worker_are_cut_too() -> None:
    agent = Agent().alive(1)
    agent.on(FromSpawner(TORCH, Reaped(1, 2.0, None, 9), note="n" * 5000, tail="\x00" * 16_384 + "the end"))
    (told,) = agent.told(WorkerExited)
    assert told.tail.endswith("the end")
    assert len(frame_of(told)) < TAIL + NOTE + 500


def test_a_join_of_64_long_failures_has_all_that_is_kept_of_each() -> None:
    agent = Agent().alive(64)
    for number in range(1, 65):
        agent.on(LinkMessage(number, ERROR)).spawner(Reaped(number, 2.0, 1, None))
    assert {each.exit.error for each in joined(agent.state).workers if each.exit} == {short_error(ERROR)}


def test_a_join_of_10_000_long_failures_fits_and_tells_the_first_ones_whole() -> None:
    short = short_error(ERROR)
    ended = {("actor", rank, 3): failed(rank, short) for rank in range(10_000)}
    told = joined(AgentState("n0", ended=ended)).workers
    assert [replace(each, exit=None) for each in told] == [
        replace(each, exit=None) for each in ended.values()
    ]
    ends = [each.exit for each in told if each.exit is not None]
    assert len(ends) == 10_000
    whole = [end.worker.rank for end in ends if end.error and end.error.traceback == short.traceback]
    assert whole == [*range(WHOLE)]
    last = ends[-1].error
    assert last is not None
    assert last.traceback.endswith("ValueError: in the end")
    assert last.message.startswith("mmmm")


def test_workers_that_live_or_have_ended_well_are_left_as_they_are() -> None:
    well = Held("actor", 0, 0, exit=WorkerExited(WorkerId("actor", 0, 0), 1.0, 0, None))
    short = short_error(ERROR)
    many = [failed(rank, short) for rank in range(1, 1000)]
    assert fitting([well, Held(WorkerId("actor", 1, 0)), *many])[:2] == (well, Held(WorkerId("actor", 1, 0)))
