"""Profiles: what a worker does for one, in this process, and what the agent makes of py-spy's."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from msgspec.structs import replace

from tests.unit.launcher.agent import worker
from tests.unit.launcher.instant_loop import InstantLoop
from tests.waiting import eventually, eventually_async
from unirun import atomic
from unirun.launcher import profiler, profiling
from unirun.launcher.events import AgentState
from unirun.launcher.profiler import PROFILE, TRACE, folded, sampled
from unirun.launcher.profiling import PROFILE_POLL_INTERVAL, Profiling, counts_in
from unirun.launcher.requests import REQUEST_SIGNAL, await_requests, send_request
from unirun.wire.messages import Profile
from unirun.wire.reports import Message, Profiled


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of this process as a worker, which answers requests."""

    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    before = signal.getsignal(REQUEST_SIGNAL)
    await_requests(environ)
    yield tmp_path
    signal.signal(REQUEST_SIGNAL, before)


def ask(folder: Path, seconds: float) -> None:
    """Ask this process for a profile."""
    assert send_request(os.getpid(), str(folder), f"profile={seconds}") == ""


def test_a_stack_is_folded_by_functions_and_the_last_part_of_their_paths() -> None:
    frames = [("/home/me/train.py", "<module>"), ("/home/me/lib/model.py", "Net;x")]
    assert folded(frames, "MainThread") == "MainThread;<module> (me/train.py);Net:x (lib/model.py)"


def test_a_worker_records_operators_and_samples_its_threads_while_it_goes_on(folder: Path) -> None:
    ask(folder, 0.3)
    numbers, steps = torch.rand(64, 64), 0

    def written() -> bool:
        nonlocal steps
        numbers.mm(numbers)
        steps += 1
        return (folder / PROFILE).exists()

    eventually(written, "the profile is written")
    assert steps > 5
    result = json.loads((folder / PROFILE).read_bytes())
    assert result["without_trace"] == ""
    assert any("eventually (tests/waiting.py)" in stack for stack in result["stacks"])
    operators = [
        each["name"] for each in json.loads(gzip.decompress((folder / TRACE).read_bytes()))["traceEvents"]
    ]
    assert operators.count("aten::mm") > 5
    assert not [*folder.glob("draft*")]
    eventually(lambda: profiler._profile is None, "the next one may begin")


def test_a_profiler_of_the_program_is_left_alone(folder: Path) -> None:
    with torch.profiler.profile() as own:
        ask(folder, 0.05)
        torch.rand(8).sum()
        eventually(lambda: (folder / PROFILE).exists(), "the profile is written")
    assert "aten::sum" in {each.name for each in own.events()}
    result = json.loads((folder / PROFILE).read_bytes())
    assert result["without_trace"] == "the program has started torch's profiler itself"
    assert not (folder / TRACE).exists()
    eventually(lambda: profiler._profile is None, "the next one may begin")


@pytest.mark.parametrize("room", [-1, 0, 1 << 20])
def test_a_full_disk_costs_a_profile_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Stacks may have room where a trace has none. The draft of a trace leaves it."""

    def replace_(path: Path, content: bytes | str) -> None:
        if path.name == TRACE or len(content) > room or any(folder.glob("draft*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        atomic.replace(path, content)

    found = worker(1, "actor", 1)
    found = replace(found, pid=os.getpid(), request=replace(found.request, logs=str(folder), folder=""))
    told: list[Message] = []
    monkeypatch.setattr(profiling, "py_spy", lambda: None)
    monkeypatch.setattr(profiler, "atomic", SimpleNamespace(replace=replace_))
    profiles = Profiling(lambda: AgentState("n0", workers={1: found}), told.append)
    if room < 0:
        # Not even an empty file.
        ask(folder, 0.3)
        eventually(lambda: profiler._profile is not None, "it has begun")
    else:
        asyncio.run(profiles.profile(Profile("actor", 1, 0.1, 7)))
    eventually(lambda: profiler._profile is None, "the next one may begin")
    assert not torch._C._autograd._profiler_enabled()
    assert [path.name for path in folder.iterdir()] == ([] if room < 0 else [PROFILE])
    answer = told[0] if told else None
    assert (answer is None) == (room < 0)
    if isinstance(answer, Profiled) and room:
        assert (answer.problem, bool(answer.stacks)) == ("", True)
        assert answer.without_trace == "its trace cannot be written: No space left on device"
    elif isinstance(answer, Profiled):
        assert answer.problem == f"it cannot write to {folder}: is the disk full?"
    monkeypatch.undo()
    ask(folder, 0.05)
    eventually(lambda: (folder / PROFILE).exists(), "the next one is written")
    eventually(lambda: profiler._profile is None, "the next one may begin")


def test_a_rank_that_can_start_no_thread_goes_on_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fail)
        ask(folder, 0.05)
        assert (profiler._profile, torch._C._autograd._profiler_enabled()) == (None, False)
    written = json.loads((folder / PROFILE).read_text())
    assert written == {"stacks": {}, "without_trace": "there is no thread for it: can't start new thread"}
    (folder / PROFILE).unlink()
    ask(folder, 0.05)
    eventually(lambda: (folder / PROFILE).exists(), "the next one is written")
    eventually(lambda: profiler._profile is None, "the next one may begin")


def test_a_trace_that_torch_does_not_write_costs_no_stacks_and_no_later_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("Missing trace.")

    monkeypatch.setattr(torch.autograd.profiler.profile, "export_chrome_trace", fail)
    ask(folder, 0.05)
    eventually(lambda: profiler._profile is None, "the next one may begin")
    written = json.loads((folder / PROFILE).read_text())
    assert written["without_trace"] == "its trace cannot be written: Missing trace."


def test_all_threads_but_the_sampling_one_are_sampled() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="waiting")
    thread.start()
    began = time.monotonic()
    counts = sampled(0.05)
    over.set()
    thread.join()
    assert time.monotonic() - began >= 0.05
    roots = {stack.split(";")[0] for stack in counts}
    assert "waiting" in roots
    assert "MainThread" not in roots


def test_stacks_of_py_spy_are_without_the_start_of_the_worker_and_the_sampling_thread() -> None:
    text = (
        "thread (289): MainThread;main (unirun/launcher/boot.py:1);<module> (train.py:1);step (train.py:4) 7\n"
        "thread (290): unirun-profile;_run (unirun/launcher/profiler.py:9) 50\n"
        "thread (289): MainThread;<module> (train.py:1);step (train.py:4) 1\n"
        "no samples\n"
    )
    assert counts_in(text) == {"MainThread;<module> (train.py:1);step (train.py:4)": 8}


@pytest.mark.parametrize("seconds", [1.0, 120.0])
@pytest.mark.parametrize("late", [-1.0, 1.0])
def test_a_profile_is_waited_for_as_long_as_it_lasts_and_a_while(
    seconds: float, late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = worker(1, "actor", 1)
    found = replace(found, pid=77, request=replace(found.request, logs=str(tmp_path)))
    (tmp_path / found.request.folder).mkdir(parents=True)
    loop, told = InstantLoop(), list[Message]()
    monkeypatch.setattr(profiling, "send_request", lambda *_: "")
    monkeypatch.setattr(profiling, "py_spy", lambda: None)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(monotonic=loop.time))
    profiles = Profiling(lambda: AgentState("n0", workers={1: found}), told.append)
    result = json.dumps({"stacks": {"MainThread;work": 3}, "without_trace": "no torch"})
    written = tmp_path / found.request.folder / PROFILE
    loop.call_later(seconds + profiling.PROFILE_TIMEOUT + late, written.write_text, result)
    loop.run_until_complete(profiles.profile(Profile("actor", 1, seconds, 7)))
    loop.end()
    problem = "its main thread is not in Python code; unirun stacks shows where it is"
    assert told == [
        Profiled(7, (("MainThread;work", 3),), "no torch") if late < 0 else Profiled(7, problem=problem)
    ]


def test_profiles_of_a_rank_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command gets the profile that it has asked for, one at a time, whatever became of the ones before."""
    found = worker(1, "actor", 1)
    found = replace(found, pid=77, request=replace(found.request, logs=str(tmp_path)))
    folder = tmp_path / found.request.folder
    folder.mkdir(parents=True)
    here = AgentState("n0", workers={1: found})
    state, told, asked = here, list[Message](), list[str]()

    def send(pid: int, folder: str, text: str) -> str:
        asked.append(text)
        return "" if pid == 77 else "it is gone"

    monkeypatch.setattr(profiling, "send_request", send)
    monkeypatch.setattr(profiling, "py_spy", lambda: None)
    profiles = Profiling(lambda: state, told.append)

    async def steps() -> None:
        nonlocal state
        for number, end in enumerate(("written", "ended", "written", "written"), 1):
            task = asyncio.ensure_future(profiles.profile(Profile("actor", 1, 0.1, number)))
            await eventually_async(lambda number=number: len(asked) == number)  # type: ignore[misc]
            await profiles.profile(Profile("actor", 1, 0.1, 99))
            assert told[-1] == Profiled(99, problem="another unirun profile is under way")
            await asyncio.wait([task], timeout=2 * PROFILE_POLL_INTERVAL)
            assert not task.done(), "it has the profile before"
            if end == "written":
                result = {"stacks": {"MainThread;work": number}, "without_trace": "no torch"}
                (folder / PROFILE).write_text(json.dumps(result))
            else:
                state = AgentState("n0")
            await task
            stacks = (("MainThread;work", number),)
            wanted = Profiled(number, stacks, "no torch"), Profiled(number, problem="it has ended meanwhile")
            assert told[-1] == wanted[end == "ended"]
            state = here

    asyncio.run(steps())
