from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import groupby, takewhile
from types import FrameType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unirun.roles.gloo
from tests.waiting import WAIT_TIMEOUT
from unirun.roles.gloo import (
    BUSY,
    SETTLE_TIMEOUT,
    SOCKETS_POLL_INTERVAL,
    STALLED_BYTES_TIMEOUT,
    STUCK_TIMEOUT,
    WORKER_IDLE_TIMEOUT,
    GlooGroup,
    _settle,
    blocked,
    forgotten,
    idleness,
    in_group,
    processor_time,
    stillness,
    wait_until_idle,
    wait_until_stuck,
)
from unirun.roles.process_groups import dist, process_groups

pytestmark = pytest.mark.leaves


@pytest.mark.parametrize("moves", [True, False])
def test_what_never_comes_to_rest_is_waited_for_as_long_as_the_rest(
    monkeypatch: pytest.MonkeyPatch, *, moves: bool
) -> None:
    """A peer may send on and on, and be read; or what it has sent is never read."""
    ours, theirs = socket.socketpair()
    theirs.send(b"x")
    now, read, mine = 0.0, False, threading.get_ident()

    def sleep(seconds: float) -> None:
        nonlocal now, read
        if threading.get_ident() != mine:
            # A group of a test before may still be watched.
            time.sleep(seconds)
            return
        now += seconds
        assert now < 2 * SETTLE_TIMEOUT
        if moves:
            read = not read
            assert ours.recv(1) if read else theirs.send(b"x")

    monkeypatch.setattr(unirun.roles.gloo, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    _settle({ours.fileno(): os.fstat(ours.fileno()).st_ino})
    expected = SETTLE_TIMEOUT if moves else STALLED_BYTES_TIMEOUT
    assert now == pytest.approx(expected, abs=2 * SOCKETS_POLL_INTERVAL)
    ours.close()
    theirs.close()


class TestStillness:
    def test_one_call_lasts_after_its_time(self) -> None:
        still = stillness()
        told = [still.lasts("here", now / 10) for now in range(13)]
        assert told == [now / 10 > STUCK_TIMEOUT for now in range(13)]

    @given(st.lists(st.sampled_from(["here", "there", None]), max_size=40))
    def test_the_time_begins_anew_with_each_other_call(self, calls: list[str | None]) -> None:
        still = stillness()
        for number, call in enumerate(calls):
            same = [*takewhile(lambda each: each == call, reversed(calls[: number + 1]))]  # noqa: B023 - used at once
            lasts = call is not None and (len(same) - 1) * 0.3 > STUCK_TIMEOUT
            assert still.lasts(call, number * 0.3) == lasts


class TestIdleness:
    def test_a_process_that_does_nothing_is_idle_after_its_time(self) -> None:
        idle = idleness()
        told = [idle.lasts(5.0, now) for now in range(round(WORKER_IDLE_TIMEOUT) + 3)]
        assert told == [now > WORKER_IDLE_TIMEOUT for now in range(round(WORKER_IDLE_TIMEOUT) + 3)]

    def test_one_that_computes_is_not_however_long_it_takes(self) -> None:
        idle = idleness()
        assert not any(idle.lasts(now * 0.1, now) for now in range(1000))

    def test_its_time_begins_anew_when_it_has_computed(self) -> None:
        idle = idleness()
        idle.lasts(0.0, 0.0)
        assert not idle.lasts(BUSY * WORKER_IDLE_TIMEOUT * 2, WORKER_IDLE_TIMEOUT - 1)
        assert not idle.lasts(BUSY * WORKER_IDLE_TIMEOUT * 2, 2 * WORKER_IDLE_TIMEOUT - 2)
        assert idle.lasts(BUSY * WORKER_IDLE_TIMEOUT * 2, 2 * WORKER_IDLE_TIMEOUT)


@pytest.mark.starts_processes
def test_the_processor_time_of_a_child_counts() -> None:
    before = processor_time()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert processor_time() >= before + 0.3


@pytest.mark.starts_processes
def test_the_processor_time_of_an_agent_of_rpc_that_polls_does_not_count() -> None:
    code = """
import time
from unirun.roles.transport.torch_rpc import RpcAgent
from unirun.roles.gloo import BUSY, processor_time
from unirun.values import WorkerId

agent = RpcAgent(WorkerId("a", 0, 0), lambda worker: 0, 1, polls=True)
agent.start()
begun, before = time.process_time(), processor_time()
while (polled := time.process_time() - begun) < 0.5:
    time.sleep(0.01)
assert processor_time() - before < polled * 0.2, processor_time() - before
agent.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_TIMEOUT)


@pytest.mark.parametrize("relevant", [True, False])
def test_a_main_thread_that_keeps_its_role_waiting_is_found_with_its_stack(
    monkeypatch: pytest.MonkeyPatch, relevant: bool
) -> None:
    monkeypatch.setattr(unirun.roles.gloo, "WORKER_IDLE_TIMEOUT", 0.2)
    monkeypatch.setattr(unirun.roles.gloo, "BUSY", 1.0)
    found: list[str | None] = []
    deadline = time.monotonic() + WAIT_TIMEOUT
    watcher = threading.Thread(
        target=lambda: found.append(
            wait_until_idle(lambda: relevant and time.monotonic() < deadline, lambda: True)
        )
    )
    watcher.start()
    watcher.join(WAIT_TIMEOUT)
    assert [stack is not None and "watcher.join" in stack for stack in found] == [relevant]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=6))
def test_only_time_that_counts_without_a_break_makes_a_process_idle(periods: list[tuple[bool, int]]) -> None:
    clock = SimpleNamespace(now=0.0)
    seconds = [counts for counts, length in periods for _ in range(length)]

    def sleep(pause: float) -> None:
        clock.now += pause

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unirun.roles.gloo, "processor_time", lambda: 0.0)
        time_there = SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
        patch.setattr(unirun.roles.gloo, "time", time_there)
        stack = wait_until_idle(lambda: clock.now < len(seconds), lambda: seconds[int(clock.now)])
    longest = max((len([*group]) for counts, group in groupby(seconds) if counts), default=0)
    # The first second in which it is looked at tells only what it has used so far.
    assert (stack is not None) == (longest > WORKER_IDLE_TIMEOUT + 1)


@pytest.fixture
def ranks() -> Iterator[list[torch.distributed.ProcessGroup]]:
    """The groups of two ranks that have met."""
    process_groups()
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        met = [
            pool.submit(dist.ProcessGroupGloo, store, rank, 2, timedelta(seconds=WAIT_TIMEOUT))
            for rank in range(2)
        ]
        yield [each.result(WAIT_TIMEOUT) for each in met]


def test_a_wait_in_users_code_for_a_peer_that_does_nothing_is_found_with_its_stack(
    ranks: list[torch.distributed.ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unirun.roles.gloo, "STUCK_TIMEOUT", 0.1)
    monkeypatch.setattr(unirun.roles.gloo, "STACK_SAMPLE_INTERVAL", 0.02)
    waiting, peer = ranks
    deadline = time.monotonic() + WAIT_TIMEOUT

    def watch() -> str | None:
        stack = wait_until_stuck(lambda: time.monotonic() < deadline, in_group)
        peer.send([torch.ones(1)], 0, 0).wait()
        return stack

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(watch)
        received = torch.zeros(1)
        work = waiting.recv([received], 1, 0)
        work.wait()
        assert received.item() == 1
        assert "work.wait()" in (found.result(WAIT_TIMEOUT) or "")


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """No garbage collection may begin while frames are read, as CPython 3.11 could hang for ever."""
    found, frames = [], sys._current_frames

    def look() -> dict[int, FrameType]:
        found.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", look)
    (gc.enable if collects else gc.disable)()
    try:
        wait_until_stuck(lambda: False, in_group)
        assert (found, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable()


def test_a_thread_that_computes_in_one_call_is_not_blocked() -> None:
    frame = sys._getframe()
    before, used = blocked(frame), time.thread_time()
    while time.thread_time() < used + 0.01:
        pass
    assert blocked(frame) not in (None, before)


def test_a_wait_of_pythons_own_library_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unirun.roles.gloo, "STUCK_TIMEOUT", 0.02)
    monkeypatch.setattr(unirun.roles.gloo, "RELEVANCE_CHECK_INTERVAL", 0.02)
    monkeypatch.setattr(unirun.roles.gloo, "STACK_SAMPLE_INTERVAL", 0.005)
    found: list[str | None] = []
    over = threading.Event()
    watcher = threading.Thread(
        target=lambda: found.append(wait_until_stuck(lambda: not over.is_set(), blocked))
    )
    watcher.start()
    over.wait(0.2)
    over.set()
    watcher.join(WAIT_TIMEOUT)
    assert found == [None]


class TestForgotten:
    @pytest.fixture
    def group(self) -> GlooGroup:
        """A group that has ended."""
        group = GlooGroup("actor", 2, lambda: True)
        group.end()
        until = group.until
        group.end()
        assert group.until == until, "it has ended once"
        return group

    @pytest.mark.parametrize(
        ("name", "late", "retired", "expected"),
        [
            pytest.param("actor", 0, False, True, id="not over"),
            pytest.param("actor", 0, True, False, id="over"),
            pytest.param("critic", 0, False, False, id="of another group"),
            pytest.param("actor", 1, False, False, id="of the next group of this name"),
            pytest.param("actor", -1 << 50, False, False, id="of the group before"),
        ],
    )
    def test_a_collective_of_a_group_that_has_ended_and_is_not_over_is_forgotten(
        self,
        group: GlooGroup,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        late: int,
        retired: bool,
        expected: bool,
    ) -> None:
        entry = {"process_group": [name, ""], "time_created_ns": group.until + late, "retired": retired}
        dump = json.dumps({"entries": [entry]}).encode()
        monkeypatch.setattr(unirun.roles.gloo._native, "_dump_fr_trace_json", lambda: dump)
        assert forgotten([group]) is expected

    def test_without_a_recorder_nothing_is_known(
        self, group: GlooGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unirun.roles.gloo._native, "_dump_fr_trace_json", lambda: b"{}")
        assert not forgotten([group])

    def test_torch_says_which_collectives_are_not_over(
        self, ranks: list[torch.distributed.ProcessGroup]
    ) -> None:
        group = GlooGroup("", 2, lambda: True)
        first, second = ranks
        work = first.allreduce([torch.zeros(1)])
        group.end()
        assert forgotten([group])
        second.allreduce([torch.zeros(1)]).wait()
        work.wait()
        # It is noted a moment after the wait has ended.
        deadline = time.monotonic() + WAIT_TIMEOUT
        while forgotten([group]) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not forgotten([group])
