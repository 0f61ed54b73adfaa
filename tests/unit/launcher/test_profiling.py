"""Profiles: what a worker does for one, in this process, and what the agent makes of py-spy's."""

from __future__ import annotations

import gzip
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.waiting import eventually
from unirun.launcher import profiler
from unirun.launcher.profiler import PROFILE, TRACE, sampled
from unirun.launcher.profiling import counts_in


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of this process as a worker, which answers SIGUSR2."""

    def take(*_signal: object) -> None:
        what, _, seconds = (tmp_path / "request").read_text().partition("=")
        assert what == "profile"
        profiler.profile(tmp_path / "request", float(seconds), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, take)
    yield tmp_path
    signal.signal(signal.SIGUSR2, before)


def test_a_worker_records_operators_and_samples_its_threads_while_it_goes_on(folder: Path) -> None:
    (folder / "request").write_text("profile=0.3")
    signal.raise_signal(signal.SIGUSR2)
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
    (folder / "request").write_text("profile=0.05")
    with torch.profiler.profile() as own:
        signal.raise_signal(signal.SIGUSR2)
        torch.rand(8).sum()
        eventually(lambda: (folder / PROFILE).exists(), "the profile is written")
    assert "aten::sum" in {each.name for each in own.events()}
    result = json.loads((folder / PROFILE).read_bytes())
    assert result["without_trace"] == "the program has started torch's profiler itself"
    assert not (folder / TRACE).exists()
    eventually(lambda: profiler._profile is None, "the next one may begin")


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
