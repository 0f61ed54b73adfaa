"""A receiver gives the version that it has received to others, when the publisher is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.weights.harness import WeightsHarness, weights_harness
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId
from unirun.weights.hub import Holder
from unirun.weights.messages import Fetch
from unirun.weights.publishing import CURRENT
from unirun.weights.tensors import Box, NamedBox

pytestmark = pytest.mark.starts_processes

OVER_TCP = pytest.mark.parametrize("tcp", [False, True], ids=["on one host", "between hosts"])


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WeightsHarness]:
    with weights_harness(tmp_path) as made:
        yield made


def filled(value: float, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((100, 3), value) for name in names or ("w",)}


def values(tensors: dict[str, torch.Tensor]) -> list[float]:
    return sorted({value for tensor in tensors.values() for value in tensor.unique().tolist()})


@OVER_TCP
@pytest.mark.parametrize("far", [False, True], ids=["mapped", "sent"])
def test_a_late_receiver_gets_the_last_version_when_the_publisher_has_ended(
    harness: WeightsHarness, tcp: bool, far: bool
) -> None:
    publisher, endpoint = harness.publisher(tcp=far)
    first, late = harness.receiver(endpoint, tcp=far), harness.receiver()
    for version in (1, 2):
        publisher.publish(filled(float(version)), version)
        first.receive(filled(0.0), version)
    harness.end_publishers()
    first.publishers_have_ended = True
    got = filled(0.0)
    assert late.receive_held(harness.holders(first, tcp=tcp), got) == 2
    assert values(got) == [2.0]


def test_one_that_got_it_from_another_receiver_holds_it_too(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher()
    chain = [harness.receiver(endpoint), harness.receiver(), harness.receiver()]
    publisher.publish(filled(5.0), 5)
    chain[0].receive(filled(0.0))
    assert chain[1].receive_held(harness.holders(chain[0]), filled(0.0)) == 5
    got = filled(0.0)
    assert chain[2].receive_held(harness.holders(chain[1]), got) == 5
    assert values(got) == [5.0]


def test_a_late_receiver_gets_the_next_version_of_the_same_receiver_too(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher()
    receiver, late, got = harness.receiver(endpoint), harness.receiver(), filled(0.0)
    holders = harness.holders(receiver)
    for version in (1, 2, 3):
        publisher.publish(filled(float(version)), version)
        receiver.receive(filled(0.0))
        assert late.receive_held(holders, got) == version
        assert values(got) == [float(version)]


def test_receivers_that_have_a_part_each_are_enough_together(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    publisher.publish(filled(3.0, "a", "b"), 3)
    receivers = [harness.receiver(endpoint, tcp=True) for _ in range(2)]
    for receiver, name in zip(receivers, "ab", strict=True):
        receiver.receive(filled(0.0, name))
    got, late = filled(0.0, "a", "b"), harness.receiver()
    assert late.receive_held(harness.holders(receivers[0]), got) is None
    assert late.receive_held(harness.holders(*receivers), got) == 3
    assert values(got) == [3.0]


def test_the_latest_version_counts_that_is_there_as_a_whole(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    whole, half, late = (
        harness.receiver(endpoint, tcp=True),
        harness.receiver(endpoint, tcp=True),
        harness.receiver(),
    )
    publisher.publish(filled(1.0, "a", "b"), 1)
    whole.receive(filled(0.0, "a", "b"))
    publisher.publish(filled(2.0, "a", "b"), 2)
    half.receive(filled(0.0, "a"))
    got, holders = filled(0.0, "a", "b"), harness.holders(half, whole)
    assert late.receive_held(holders, got) == 1
    assert values(got) == [1.0]
    assert late.receive_held(holders, got, at_least=2) is None


def test_nobody_writes_to_what_is_held(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher()
    slow, fast, late = harness.receiver(endpoint), harness.receiver(endpoint), harness.receiver()
    publisher.publish(filled(1.0), 1)
    slow.receive(filled(0.0))
    holders = harness.holders(slow)
    for version in range(2, 12):
        publisher.publish(filled(float(version)), version)
        fast.receive(filled(0.0), version)
        got = filled(0.0)
        assert late.receive_held(holders, got) == 1
        assert values(got) == [1.0]


def test_nothing_is_given_that_a_publisher_may_have_written_to(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher()
    first, late = harness.receiver(endpoint), harness.receiver()
    publisher.publish(filled(1.0), 1)
    first.receive(filled(0.0))
    holders = harness.holders(first)
    assert late.receive_held(holders, filled(0.0)) == 1
    # The connection has ended, and the publisher lives as far as anybody knows.
    first.sources[0].line.close()
    assert late.receive_held(holders, filled(0.0)) is None
    first.publishers_have_ended = True
    assert late.receive_held(holders, filled(0.0)) == 1


def test_who_has_nothing_and_who_has_ended_are_left_out(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher()
    empty, ended, holds, late = (
        harness.receiver(endpoint),
        harness.receiver(endpoint),
        harness.receiver(endpoint),
        harness.receiver(),
    )
    publisher.publish(filled(1.0), 1)
    ended.receive(filled(0.0))
    holds.receive(filled(0.0))
    holders = harness.holders(empty, ended, holds)
    holders[1].line.close()
    assert late.receive_held(holders[:2], filled(0.0)) is None
    assert late.receive_held(holders, filled(0.0)) == 1


def test_what_does_not_fit_is_not_there(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher()
    first, late = harness.receiver(endpoint), harness.receiver()
    publisher.publish(filled(1.0), 1)
    first.receive(filled(0.0))
    assert late.receive_held(harness.holders(first), {"w": torch.zeros(4)}) is None


def test_a_receiver_that_holds_nothing_any_more_gives_the_memory_back(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher()
    first = harness.receiver(endpoint)
    publisher.publish(filled(1.0), 1)
    first.receive(filled(0.0))
    assert len(publisher._blocks._blocks[0].readers) == 2
    first.holder.close()
    # It is released before the next request of this receiver.
    assert first.latest() == 1
    assert publisher._blocks._blocks[0].readers == {CURRENT}


@given(
    st.lists(st.sampled_from(("hold", "fetch", "fetch", "sent", "sent", "close")), min_size=10, max_size=30)
)
def test_a_block_is_given_back_once_when_all_that_was_asked_of_it_is_sent(moves: list[str]) -> None:
    """In any order of versions and of readers that take their time."""
    released: list[int] = []
    source: Any = SimpleNamespace(line=SimpleNamespace(lost=False), release=released.append)
    copy: Any = SimpleNamespace(layout={}, view=lambda name, box: torch.zeros(2))
    holder, reading = Holder(lambda _: False), deque[tuple[int, list[Parcel]]]()
    parts = (NamedBox("w", Box((0,), (2,))),)
    latest = held = 0
    for move in moves:
        if move == "hold":
            held = latest = latest + 1
            holder.hold(held, [copy], [(source, held)], [])
        elif move == "fetch" and held:
            answers: list[Parcel] = []
            holder.handle(Fetch("policy", "rollout:0", held, 0, 0.0, (), parts), answers.append)
            assert answers[0].buffers
            reading.append((held, answers))
        elif move == "sent" and reading:
            reading.popleft()[1].clear()
        elif move == "close":
            held = 0
            holder.close()
        kept = {held, *(version for version, _ in reading)}
        assert sorted(released) == sorted({*range(1, latest + 1)} - kept)


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "got"]), st.integers(1, 4), st.integers(0, 3)), max_size=12)
)
def test_parts_are_given_once_to_those_who_still_wait_for_them(moves: list[tuple[str, int, int]]) -> None:
    now, here, origin = 0.0, 0, (WorkerId("actor", 0, 0), 0)
    holder, waiting = Holder(lambda _: False, now=lambda: now), list[tuple[int, float, list[Parcel]]]()
    copy: Any = SimpleNamespace(view=lambda name, box: torch.zeros(2))
    parts = (NamedBox("w", Box((0,), (2,))),)
    for move, version, seconds in moves:
        if move == "ask":
            answers: list[Parcel] = []
            ask = Fetch("policy", "rollout:1", 0, version, float(seconds), parts=parts, origin=origin)
            holder.handle(ask, answers.append)
            assert len(answers) == (here >= version)
            if not answers:
                waiting.append((version, now + seconds, answers))
            continue
        now, here = now + seconds, version
        holder.got([(origin, version, copy)])
        for at_least, end, answers in waiting:
            assert len(answers) == (end > now and at_least <= version)
        waiting = [each for each in waiting if not each[2] and each[1] > now]
        assert len(holder._waiting) == len(waiting)
