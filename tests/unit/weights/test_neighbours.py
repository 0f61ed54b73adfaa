"""Receivers of one host give to each other what one of them has got from another host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.weights.harness import ReceiverHarness, WeightsHarness, weights_harness
from tests.waiting import WAIT_TIMEOUT
from unirun.weights import receiving

pytestmark = pytest.mark.starts_processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WeightsHarness]:
    with weights_harness(tmp_path) as made:
        yield made


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((1000,), value) for number in range(8)}


BYTES = 8 * 4000


def all_receive(receivers: Sequence[ReceiverHarness], version: int) -> list[tuple[int, set[float]]]:
    """Let all readers receive at the same time, and return their results."""
    found: list[tuple[int, set[float]]] = []

    def receive(receiver: ReceiverHarness) -> None:
        got = weights()
        found.append((receiver.receive(got, version), {v for t in got.values() for v in t.unique().tolist()}))

    threads = [threading.Thread(target=receive, args=(receiver,)) for receiver in receivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_byte_comes_once_to_a_host(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    receivers = harness.neighbours(3, endpoint)
    for version in range(5):
        publisher.publish(weights(float(version)), version)
        assert all_receive(receivers, version) == [(version, {float(version)})] * 3
        assert harness.sent == (version + 1) * BYTES


def test_two_that_wait_for_each_other_get_everything(harness: WeightsHarness) -> None:
    """Each of two publishers is asked first by another receiver."""
    halves = [harness.publisher(rank, tcp=True) for rank in range(2)]
    receivers = harness.neighbours(2, *(endpoint for _, endpoint in halves))
    names = sorted(weights())
    for version in range(20):
        for number, (publisher, _) in enumerate(halves):
            publisher.publish({name: weights(float(version))[name] for name in names[number::2]}, version)
        assert all_receive(receivers, version) == [(version, {float(version)})] * 2
        assert harness.sent == (version + 1) * BYTES


def test_one_that_comes_later_gets_it_from_the_first(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    first, second = harness.neighbours(2, endpoint)
    publisher.publish(weights(3.0), 3)
    assert all_receive([first], 3) == all_receive([second], 3) == [(3, {3.0})]
    assert harness.sent == BYTES


def test_what_a_neighbour_does_not_give_comes_from_the_publisher(
    harness: WeightsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "NEIGHBOR_ANSWER_TIMEOUT", 0.05)
    publisher, endpoint = harness.publisher(tcp=True)
    receivers = harness.neighbours(3, endpoint)
    publisher.publish(weights(1.0), 1)
    assert all_receive(receivers[:1], 1) == [(1, {1.0})]
    # It has given up what it got, as one that hangs or has failed to unpack it.
    receivers[0].holder.close()
    assert all_receive(receivers[1:2], 1) == [(1, {1.0})]
    assert harness.sent == 2 * BYTES
    # Nobody knows the first one any more.
    receivers[2].others.clear()
    assert all_receive(receivers[2:], 1) == [(1, {1.0})]
    assert harness.sent == 3 * BYTES


def test_a_neighbour_that_has_died_is_not_waited_for(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    first, second = harness.neighbours(2, endpoint)
    publisher.publish(weights(1.0), 1)
    all_receive([first], 1)
    second.others[first.name].line.close()
    assert all_receive([second], 1) == [(1, {1.0})]


def test_one_with_a_newer_version_makes_all_of_it_newer(harness: WeightsHarness) -> None:
    publisher, endpoint = harness.publisher(tcp=True)
    first, second = harness.neighbours(2, endpoint)
    names = sorted(weights())
    publisher.publish(weights(1.0), 1)
    assert first.receive({name: torch.zeros(1000) for name in names[:4]}) == 1
    publisher.publish(weights(2.0), 2)
    assert all_receive([first, second], 1) == [(2, {2.0})] * 2


def test_a_neighbour_does_not_give_what_was_withdrawn(
    harness: WeightsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked for the version of the same number that was published then, and has not got it yet."""
    monkeypatch.setattr(receiving, "NEIGHBOR_ANSWER_TIMEOUT", 0.1)
    publisher, endpoint = harness.publisher(tcp=True)
    first, second = harness.neighbours(2, endpoint)
    publisher.publish(weights(1.0), 5)
    assert all_receive([first], 5) == [(5, {1.0})]
    publisher.withdraw()
    publisher.publish(weights(2.0), 5)
    # The layout is learned anew, as after other tensors were wanted, or from a publisher that was started again.
    first.sources[0].describe(None)
    asked, others_have_it, got = threading.Event(), threading.Event(), first.holder.got

    def late(sent: Any) -> None:
        asked.set()
        others_have_it.wait(WAIT_TIMEOUT)
        got(sent)

    monkeypatch.setattr(first.holder, "got", late)
    receiving_again = threading.Thread(target=all_receive, args=([first], 5))
    receiving_again.start()
    assert asked.wait(WAIT_TIMEOUT)
    assert all_receive([second], 5) == [(5, {2.0})]
    others_have_it.set()
    receiving_again.join()


def test_other_tensors_are_published_while_a_neighbour_is_asked(
    harness: WeightsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "NEIGHBOR_ANSWER_TIMEOUT", 0.1)
    publisher, endpoint = harness.publisher(tcp=True)
    first, second = harness.neighbours(2, endpoint)
    publisher.publish(weights(1.0), 1)
    assert all_receive([first], 1) == [(1, {1.0})]
    first.holder.close()
    later = threading.Timer(0.03, publisher.publish, (weights(2.0) | {"more": torch.zeros(3)}, 2))
    later.start()
    assert all_receive([second], 1) == [(2, {2.0})]
    later.join()
