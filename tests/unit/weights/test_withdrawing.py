"""Publishers that go back to an earlier state: a version that some of them had is of one state all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.weights.test_histories import Channel, content, same
from unirun.errors import PeerLost, UsageError, WeightsTimeout

pytestmark = pytest.mark.leaves


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel()
    made.begins()
    made.all_publish(False, 0)
    yield made
    made.job.close()


def begin_again(channel: Channel, rank: int) -> None:
    """This publisher is started again; what is published from now on is not the same to the bit."""
    channel.job.dies(channel.job.workers["actor", rank])
    channel.start_publisher(rank)
    channel.epoch += 1
    channel.latest.clear()


def test_a_version_is_of_one_state_after_some_were_started_again(channel: Channel) -> None:
    begin_again(channel, 1)
    channel.publishers[0].withdraw()
    assert channel.publishers[0].version is None
    reader = channel.readers[0]
    with pytest.raises((WeightsTimeout, PeerLost)):
        reader.channel.receive(reader.tensors, timeout=1.0)
    # The same number as before.
    channel.all_publish(False, 0)
    assert reader.channel.receive(reader.tensors, timeout=1.0) == 1
    assert same(reader.tensors, content(1, 1))


def test_those_who_wait_get_what_is_published_next(channel: Channel) -> None:
    reader = channel.readers[0]
    assert reader.channel.receive(reader.tensors, timeout=1.0) == 1
    for publisher in channel.publishers.values():
        publisher.withdraw()
        publisher.withdraw()
    channel.epoch += 1
    channel.latest.clear()
    channel.job.meanwhile.append(lambda: channel.all_publish(False, 0))
    assert reader.channel.receive(reader.tensors, timeout=5.0) == 1
    assert same(reader.tensors, content(1, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_from_before_and_after_a_withdrawal_are_not_mixed(rank: int, channel: Channel) -> None:
    """A receiver has the part of one publisher, and waits for that of the other one, which it gets after that."""
    channel.way = 3
    channel.all_publish(False, 0)
    reader = channel.readers[rank]
    assert reader.channel.receive(reader.tensors, timeout=1.0) == 2
    channel.publish(0)
    channel.job.meanwhile.extend([*[lambda: None] * 8, channel.withdraw])
    assert reader.channel.receive(reader.tensors, min_version=3, timeout=5.0) == 3
    assert same(reader.tensors, content(1, 3))


def test_receivers_have_nothing_to_withdraw(channel: Channel) -> None:
    with pytest.raises(UsageError, match="rollout receives channel 'policy'"):
        channel.readers[0].channel.withdraw()
