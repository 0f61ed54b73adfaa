"""torch's timers: each one that is not released in time is reported once, with its signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.timer import FileTimerClient, FileTimerRequest  # type: ignore[attr-defined]

from tests.unit.launcher.agent import KILL, TERM, Agent
from tests.unit.simulated_loop import SimulatedLoop
from tests.waiting import WAIT_TIMEOUT
from unirun.launcher import timers as timers_module
from unirun.launcher.events import Signal, TimerExpired
from unirun.launcher.timers import MANY, TimerPipe, TimerRequest, Timers
from unirun.wire.frames import from_json
from unirun.wire.reports import Notice, Reaped, WorkerExited


def request(scope: str, expires: float, *, pid: int = 7, signum: int = KILL) -> TimerRequest:
    return TimerRequest(1, pid, scope, expires, signum)


def running(*requests: TimerRequest) -> Timers:
    timers = Timers()
    for each in requests:
        timers.take(each)
    return timers


class TestTimers:
    def test_timers_expire_at_their_time(self) -> None:
        timers = running(request("a", 10.0), request("b", 20.0, pid=8))
        assert timers.until(4.0) == 6.0
        assert timers.expired(9.9) == []
        assert timers.expired(10.0) == [(7, ("a",), KILL)]
        assert timers.until(10.0) == 10.0

    def test_released_timers_do_not_expire(self) -> None:
        timers = running(request("a", 10.0), request("b", 10.0), request("a", -1.0, signum=0))
        assert timers.expired(11.0) == [(7, ("b",), KILL)]
        assert timers.until(11.0) is None

    def test_restarted_timers_have_their_new_time(self) -> None:
        timers = running(request("a", 10.0), request("a", 30.0))
        assert timers.expired(29.0) == []

    def test_timers_of_one_process_end_together_with_the_signal_of_the_first(self) -> None:
        timers = running(
            request("late", 12.0, signum=TERM),
            request("none", 9.0, signum=0),
            request("first", 10.0, signum=KILL),
            request("never", 99.0),
        )
        assert timers.expired(20.0) == [(7, ("none", "first", "late"), KILL)]
        assert timers.until(20.0) is None

    def test_timers_without_a_signal_have_no_consequence(self) -> None:
        wrong = (request(str(signum), 1.0, signum=signum) for signum in (0, -1, 65, 1 << 40))
        assert running(*wrong).expired(2.0) == []

    def test_timers_with_an_invalid_pid_are_ignored(self) -> None:
        assert running(*(request("a", 1.0, pid=pid) for pid in (0, -1, 1 << 40))).expired(2.0) == []

    def test_the_number_of_timers_is_bounded(self) -> None:
        timers = running(*(request(str(number), 1.0) for number in range(MANY + 10)))
        ((_, scopes, _),) = timers.expired(2.0)
        assert len(scopes) == MANY


def test_torchs_timer_requests_are_parsed() -> None:
    asked = FileTimerRequest(worker_pid=7, scope_id="batch", expiration_time=12.5, signal=signal.SIGTERM)
    assert from_json(TimerRequest, asked.to_json()) == request("batch", 12.5, signum=TERM)


def test_a_timer_pipe_takes_requests_of_torchs_client_and_ignores_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "timer"
    path.write_text("left by an agent before")

    async def main() -> None:
        expired: asyncio.Queue[object] = asyncio.Queue()
        pipe = TimerPipe(path, lambda *late: expired.put_nowait(late))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        client = FileTimerClient(str(path), signal=signal.SIGTERM)
        client.acquire("released", time.time() + 3600)
        with path.open("wb") as stranger:
            stranger.write(b"\xff\n{}\n[1]\n" + b"x" * 5000 + b"\n" + b'{"pid": 1e999}\n')
        client.release("released")
        client.acquire("held", time.time() + 0.01)
        assert await asyncio.wait_for(expired.get(), WAIT_TIMEOUT) == (os.getpid(), ("held",), TERM)
        pipe.close()
        assert expired.empty()

    asyncio.run(main())
    assert not path.exists()


MOVE = st.tuples(
    st.sampled_from(("hold", "hold", "release", "wait")),
    st.integers(7, 8),
    st.sampled_from("ab"),
    st.floats(0.1, 5.0),
)


@given(st.lists(MOVE, max_size=30))
def test_a_pipe_tells_of_each_late_process_once_and_wakes_for_the_next_timer_alone(
    moves: list[tuple[str, int, str, float]],
) -> None:
    loop, told = SimulatedLoop(), list[tuple[int, tuple[str, ...], int]]()
    running: dict[tuple[int, str], float] = {}

    async def begin(path: Path) -> TimerPipe:
        return TimerPipe(path, lambda *late: told.append(late))

    def alarms() -> int:
        scheduled: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
        return sum(not each.cancelled() for each in scheduled)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        clock: Any = SimpleNamespace(time=loop.time)
        patch.setattr(timers_module, "time", clock)
        pipe = loop.do(begin(Path(folder, "timer")))
        writer = os.open(Path(folder, "timer"), os.O_WRONLY)
        for move, pid, scope, seconds in moves:
            if move == "wait":
                loop.passes(seconds)
            else:
                end = loop.time() + seconds if move == "hold" else -1.0
                running.pop((pid, scope), None)
                if move == "hold":
                    running[pid, scope] = end
                asked = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": end, "signal": KILL}
                os.write(writer, json.dumps(asked).encode() + b"\n")
                loop.passes()
            late = {pid for (pid, _), end in running.items() if end <= loop.time()}
            assert sorted(each[0] for each in told) == sorted(late)
            told.clear()
            running = {key: end for key, end in running.items() if key[0] not in late}
            assert alarms() == bool(running)
        os.close(writer)
        pipe.close()
        assert alarms() == 0
        loop.close()


class TestAWorkerThatIsLate:
    def test_a_worker_with_an_expired_timer_gets_the_signal_and_a_note(self) -> None:
        agent = Agent().alive().on(TimerExpired(101, 101, ("batch",), KILL))
        assert Signal(101, KILL) in agent.commands
        (notice,) = agent.told(Notice)
        assert (notice.source, notice.text) == (
            "actor:0",
            "its timer 'batch' has expired: process 101 is sent SIGKILL",
        )
        (end,) = agent.spawner(Reaped(1, 2.0, None, KILL)).told(WorkerExited)
        assert (end.cause, end.sent, end.note) == ("own", None, "its timer 'batch' has expired")

    def test_a_worker_with_an_expired_timer_that_succeeds_has_no_note(self) -> None:
        agent = Agent().alive().on(TimerExpired(101, 101, ("batch",), TERM))
        (end,) = agent.spawner(Reaped(1, 2.0, 0, None)).told(WorkerExited)
        assert end.note == ""

    def test_an_expired_timer_may_be_that_of_a_workers_child_process(self) -> None:
        agent = Agent().alive().on(TimerExpired(555, 102, ("load",), TERM))
        assert Signal(555, TERM) in agent.commands
        assert agent.told(Notice)[0].source == "actor:1"

    def test_an_expired_timer_of_a_stranger_sends_no_signal(self) -> None:
        for session in (0, 77):
            agent = Agent().alive().on(TimerExpired(555, session, ("load",), KILL))
            assert not agent.has(Signal)
            assert "process 555, which belongs to no worker of this node" in agent.told(Notice)[0].text
