"""The collectives of a worker as its sampler sees them, and its stacks as the agent reads them."""

from __future__ import annotations

import asyncio
import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.launcher.agent import TORCH, Agent, worker
from tests.waiting import eventually
from unirun.failover.stacks import parsed
from unirun.launcher import sampler
from unirun.launcher.events import AgentState, FromSpawner, Hung, Phase, ToMaster, ToSpawner
from unirun.launcher.hangs import ProgressWatch, innermost, progress_of, steps_again
from unirun.launcher.imported import C10D
from unirun.launcher.sampler import (
    WINDOW_SECONDS,
    Sampler,
    arrivals_in,
    as_text,
    members,
    recorded,
    waits_in,
    with_the_first_group,
)
from unirun.observe.jobdir import JobDir
from unirun.values import WorkerId
from unirun.wire.messages import EndHung, FollowSteps, StopWorkers
from unirun.wire.progress import (
    EVIDENCE,
    LAST,
    PAGE_BYTES,
    PAGE_NAME,
    TEXT_LIMIT,
    Page,
    Snapshot,
    read_page,
)
from unirun.wire.reports import Arrivals, Kill, Late, Message, Notice, Reaped, StepsAgain, Wait, WorkerExited

WHO = WorkerId("actor", 1, 0)


def entry(
    number: int, *, retired: bool = False, group: str = "0", described: str = "default_pg", **about: Any
) -> Any:
    """An entry of torch's flight recorder."""
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": [group, described],
        "profiling_name": "gloo:all_reduce",
        "retired": retired,
        "state": "scheduled",
        **about,
    }


class TestWaits:
    def test_the_first_collective_of_each_group_that_is_not_over_is_the_one_that_is_waited_for(self) -> None:
        entries = [entry(3, retired=True), entry(4), entry(5), entry(1, group="4", described="tensor")]
        assert waits_in({"entries": entries}, {"0": "", "4": "0,2"}) == [
            Wait("default_pg", 4, "all_reduce"),
            Wait("tensor", 1, "all_reduce", "0,2"),
        ]

    def test_a_group_without_a_name_has_its_number_and_perhaps_unknown_ranks(self) -> None:
        unnamed = [entry(1, group="7", described="undefined")]
        assert waits_in({"entries": unnamed}, {"7": "?"}) == [Wait("group 7", 1, "all_reduce", "?")]

    def test_those_of_a_group_that_has_ended_do_not_count(self) -> None:
        left = entry(1, group="1"), entry(7)
        assert waits_in({"entries": left}, {"0": ""}) == [Wait("default_pg", 7, "all_reduce")]
        later = [entry(1, retired=True), entry(2, retired=True), entry(3)]
        assert waits_in({"entries": [*left, *later[:1]]}, {"0": ""}) == []
        assert waits_in({"entries": [*left, *later]}, {"0": ""}) == [Wait("default_pg", 3, "all_reduce")]
        assert waits_in({"entries": [entry(1), *later]}, {"0": ""}) == [Wait("default_pg", 3, "all_reduce")]

    def test_those_of_a_group_that_has_ended_do_not_count_for_a_later_one_that_has_begun_fewer(self) -> None:
        left = {"entries": [entry(6, retired=True), entry(7)]}
        assert [waits_in(left, {"0": ""}, {"0": count}) for count in (0, 6)] == [[], []]
        for latest in ({"0": 7}, {"1": 0}, {}):
            assert waits_in(left, {"0": ""}, latest) == [Wait("default_pg", 7, "all_reduce")]

    def test_each_backend_of_a_group_counts_and_a_group_with_one_has_a_latest_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Backend:
            def __init__(self, count: int | None) -> None:
                self.count = count

            def _get_sequence_number_for_group(self) -> int:
                if self.count is None:
                    raise RuntimeError("Backend fake does not yet support sequence numbers.")
                return self.count

        class Group:
            def __init__(self, name: str, **backends: Backend) -> None:
                self.group_name, self._device_types = name, [*backends]
                self._get_backend = backends.__getitem__

        gloo, nccl, silent = Backend(4), Backend(7), Backend(None)
        groups = {
            Group("0", cpu=gloo, cuda=gloo): "cpu:gloo,cuda:gloo",
            Group("1", cpu=gloo, cuda=nccl): "cpu:gloo,cuda:nccl",
            Group("2", cuda=nccl): "cuda:nccl",
            Group("3", cpu=gloo, cuda=silent): "cpu:gloo,cuda:fake",
            Group("4", cuda=silent): "cuda:fake",
        }
        world = SimpleNamespace(pg_map={**groups, object(): ""}, pg_backend_config=groups)
        monkeypatch.setattr(sampler, "_world", lambda: world)
        assert dict(sampler.begun()) == {"0": 4, "1": 11, "2": 7, "3": 4}
        assert sampler.latest() == {"0": 4, "2": 7}
        monkeypatch.setattr(sampler, "_world", lambda: None)
        assert sampler.latest() == {}

    def test_those_of_a_large_group_fit_into_a_page_without_its_ranks(self) -> None:
        large = ",".join(map(str, range(0, 10_000, 2)))
        assert as_text([Wait("data", 1, "all_reduce", large)]) == '[["data", 1, "all_reduce", "?"]]'
        many = [Wait("g" * 100, number, "o" * 100, large) for number in range(99)]
        assert len(as_text(many)) < TEXT_LIMIT

    def test_what_is_completed_and_what_is_sent_to_one_rank_does_not_count(self) -> None:
        assert waits_in({"entries": [entry(1, state="completed"), entry(2, is_p2p=True)]}, {}) == []

    def test_those_of_nccl_are_in_a_recorder_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A group may have both backends, and each counts by itself."""
        nccl = entry(3, group="4", described="tensor") | {"profiling_name": "nccl:all_gather"}
        records = [
            {"entries": [entry(4), entry(9, group="4", retired=True)]},
            {"entries": [nccl], "nccl": "2.27"},
        ]
        native = SimpleNamespace(
            _dump_fr_trace_json=lambda: json.dumps(records[0]).encode(),
            _dump_nccl_trace_json=lambda: json.dumps(records[1]).encode(),
        )
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", native)
        assert recorded()["nccl"] == "2.27"
        assert waits_in(recorded(), {"0": "", "4": "0,2"}) == [
            Wait("default_pg", 4, "all_reduce"),
            Wait("tensor", 3, "all_gather", "0,2"),
        ]

    def test_without_torch_there_is_none(self) -> None:
        assert waits_in({}, members()) == []


def test_the_arrivals_of_a_window_are_those_of_the_busiest_group() -> None:
    def begun(number: int, at: float, **about: Any) -> Any:
        return entry(number, retired=True, time_created_ns=int(at * 1e9), **about)

    entries = [begun(number, 10.0 + number / 10) for number in range(40)]
    others = [begun(1, 12.0, group="4"), begun(7, 12.0, is_p2p=True, group="4")]
    ((group, ranks, times),) = arrivals_in({"entries": [*others, *entries]}, {"0": ""}, 11.0, 13.0)
    assert (group, ranks) == ("0", "")
    assert times == tuple((number, 10.0 + number / 10) for number in range(10, 30))
    # Of many, all ranks tell the same part.
    many = {"entries": [begun(number, 11.0 + number / 1000) for number in range(1000)]}
    ((_, unknown, some),) = arrivals_in(many, {}, 11.0, 13.0)
    assert unknown == "?"
    assert [number for number, _ in some] == list(range(0, 1000, 31))
    assert list(arrivals_in(many, {}, 20.0, 30.0)) == []


class TestTheSampler:
    @pytest.fixture
    def number(self) -> Iterator[int]:
        number = os.memfd_create(PAGE_NAME)
        os.ftruncate(number, PAGE_BYTES)
        yield number
        os.close(number)

    def test_it_counts_collectives_and_looks_at_the_waits_of_a_rank_that_stands_still(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts = {"0": 5}
        monkeypatch.setattr(sampler, "begun", lambda: counts.items())
        monkeypatch.setattr(sampler, "recorded", lambda: {"entries": [entry(6)]})
        monkeypatch.setattr(sampler, "members", lambda: {"0": ""})
        page = Page(mmap.mmap(number, PAGE_BYTES))
        sampling = Sampler(page, 8.0, tmp_path)
        sampling.look(100.0)
        counts["0"] = 6
        sampling.look(101.0)
        sampling.look(102.0)
        found = read_page(number)
        assert (found.collectives, found.text) == (6, "")

        sampling.look(103.1)
        assert progress_of(WHO, read_page(number)).waits == (Wait("default_pg", 6, "all_reduce"),)

        counts["0"] = 7
        sampling.look(104.0)
        assert progress_of(WHO, read_page(number)).waits == ()

        # A group ends, another one begins to count.
        for groups, begun in (({}, 8), ({"1": 3}, 11), ({"1": 3, "2": 1}, 12), ({"1": 3}, 13)):
            counts.clear()
            counts.update(groups)
            sampling.look(105.0)
            assert read_page(number).collectives == begun

    def test_without_a_time_out_it_looks_rarely_and_again_while_the_rank_waits(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entries = [entry(6)]
        monkeypatch.setattr(sampler, "begun", lambda: {"0": 6}.items())
        monkeypatch.setattr(sampler, "recorded", lambda: {"entries": entries})
        monkeypatch.setattr(sampler, "members", lambda: {"0": ""})
        monkeypatch.setattr(sampler, "open_link", lambda _: pytest.fail("times of arrival are told"))
        sampling = Sampler(Page(mmap.mmap(number, PAGE_BYTES)), 0.0, tmp_path)
        assert sampling._interval >= 5.0
        waits = []
        for now in (100.0, 114.0, 116.0, 120.0, 131.0, 150.0):
            if now == 120.0:
                entries[:] = [entry(6, retired=True)]
            sampling.look(now)
            waits.append(len(progress_of(WHO, read_page(number)).waits))
        assert waits == [0, 0, 1, 1, 0, 0]
        assert (read_page(number).beat, read_page(number).collectives) == (0, 6)

    def test_the_arrivals_of_each_window_are_told_once_when_it_is_over(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, told = 6000.0, list[Arrivals]()
        entries: list[dict[str, Any]] = []
        clock = SimpleNamespace(time=lambda: now, monotonic=lambda: now, monotonic_ns=lambda: int(now * 1e9))
        monkeypatch.setattr(sampler, "time", clock)
        monkeypatch.setattr(sampler, "begun", lambda: {"0": len(entries)}.items())
        monkeypatch.setattr(sampler, "recorded", lambda: {"entries": entries})
        monkeypatch.setattr(sampler, "members", lambda: {"0": ""})
        monkeypatch.setattr(sampler, "open_link", lambda _: SimpleNamespace(send=told.append))
        sampling = Sampler(Page(mmap.mmap(number, PAGE_BYTES)), 60.0, tmp_path)
        while now < 6000.0 + 4.5 * WINDOW_SECONDS:
            entries.append({**entry(len(entries) + 1), "time_created_ns": int(now * 1e9)})
            now += 5.0
            sampling.look(now)
            sampling.look(now)
        first = int(6000.0 / WINDOW_SECONDS)
        assert [each.window for each in told] == [first + past for past in range(4)]
        for each in told:
            began = each.window * WINDOW_SECONDS
            assert [at for _, at in each.times] == [began + 5.0 * place for place in range(6)]

    def test_without_torchs_numbers_a_rank_is_not_judged(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def begun() -> NoReturn:
            raise AttributeError("torch has another name for it")

        monkeypatch.setattr(sampler, "begun", begun)
        sampling = Sampler(Page(mmap.mmap(number, PAGE_BYTES)), 0.1, tmp_path)
        sampling.start()
        eventually(lambda: read_page(number).allowed > 0, "the sampler has given up")
        sampling.stop()
        assert "torch has another name for it" in capsys.readouterr().err
        assert progress_of(WHO, read_page(number)).mute == 0.0

    def test_it_writes_what_the_flight_recorder_has_when_it_is_asked_to(
        self, number: int, tmp_path: Path
    ) -> None:
        page = Page(mmap.mmap(number, PAGE_BYTES))
        page.fields[EVIDENCE] = 1
        Sampler(page, 8.0, tmp_path).look(1.0)
        assert (tmp_path / "flight_recorder.json").read_text().startswith("{")
        assert read_page(number).evidence == 0


class TestTheFirstGroup:
    @pytest.fixture
    def c10d(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """A module in the place of torch's, and the starts."""
        (tmp_path / "c10d.py").write_text("formed = []\n_update_default_pg = formed.append\n")
        (tmp_path / "other_c10d.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sampler, "C10D", "c10d")
        finders = sys.meta_path[:]
        yield []
        sys.meta_path[:] = finders
        for name in ("c10d", "other_c10d"):
            sys.modules.pop(name, None)

    def test_it_is_noticed_once_and_not_in_a_fork(
        self, c10d: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with_the_first_group(lambda: c10d.append("started"))
        module = importlib.import_module("c10d")
        assert c10d == []
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: 1)
            with_the_first_group(lambda: c10d.append("started by the parent"))
        module._update_default_pg("group")
        module._update_default_pg(None)
        assert c10d == ["started"]
        assert module.formed == ["group", None]

    def test_a_library_that_keeps_or_wraps_the_function_keeps_what_it_has(self, c10d: list[str]) -> None:
        with_the_first_group(lambda: c10d.append("started"))
        module = importlib.import_module("c10d")
        kept = module._update_default_pg

        def wrapped(group: str | None) -> None:
            c10d.append("wrapped")
            kept(group)

        setattr(module, sampler.FORMED, wrapped)
        module._update_default_pg("group")
        kept(None)
        module._update_default_pg("another")
        assert c10d == ["wrapped", "started", "wrapped"]

    def test_a_thread_that_cannot_be_started_is_no_error_of_the_script(self, c10d: list[str]) -> None:
        def start() -> NoReturn:
            raise RuntimeError("can't start new thread")

        with_the_first_group(start)
        module = importlib.import_module("c10d")
        module._update_default_pg("group")
        assert module.formed == ["group"]

    def test_a_torch_without_that_function_is_left_alone(
        self, c10d: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampler, "C10D", "other_c10d")
        with_the_first_group(lambda: c10d.append("started"))
        assert not hasattr(importlib.import_module("other_c10d"), "_update_default_pg")

    def test_torch_has_the_function(self) -> None:
        assert hasattr(importlib.import_module(C10D), sampler.FORMED)


def test_a_text_that_is_half_written_says_nothing() -> None:
    number = os.memfd_create(PAGE_NAME)
    os.ftruncate(number, PAGE_BYTES)
    Page(mmap.mmap(number, PAGE_BYTES)).write('[["default_pg", 6, "all_re')
    assert progress_of(WHO, read_page(number)).waits == ()
    os.close(number)


STACKS = """\
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 20 in step
  File "/home/me/train.py", line 40 in <module>
"""


def test_a_rank_is_where_its_main_thread_is_in_the_users_code() -> None:
    assert innermost(parsed(STACKS)) == "/home/me/train.py:20 in step"
    assert innermost(parsed(STACKS.replace("/home/me/", "/x/site-packages/"))).startswith(
        "/venv/lib/python3.11/site-packages/"
    )
    assert innermost(()) == ""


def test_a_role_goes_on_at_the_first_step_of_any_rank_and_had_come_to_the_furthest() -> None:
    def reported(first: int, before: int) -> Snapshot:
        return replace(read, first=first, before=before)

    read = Snapshot(*range(13))
    assert steps_again([reported(50, -1), reported(48, 56)], 57) == (48, 57)
    # The survivors know how far they were, though the rank that is lost has told nobody.
    assert steps_again([reported(50, -1), reported(50, 56)], -1) == (50, 56)
    assert steps_again([reported(50, -1)], -1) is None
    assert steps_again([], 57) is None


class TestTheAgent:
    """An agent with a worker, which is this process."""

    @pytest.fixture
    def number(self) -> Iterator[int]:
        number = os.memfd_create(PAGE_NAME)
        os.ftruncate(number, PAGE_BYTES)
        yield number
        os.close(number)

    def watch(self, number: int, **about: float) -> tuple[ProgressWatch, list[Message], list[Hung]]:
        told: list[Message] = []
        ended: list[Hung] = []
        spec = Job({"actor": 2}).state.spec
        roles = tuple(replace(role, **about) for role in spec.roles)
        live = replace(worker(1, "actor", 1), phase=Phase.ALIVE, pid=os.getpid(), running=True)
        state = AgentState("n0").with_worker(live)
        watch = ProgressWatch(
            JobDir(Path()), replace(spec, roles=roles), lambda: state, told.append, ended.append
        )
        watch.announced(1, number)
        return watch, told, ended

    def test_it_tells_the_master_of_a_late_rank_and_again_after_a_while(self, number: int) -> None:
        with mmap.mmap(number, PAGE_BYTES) as memory:
            page = Page(memory)
            page.step(4)
            watch, told, _ = self.watch(number, hang_timeout=5.0)
            now = time.monotonic()
            watch.look(now)
            assert told == []
            page.fields[LAST] -= int(6e9)
            for tenth in range(1, 16):
                watch.look(now + tenth / 10)
            assert told == [Late("n0", "actor"), Late("n0", "actor")]
            watch.led()
            watch.look(now + 1.6)
            assert len(told) == 3, "another master is not told"
            watch.close()
            page.fields.release()

    def test_a_wait_is_late_after_a_minute_or_thrice_the_longest_one_before(
        self, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with mmap.mmap(number, PAGE_BYTES) as memory:
            page, now = Page(memory), time.monotonic()
            watch, told, _ = self.watch(number)
            wait, late = as_text([Wait("default_pg", 7, "all_reduce")]), []
            clock = [now]
            monkeypatch.setattr(time, "monotonic_ns", lambda: int(clock[0] * 1e9))
            # It computes for half an hour, which is no wait. Then it waits, each time for longer.
            for minutes, text in ((30, ""), (0.3, wait), (2, wait), (5, wait), (16, wait)):
                page.fields[LAST] = time.monotonic_ns()
                page.write(text)
                for _ in range(2):
                    before = len(told)
                    watch.look(now := now + 11.0)
                    watch._looked = now + 10.0
                    clock[0] += minutes * 60
                late.append(len(told) - before)
            assert late == [0, 0, 1, 0, 1]
            watch.close()
            page.fields.release()

    def test_a_time_in_which_the_agent_does_not_run_is_no_time_of_the_ranks(self, number: int) -> None:
        with mmap.mmap(number, PAGE_BYTES) as memory:
            page = Page(memory)
            page.step(4)
            page.fields[LAST] -= int(6e9)
            watch, told, _ = self.watch(number, hang_timeout=5.0)
            now = time.monotonic()
            watch.look(now + 7.0)
            watch.look(now + 7.1)
            assert told == []
            watch.close()
            page.fields.release()

    def test_it_tells_the_master_where_a_role_goes_on_and_when_it_has_caught_up(self, number: int) -> None:
        with mmap.mmap(number, PAGE_BYTES) as memory:
            page = Page(memory)
            watch, told, _ = self.watch(number)

            async def follows() -> None:
                order = FollowSteps("actor", 1, 57, 60.0)
                for step in (50, 57, 58):
                    task = asyncio.ensure_future(watch.follow(order))
                    page.step(step)
                    await asyncio.sleep(0.1)
                    task.cancel()

            asyncio.run(follows())
            first = StepsAgain("n0", "actor", 1, 50, 57, past=False)
            assert told == [first, first, replace(first, past=True)]
            assert watch.step_of(1) == 58
            watch.close()
            page.fields.release()

    def test_a_page_that_was_announced_before_its_process_was_known_is_opened_when_it_is(
        self, number: int
    ) -> None:
        starting = replace(worker(1, "actor", 1), phase=Phase.ALIVE, pid=None, running=True)
        states = [AgentState("n0").with_worker(starting)]
        spec = Job({"actor": 2}).state.spec
        watch = ProgressWatch(JobDir(Path()), spec, lambda: states[-1], lambda _: None, lambda _: None)
        watch.announced(1, number)
        assert watch.step_of(1) == -1
        states.append(AgentState("n0").with_worker(replace(starting, pid=os.getpid())))
        watch.open(1)
        assert watch.step_of(1) == 0
        watch.close()

    def test_the_page_of_a_worker_that_has_ended_is_closed(self, number: int) -> None:
        spec, there = Job({"actor": 2}).state.spec, AgentState("n0")
        live = replace(worker(1, "actor", 1), phase=Phase.ALIVE, pid=os.getpid(), running=True)
        states = [there.with_worker(live)]
        watch = ProgressWatch(JobDir(Path()), spec, lambda: states[-1], lambda _: None, lambda _: None)
        watch.announced(1, number)
        assert watch.step_of(1) == 0
        opened = len(os.listdir("/proc/self/fd"))
        states.append(there)
        watch.look(time.monotonic())
        assert len(os.listdir("/proc/self/fd")) == opened - 1
        assert watch.step_of(1) == -1

    def test_it_ends_a_rank_that_is_late_and_no_other(self, number: int) -> None:
        with mmap.mmap(number, PAGE_BYTES) as memory:
            page = Page(memory)
            page.step(4)
            watch, _, ended = self.watch(number, hang_timeout=5.0)
            watch.end(EndHung(WHO, "hangs"))
            page.fields[LAST] -= int(6e9)
            watch.end(EndHung(WHO._replace(incarnation=1), "hangs"))
            assert ended == []
            watch.end(EndHung(WHO, "hangs"))
            assert ended == [Hung(1, "hangs")]
            watch.close()
            page.fields.release()


def test_a_worker_that_makes_no_page_in_the_time_of_its_first_step_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, told, ended = Job({"actor": 2}).state.spec, list[Message](), list[Hung]()
    roles = tuple(replace(role, hang_timeout=5.0, first_step_timeout=20.0) for role in spec.roles)
    live = replace(worker(1, "actor", 1), phase=Phase.ALIVE, pid=os.getpid(), running=True)
    states = [AgentState("n0").with_worker(live)]
    watch = ProgressWatch(
        JobDir(Path()), replace(spec, roles=roles), lambda: states[-1], told.append, ended.append
    )
    now = time.monotonic()
    clock = [now]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for second in (0.0, 0.1, 19.9, 20.0):
        clock[0] = now + second
        watch.look(clock[0] if second < 1 else watch._looked + 0.1)
        watch.end(EndHung(WHO, "hangs"))
        assert bool(told) == bool(ended) == (second >= 20.0)
    states.append(AgentState("n0").with_worker(replace(live, sent=15)))
    told.clear()
    clock[0] = now + 100.0
    watch.look(watch._looked + 10.0)
    assert told == []


def test_a_worker_that_hangs_is_killed_with_the_reason() -> None:
    agent = Agent(spawners={TORCH: True}).alive().on(Hung(1, "hangs: no progress for 9.0 s"))
    why = "hangs: no progress for 9.0 s"
    assert agent.commands == [ToMaster(Notice("actor:0", why)), ToSpawner(TORCH, Kill(1, 9))]
    # Its peers fail, and the role is told to end: that is not why this one ends.
    assert ToSpawner(TORCH, Kill(1, 15)) not in agent.on(StopWorkers("actor", (0, 1), 15, 30.0)).commands
    agent.on(FromSpawner(TORCH, Reaped(1, 5.0, None, 9)))
    ends = [each.message for each in agent.commands if isinstance(each, ToMaster)]
    assert [(each.cause, each.note) for each in ends if isinstance(each, WorkerExited)] == [
        ("hung", "hangs: no progress for 9.0 s")
    ]
