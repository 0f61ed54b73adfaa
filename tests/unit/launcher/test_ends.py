"""The ends of any number of workers fit into one message."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.launcher.agent import TORCH, Agent
from unirun.failover.state import MESSAGE, NOTE, TAIL, TRACEBACK
from unirun.launcher.events import (
    TAIL_LINES,
    WHOLE,
    AgentState,
    FromSpawner,
    LinkMessage,
    error_tail,
    fitting,
    holdings,
    short_error,
)
from unirun.values import WorkerId
from unirun.wire.aio import frame_of
from unirun.wire.frames import FrameReader, decode
from unirun.wire.reports import CallCount, HeldWorker, Join, Reaped, WorkerError, WorkerExited

TRACE = "Traceback (most recent call last)\n" + "é\x1b" * 150_000 + "\nValueError: in the end"
"""300 KB, and six times as much in JSON."""

ERROR = WorkerError("m" * 60_000, TRACE, 1.0)


def joined(state: AgentState) -> Join:
    """The `Join` that the next master gets."""
    workers, stores = holdings(state)
    frame = frame_of(Join("n0", 1, "host", {"actor": "127.0.0.1:29500"}, workers, stores))
    (payload,) = FrameReader().feed(frame)
    message = decode(payload)
    assert isinstance(message, Join)
    return message


def failed(rank: int, error: WorkerError) -> HeldWorker:
    """An ended worker with all fields of its exit set."""
    end = WorkerExited(WorkerId("actor", rank, 3), 1.0 + rank, 1, None, error=replace(error, time=1.0 + rank))
    addresses = {"socket": f"/home/someone/.local/state/unirun/jobs/{'j' * 63}/calls/actor.{rank}.3"}
    calls = (CallCount("critic", "evaluate_the_batch", 10**9, 10**12, 10**12, 123.4, ((0, 9999),)),)
    return HeldWorker(WorkerId("actor", rank, 3), 100_000 + rank, True, 3, addresses, True, True, end, calls)


def test_a_workers_error_is_cut_when_it_is_received() -> None:
    agent = Agent().alive(1).on(LinkMessage(1, ERROR))
    kept = agent.state.workers[1].error
    assert kept is not None
    assert len(kept.message) <= MESSAGE
    assert len(kept.traceback) <= TRACEBACK
    assert kept.traceback.endswith("ValueError: in the end")
    (told,) = agent.spawner(Reaped(1, 2.0, 1, None)).told(WorkerExited)
    assert told.error == kept


def test_the_tail_of_a_workers_stderr_is_cut() -> None:
    agent = Agent().alive(1)
    agent.on(FromSpawner(TORCH, Reaped(1, 2.0, None, 9), note="n" * 5000, tail="\x00" * 16_384 + "the end"))
    (told,) = agent.told(WorkerExited)
    assert told.tail.endswith("the end")
    assert len(frame_of(told)) < TAIL + NOTE + 500


def test_a_join_with_64_long_failures_shortens_none() -> None:
    agent = Agent().alive(64)
    for number in range(1, 65):
        agent.on(LinkMessage(number, ERROR)).spawner(Reaped(number, 2.0, 1, None))
    assert {each.exit.error for each in joined(agent.state).workers if each.exit} == {short_error(ERROR)}


def test_a_join_with_10_000_long_failures_fits_and_keeps_the_first_ones_whole() -> None:
    short = short_error(ERROR)
    ended = {WorkerId("actor", rank, 3): failed(rank, short) for rank in range(10_000)}
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


def test_a_join_keeps_live_and_successful_workers_unchanged() -> None:
    well = HeldWorker(WorkerId("actor", 0, 0), exit=WorkerExited(WorkerId("actor", 0, 0), 1.0, 0, None))
    short = short_error(ERROR)
    many = [failed(rank, short) for rank in range(1, 1000)]
    assert fitting([well, HeldWorker(WorkerId("actor", 1, 0)), *many])[:2] == (
        well,
        HeldWorker(WorkerId("actor", 1, 0)),
    )


def test_the_last_words_of_a_stderr_are_its_last_lines_or_the_stack_of_faulthandler() -> None:
    lines = [f"line {n}" for n in range(100)]
    assert error_tail("\n".join(lines)) == "\n".join(lines[-TAIL_LINES:])
    crash = [
        "Fatal Python error: Aborted",
        "",
        "Thread 2:",
        "  idle",
        "",
        "Current thread 1:",
        "  inner",
        "  outer",
    ]
    assert error_tail("\n".join([*lines, *crash])).splitlines() == [crash[0], *crash[-3:]]
    of_a_child = [line.replace("Aborted", "Bus error").replace("inner", "child") for line in crash]
    assert error_tail("\n".join([*of_a_child, *lines, *crash])).splitlines() == [crash[0], *crash[-3:]]
    assert error_tail("") == ""


def test_the_last_words_are_not_those_of_the_resource_tracker_that_cleans_up() -> None:
    code = "  warnings.warn('resource_tracker: There appear to be %d '"
    about = "/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker:"
    left = [f"{about} There appear to be 2 leaked {each} objects to clean up" for each in ("a", "b")]
    gone = [
        f"{about} '/psm_1': [Errno 2] No such file",
        "  warnings.warn('resource_tracker: %r: %s' % (name, e))",
    ]
    told = ["step 7", "step 8", left[0], code, left[1], code, *gone]
    assert error_tail("\n".join(told)) == "step 7\nstep 8"
    assert error_tail("\n".join(told[2:])) == ""
    assert error_tail(f"50% 3.2it/s]{left[0]}\n{code}") == "50% 3.2it/s]"
    died = f"{about} process died unexpectedly, relaunching"
    assert error_tail(f"{died}\n{left[0]}\n  warnings.warn(\n") == died
