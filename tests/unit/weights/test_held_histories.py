"""Receivers that hold a part each, in any history: what a late receiver gets of them, without a publisher, is of one
state of the publishers. Versions of several states have the same number, as publishers withdraw and begin anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.effort import examples
from tests.unit.weights.test_histories import PUBLISHERS, RANK, ROWS, Channel, Tensors, content, cut, same
from unirun.errors import PeerLost, WeightsTimeout
from unirun.weights.tensors import LocalShard, Piecewise

HALF = ROWS // 2
LATE, HOLDERS = 0, (1, 2)


def part(rank: int, tensors: Tensors) -> dict[str, Piecewise]:
    """The part of a holder, in these tensors: a half of the first one, which one publisher has, and another tensor."""
    begin = HALF * (rank - 1)
    rows = LocalShard(tensors["w"][begin : begin + HALF], shape=(ROWS, 4), start=(begin, 0))
    return {"w": rows, "n": tensors["n"]} if rank == 1 else {"w": rows, "b": tensors["b"]}


class HeldVersions(RuleBasedStateMachine):
    """Publishers have a half each, as the holders do."""

    @initialize()
    def begins(self) -> None:
        self.channel = Channel()
        self.channel.way = HALF
        self.channel.begins()
        self.held: dict[int, tuple[int, int]] = {}
        """The epoch and the number of the version of each holder."""

    @rule()
    def publish(self) -> None:
        self.channel.all_publish(False, 0)

    @rule()
    def withdraw(self) -> None:
        self.channel.withdraw()

    @rule()
    def begin_anew(self) -> None:
        """From a checkpoint, so that the last number comes again."""
        self.channel.die()
        self.channel.begin_anew(0, 1)

    @rule(rank=RANK)
    def one_begins_anew(self, rank: int) -> None:
        """The other one goes back to the same state."""
        self.channel.job.dies(self.channel.job.workers["actor", rank])
        self.channel.start_publisher(rank)
        self.channel.withdraw()

    @rule(rank=RANK)
    def one_changes_its_layout(self, rank: int) -> None:
        """It has one more tensor, in this version alone."""
        channel = self.channel
        channel.publish(1 - rank)
        version = channel.latest[1 - rank]
        tensors = cut(content(channel.epoch, version), rank, HALF) | {"more": torch.zeros(1)}
        channel.publishers[rank].publish(tensors, version)
        channel.latest[rank] = version
        channel.versions.append((channel.epoch, version))

    @rule(rank=st.sampled_from(HOLDERS))
    def receive(self, rank: int) -> None:
        channel, reader = self.channel, self.channel.readers[rank]
        if not channel.latest:
            return
        version = reader.channel.receive(part(rank, reader.tensors), timeout=1.0)
        self.held[rank] = channel.epoch, version

    @rule()
    def receive_late(self) -> None:
        """Publishers are dead. Holders that have the same state are enough together."""
        channel = self.channel
        channel.die()
        channel.start_reader(LATE)
        reader = channel.readers[LATE]
        held = {self.held.get(rank) for rank in HOLDERS}
        try:
            version = reader.channel.receive(reader.tensors, timeout=1.0)
        except (PeerLost, WeightsTimeout):
            assert len(held) > 1 or None in held
        else:
            assert held == {(held_of := self.held[HOLDERS[0]])}, "parts of two states"
            assert version == held_of[1]
            assert same(reader.tensors, content(*held_of))
        channel.job.dies(reader.worker)
        channel.start_reader(LATE)
        channel.begin_anew(0, 1)

    def teardown(self) -> None:
        self.receive_late()
        self.channel.job.close()


@pytest.mark.parametrize("rank", PUBLISHERS)
def test_one_that_withdraws_last_is_asked_again(rank: int) -> None:
    """A receiver that takes nothing from it asks while it has not withdrawn yet, and another receiver asks later."""
    held = HeldVersions()
    held.begins()
    held.publish()
    held.channel.publishers[rank].withdraw()
    held.channel.job.meanwhile.extend([*[lambda: None] * 4, held.channel.withdraw])
    for reader in reversed(HOLDERS):
        held.receive(reader)
    held.teardown()


def test_parts_of_two_states_with_one_number_are_not_put_together() -> None:
    held = HeldVersions()
    held.begins()
    held.publish()
    held.receive(HOLDERS[0])
    held.begin_anew()
    held.receive(HOLDERS[1])
    (_, first), (_, second) = held.held.values()
    assert first == second
    held.teardown()


TestHeldVersions = HeldVersions.TestCase
TestHeldVersions.settings = settings(examples(60), stateful_step_count=8)
