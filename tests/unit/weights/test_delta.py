"""Only what has changed is sent to another host."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.weights.harness import WeightsHarness, weights_harness
from unirun.weights.packing import Block, Packing
from unirun.weights.tensors import layout_of

pytestmark = pytest.mark.starts_processes

SIZE = 1000


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WeightsHarness]:
    with weights_harness(tmp_path) as made:
        yield made


def zeros(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(SIZE) for name in names or "abcd"}


def test_tensors_that_are_the_same_are_not_sent_again(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    receiver, sent = harness.receiver(endpoint, tcp=True), {name: torch.randn(SIZE) for name in "abcd"}
    sizes = []
    for version, changes in enumerate(("abcd", "a", "", "bc", "d")):
        for name in changes:
            sent[name] += 1.0
        publisher.publish(sent, version, delta=True)
        before, got = harness.sent, zeros()
        assert receiver.receive(got, version) == version
        assert all(torch.equal(got[name], sent[name]) for name in sent)
        sizes.append((harness.sent - before) // (4 * SIZE))
    assert sizes == [4, 1, 0, 2, 1]


def test_a_receiver_that_has_missed_versions_gets_all_that_has_changed_since_its_own(
    harness: WeightsHarness,
) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    receiver, sent = harness.receiver(endpoint, tcp=True), zeros()
    publisher.publish(sent, 0, delta=True)
    receiver.receive(zeros())
    before = harness.sent
    for version, name in enumerate("abb", 1):
        sent[name] += 1.0
        publisher.publish(sent, version, delta=True)
    got = zeros()
    assert receiver.receive(got, 3) == 3
    assert (harness.sent - before) // (4 * SIZE) == 2
    assert {name: float(value[0]) for name, value in got.items()} == {"a": 1.0, "b": 2.0, "c": 0.0, "d": 0.0}


def test_a_version_that_is_not_a_delta_is_sent_as_a_whole(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    receiver = harness.receiver(endpoint, tcp=True)
    for version, delta in enumerate((True, False)):
        publisher.publish(zeros(), version, delta=delta)
        receiver.receive(zeros(), version)
    assert harness.sent == 2 * 4 * 4 * SIZE


def test_other_tensors_and_other_receivers_get_everything(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    receiver = harness.receiver(endpoint, tcp=True)
    publisher.publish(zeros(*"ab"), 0, delta=True)
    receiver.receive(zeros(*"ab"))
    publisher.publish(zeros(*"abc"), 1, delta=True)
    got = {"a": torch.ones(SIZE), "c": torch.ones(SIZE)}
    assert receiver.receive(got, 1) == 1
    assert not any(value.any() for value in got.values())
    late = torch.ones(SIZE)
    assert harness.receiver(endpoint, tcp=True).receive({"b": late}, 1) == 1
    assert not late.any()


def test_neighbours_share_what_has_changed(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    receivers, sent = harness.neighbours(2, endpoint), zeros()
    for version in range(3):
        sent["c"] += 1.0
        publisher.publish(sent, version, delta=True)
        for receiver in receivers:
            got = zeros()
            assert receiver.receive(got, version) == version
            assert all(torch.equal(got[name], sent[name]) for name in sent)
    assert harness.sent == 4 * SIZE * (4 + 1 + 1)


def test_what_is_kept_does_not_keep_the_frames_that_it_came_in(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    large = 1_000_000
    receiver, names = harness.receiver(endpoint, tcp=True), [f"small{number}" for number in range(12)]
    sent, got = {"large": torch.zeros(large)} | zeros(*names), {"large": torch.zeros(large)} | zeros(*names)
    tracemalloc.start()
    try:
        for version, name in enumerate(names):
            sent["large"] += 1.0
            sent[name] += 1.0
            publisher.publish(sent, version, delta=True)
            receiver.receive(got, version)
        assert tracemalloc.get_traced_memory()[0] < 4 * 4 * large
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1.0, 1.0 + 2**-23)])
def test_any_bit_counts(pair: tuple[float, float]) -> None:
    assert changed({"w": torch.tensor([pair[0]])}, {"w": torch.tensor([pair[1]])}) == {"w"}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.complex64]
)
def test_what_is_equal_in_all_bits_is_the_same(dtype: torch.dtype) -> None:
    value = (torch.rand(6, 4) * 4).to(dtype)
    assert changed({"w": value.t()}, {"w": value.t().clone()}) == set()


def test_not_a_number_is_the_same_as_itself() -> None:
    assert changed({"w": torch.tensor([float("nan")])}, {"w": torch.tensor([float("nan")])}) == set()


@examples(30)
@given(st.sets(st.sampled_from("abcd")))
def test_exactly_the_tensors_that_differ_have_changed(names: set[str]) -> None:
    before = {name: torch.randn(3, 3) for name in "abcd"}
    after = {name: value.clone() for name, value in before.items()}
    for name in names:
        after[name][1, 2] += 1.0
    assert changed(before, after) == names


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    packing = Packing(layout_of(before), 1)
    block = Block(1, packing.size)
    try:
        packing.pack(before, block)
        return packing.changed(after, block)
    finally:
        block.close()
