"""The measurements of the job of all-reduces, with a network and a store that are not there."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unirun.launcher.doctor import collective
from unirun.launcher.doctor.collective import HostsAtWork
from unirun.launcher.doctor.judge import JobPlace

SECONDS = 0.001
"""The time of one message."""


class FakePair:
    """A process group of two, in simulated time. The other host ends a stream with its message number `last`."""

    def __init__(self, last: int = 0) -> None:
        self.now, self.last = 1000.0, last
        self.sent: list[int] = []
        self.came = 0

    def time(self) -> float:
        return self.now

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakePair:
        self.sent.append(int(tensors[0][0]))
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakePair:
        self.came += 1
        tensors[0][0] = float(self.came == self.last)
        return self

    def wait(self, timeout: timedelta) -> None:
        self.now += SECONDS


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> FakePair:
    made = FakePair(last=50)
    monkeypatch.setattr(collective, "time", SimpleNamespace(monotonic=made.time, perf_counter=made.time))
    return made


def test_the_bandwidth_is_that_of_the_messages_after_the_first(pair: FakePair) -> None:
    """The time until the first one is that in which the other host begins."""
    assert collective._stream(pair, 1, sends=False) == pytest.approx(collective._CHUNK / SECONDS)
    assert pair.came == 50


def test_a_host_sends_for_a_while_and_says_which_message_is_the_last(pair: FakePair) -> None:
    assert collective._stream(pair, 1, sends=True) == 0.0
    assert pair.now - 1000.0 == pytest.approx(collective.BANDWIDTH_SECONDS + SECONDS, abs=2 * SECONDS)
    assert pair.sent[-1] == 1
    assert not any(pair.sent[:-1])


@pytest.mark.parametrize("begins", [False, True])
def test_a_round_trip_is_two_messages(pair: FakePair, begins: bool) -> None:
    pair.last = 0
    assert collective._round_trip(pair, 1, begins=begins) == pytest.approx(2 * SECONDS)


class FakeStore:
    """A store with two hosts, in which barriers are reached until one is not."""

    def __init__(self, file: Path, broken: str) -> None:
        self.file, self.broken = file, broken
        self.there: list[bool] = []

    def add(self, name: str, amount: int) -> int:
        self.there.append(self.file.exists())
        return 2

    def set(self, name: str, value: str) -> None:
        pass

    def wait(self, names: list[str], timeout: timedelta) -> None:
        if names == [f"{self.broken}/open"]:
            raise RuntimeError("another host has ended")


@pytest.mark.parametrize("broken", ["", "written", "found"])
def test_nothing_is_left_of_the_file_by_which_hosts_see_what_they_share(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store: Any = FakeStore(tmp_path / "work" / "file", broken)
    place = JobPlace(0, ("h1", "h2"), "127.0.0.1", 5, str(tmp_path / "work"), "file", ("gloo",), True)
    try:
        assert HostsAtWork(place, store).shared() == ("cwd", "home")
        assert not broken
    except RuntimeError:
        assert broken
    assert all(store.there)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
