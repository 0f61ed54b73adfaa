"""The measurements of the job of all-reduces, with a network and a store that are not there."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unirun.launcher.doctor import collective
from unirun.launcher.doctor.collective import HostsAtWork
from unirun.launcher.doctor.judge import JobPlace, Link

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


def test_a_home_in_which_nothing_can_be_written_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a file that is missing can be removed there: a read-only file system is the usual case."""
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store: Any = FakeStore(tmp_path / "file", "")
    place = JobPlace(0, ("h1", "h2"), "127.0.0.1", 5, str(tmp_path), "file", ("gloo",), True)
    assert HostsAtWork(place, store).shared() == ("cwd",)


@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize("bandwidth", [False, True])
def test_a_link_has_the_round_trip_that_this_host_has_begun_and_the_stream_that_came(
    me: int, bandwidth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, bool]] = []

    def round_trip(_: object, peer: int, *, begins: bool) -> float:
        assert peer == 1 - me
        turns.append(("rtt", begins))
        return 1.0 if begins else 9.0

    def stream(_: object, peer: int, *, sends: bool) -> float:
        turns.append(("stream", sends))
        return 0.0 if sends else 5.0

    monkeypatch.setattr(collective, "ProcessGroupGloo", lambda *_: object())
    monkeypatch.setattr(collective, "PrefixStore", lambda *_: object())
    monkeypatch.setattr(collective, "_round_trip", round_trip)
    monkeypatch.setattr(collective, "_stream", stream)
    store: Any = None
    place = JobPlace((3, 7)[me], tuple(f"h{n}" for n in range(9)), "", 5, "", "", ("gloo",), bandwidth)
    link = HostsAtWork(place, store)._link("pair/0/3", (3, 7))
    names = ("h3", "h7")
    assert link == Link(names[1 - me], names[me], 1.0, 5.0 if bandwidth else 0.0)
    # The other host does the opposite at the same time.
    assert [first for _, first in turns] == [me == turn for turn in (0, 1)] * (1 + bandwidth)


class FewHosts(HostsAtWork):
    """A host among others, of which the links to some are broken."""

    def __init__(self, me: int, count: int, broken: set[int], keys: set[str]) -> None:
        self.keys, self._broken, self.tried = keys, broken, list[int]()
        store: Any = SimpleNamespace(check=lambda names: names[0] in keys, set=lambda name, _: keys.add(name))
        hosts = tuple(f"h{n}" for n in range(count))
        super().__init__(JobPlace(me, hosts, "", 5, "", "", ("gloo",), True), store)

    def barrier(self, name: str) -> None:
        pass

    def _link(self, key: str, pair: tuple[int, int]) -> Link:
        [other] = {*pair} - {self._me}
        self.tried.append(other)
        return Link(f"h{other}", f"h{self._me}", problem="timed out" if other in self._broken else "")


@pytest.mark.parametrize("seed", range(50))
def test_a_host_that_reaches_none_of_several_is_not_tried_further(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    me, others = 0, range(1, count)
    broken = {each for each in others if rng.random() < rng.choice((0.5, 1.0))}
    hopeless = {each for each in others if rng.random() < 0.2}
    keys = {f"hopeless/{each}" for each in hopeless}
    host = FewHosts(me, count, broken, keys)
    links = host.links()
    first = host.tried[: collective.HOPELESS]
    given_up = len(first) == collective.HOPELESS and broken.issuperset(first)
    assert (f"hopeless/{me}" in host.keys) == given_up
    assert sorted(host.tried) == sorted(first if given_up else {*others} - hopeless)
    assert len(links) == len(host.tried)
