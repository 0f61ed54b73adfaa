"""A channel as one of its ends has it: the news of the others, memory that is given back, and withdrawals."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.weights.job import Job
from tests.unit.weights.test_histories import Channel, content, cut, same
from unirun.errors import PeerLost, UsageError, WeightsError, WeightsTimeout
from unirun.weights import hub
from unirun.weights.channel import VERSION_REPORT_INTERVAL, WeightsChannel
from unirun.weights.hub import MAX_WAIT_SECONDS
from unirun.wire.reports import FROM


@pytest.fixture
def channel() -> Iterator[Channel]:
    """One of which all publishers have version 1."""
    made = Channel()
    made.begins()
    made.all_publish(False, 0)
    yield made
    made.job.close()


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in tensors.items()}


def test_tensors_are_described_as_they_were_received_last(channel: Channel) -> None:
    reader = channel.readers[0].channel
    assert shapes(reader.describe(1.0)) == {"w": (6, 4), "b": (4,), "n": (3,)}
    for publisher in channel.publishers.values():
        publisher.publish({"w": torch.ones(2, 3)}, 5)
    reader.receive({"w": torch.zeros(2, 3)}, timeout=1.0)
    assert shapes(reader.describe(1.0)) == {"w": (2, 3)}


def test_a_version_is_borrowed_of_one_publisher_when_all_have_it(channel: Channel) -> None:
    reader = channel.readers[0].channel
    channel.publish(0)
    with pytest.raises(WeightsTimeout):
        reader.borrow(timeout=1.0)
    channel.publish(1)
    found = reader.borrow(timeout=1.0)
    assert found is not None
    assert found[0] == 2
    path = found[1].path
    assert os.path.exists(path)
    del found
    gc.collect()
    assert not os.path.exists(path), "its descriptor is closed"


def test_a_version_may_be_a_number_of_numpy(channel: Channel) -> None:
    for rank, publisher in channel.publishers.items():
        publisher.publish(cut(content(0, 2), rank, 0), numpy.int64(2))  # type: ignore[arg-type]
    reader = channel.readers[0]
    assert reader.channel.receive(reader.tensors, timeout=1.0) == 2


def test_a_version_is_as_old_as_the_publisher_says_that_is_ahead(channel: Channel) -> None:
    reader = channel.readers[0]
    assert reader.channel.receive(reader.tensors, timeout=1.0) == 1
    channel.all_publish(False, 0)
    channel.publish(0)
    assert reader.channel.receive(reader.tensors, max_staleness=2, timeout=1.0) == 1
    channel.job.meanwhile.extend([*[lambda: None] * 8, lambda: channel.publish(1)])
    assert reader.channel.receive(reader.tensors, max_staleness=1, timeout=5.0) == 3
    assert same(reader.tensors, content(0, 3))


def test_a_version_is_received_though_its_publisher_does_not_take_back_the_one_before(
    channel: Channel,
) -> None:
    reader = channel.readers[0]
    reader.channel.receive(reader.tensors, timeout=1.0)
    channel.all_publish(False, 0)

    class Stopping(dict[str, torch.Tensor]):
        def __setitem__(self, name: str, value: torch.Tensor) -> None:
            """The publishers stand still from now on."""
            super().__setitem__(name, value)
            channel.job.stalled |= {channel.job.workers["actor", rank] for rank in channel.publishers}

    into = Stopping(reader.copy())
    assert reader.channel.receive(into, assign=True, timeout=1.0) == 2
    assert same(into, content(0, 2))


def test_a_version_is_there_though_no_thread_can_be_started_to_tell_it(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr("unirun.weights.channel.threading.Timer", lambda *_: SimpleNamespace(start=start))
        channel.publish(0)
    assert channel.publishers[0].version == 2


def test_a_process_that_could_not_listen_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(actor=1, rollout=1)
    worker = job.starts("actor", 0, "a")

    def fails(*_: object) -> str:
        raise OSError("Too many open files")

    def makes() -> object:
        return worker.makes(WeightsChannel, "policy", publisher="actor", receivers=["rollout"])

    with monkeypatch.context() as limited:
        limited.setattr(worker.sockets, "serve", fails)
        with pytest.raises(OSError, match="Too many"):
            makes()
    makes()
    assert worker.addresses
    job.close()


class Pair:
    """A process group with a publisher."""

    open = True

    def close(self) -> None:
        self.open = False


def test_a_receiver_loads_what_all_publishers_have_saved(channel: Channel, tmp_path: Path) -> None:
    url, reader = str(tmp_path / "policy"), channel.readers[0].channel
    with pytest.raises(WeightsError):
        reader.load(url, content(0, 1))
    for publisher in channel.publishers.values():
        publisher.save(url)
    got = {name: torch.zeros_like(value) for name, value in content(0, 1).items()}
    assert reader.load(url, got) == 1
    assert same(got, content(0, 1))
    with pytest.raises(WeightsError, match="from version 2 on"):
        reader.load(url, got, min_version=2)
    with pytest.raises(UsageError, match="receives channel .*; save in its publisher"):
        reader.save(url)


def test_what_is_attached_is_synchronized_by_the_name_of_the_channel(channel: Channel) -> None:
    reader = channel.readers[0]
    for rank, publisher in channel.publishers.items():
        publisher.attach(cut(content(0, 2), rank, 0))
    reader.channel.attach(reader.tensors)
    for rank in channel.publishers:
        assert channel.job.workers["actor", rank].synced["policy"](2, None) == 2
    assert reader.worker.synced["policy"](2, 1.0) == 2
    assert same(reader.tensors, content(0, 2))
    with pytest.raises(WeightsTimeout):
        reader.worker.synced["policy"](3, 1.0)
    reader.channel.close()
    assert reader.worker.synced == {}


def test_tensors_that_cannot_be_described_yet_are_waited_for_until_the_time_is_over(channel: Channel) -> None:
    reader = channel.readers[0]
    channel.die()
    began = channel.job.now
    with pytest.raises(WeightsTimeout, match="actor:0 does not publish"):
        reader.channel.describe(0.5)
    assert channel.job.now == pytest.approx(began + 0.5)


@pytest.mark.parametrize(("behind", "allowed"), [(0, 0), (0, 1), (1, 1), (1, 0), (2, 1)])
def test_nothing_is_copied_as_long_as_the_version_that_is_there_is_new_enough(
    channel: Channel, behind: int, allowed: int
) -> None:
    reader = channel.readers[0]
    assert reader.channel.receive(reader.tensors, timeout=1.0) == 1
    for _ in range(behind):
        channel.all_publish(False, 0)
    reader.tensors["b"].fill_(-1.0)
    found = reader.channel.receive(reader.tensors, max_staleness=allowed, timeout=1.0)
    assert found == (1 if behind <= allowed else 1 + behind)
    assert same(reader.tensors, content(0, found) | ({"b": -torch.ones(4)} if behind <= allowed else {}))


def test_buffers_that_no_version_has_are_named_once(
    channel: Channel, capfd: pytest.CaptureFixture[str]
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in content(0, 0).items():
                self.register_buffer(name, value)
            self.register_buffer("mask", torch.ones(2), persistent=False)
            self.register_buffer("angles", torch.ones(2), persistent=False)

    reader = channel.readers[0].channel
    reader.receive(content(0, 0), timeout=1.0)
    assert "buffers" not in capfd.readouterr().err
    model = Model()
    for _ in range(2):
        reader.receive(model, timeout=1.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("unirun: versions of channel 'policy' do not have these buffers")
    assert ": angles, mask; where the module" in line


@pytest.mark.parametrize("timeout", [None, 2.0, float("inf")])
def test_a_wait_is_as_long_as_it_says_or_as_a_call(channel: Channel, timeout: float | None) -> None:
    reader = channel.readers[0]
    reader.worker.peers.welcome = SimpleNamespace(call_timeout=7.0, roles=())  # type: ignore[assignment]
    began, expected = channel.job.now, {None: 7.0, 2.0: 2.0}.get(timeout, MAX_WAIT_SECONDS)
    with pytest.raises(WeightsTimeout):
        reader.channel.receive(reader.tensors, min_version=2, timeout=timeout)
    assert channel.job.now - began == pytest.approx(expected)


def test_the_rank_that_cannot_tell_its_version_is_named(channel: Channel) -> None:
    reader = channel.readers[0].channel
    assert reader.latest() == (0, 1)
    channel.die()
    with pytest.raises(PeerLost, match="^actor:0 is started again") as caught:
        reader.latest()
    assert caught.value.worker == "actor:0"


def test_receivers_are_asked_a_few_at_a_time_until_one_has_the_version() -> None:
    job = Job(actor=1, rollout=8)
    publisher = job.starts("actor", 0, "a").makes(
        WeightsChannel, "policy", publisher="actor", receivers=["rollout"]
    )
    readers = [
        job.starts("rollout", rank, "a").makes(
            WeightsChannel, "policy", publisher="actor", receivers=["rollout"]
        )
        for rank in range(8)
    ]
    publisher.publish(content(0, 1), 1)
    assert readers[7].receive(content(0, 0), timeout=1.0) == 1
    job.dies(job.workers["actor", 0])
    got = content(0, 0)
    assert readers[0].receive(got, timeout=1.0) == 1
    assert same(got, content(0, 1))
    job.close()


@pytest.mark.parametrize("moments", range(6))
def test_a_receiver_that_waits_gets_what_a_publisher_has_published_that_has_made_the_channel_again(
    moments: int,
) -> None:
    job = Job(actor=1, rollout=1)
    actor, rollout = (job.starts(role, 0, "a") for role in ("actor", "rollout"))
    made = partial(WeightsChannel, "policy", publisher="actor", receivers=["rollout"])
    publisher, reader, got = actor.makes(made), rollout.makes(made), content(0, 0)
    publisher.publish(content(0, 1), 1)
    assert reader.receive(got, timeout=1.0) == 1
    job.meanwhile += [lambda: None] * moments
    job.meanwhile.append(publisher.close)
    job.meanwhile.append(lambda: actor.makes(made).publish(content(0, 2), 2))
    assert reader.receive(got, min_version=2, timeout=1.0) == 2
    assert same(got, content(0, 2))
    job.close()


def test_only_receivers_on_another_host_than_a_publisher_share_what_they_get_and_form_groups_with_it(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[tuple[Any, ...]] = []
    near, far = channel.readers[0], channel.readers[1]
    monkeypatch.setattr(hub.Hub, "pair", lambda self, *args: pairs.append(args))
    for reader in (near, far):
        reader.channel.receive(reader.tensors, timeout=1.0)
    source = near.channel._source("actor", 0, channel.job.now)
    assert source is not None
    assert (source._host, source._pairing) == ("", None)
    source = far.channel._source("rollout", 0, channel.job.now)
    assert source is not None
    assert (source._host, source._pairing) == ("", None)
    source = far.channel._source("actor", 1, channel.job.now)
    assert source is not None
    assert source._host == "b"
    assert source._pairing is not None
    source._pairing("gloo 3", channel.job.now + 7.0)
    assert pairs == [("policy", "actor", "rollout", 1, "rollout:1 0 1 gloo 3", 7.0)]


def test_a_process_group_ends_with_the_publisher_that_it_was_formed_with(channel: Channel) -> None:
    reader, pair = channel.readers[1], Pair()
    receiver: Any = reader.channel
    receiver.receive(reader.tensors, timeout=1.0)
    receiver._sources["actor", 0]._pair = pair
    receiver.receive(reader.tensors, timeout=1.0)
    assert pair.open
    channel.die()
    channel.begin_anew(0, 1)
    receiver.receive(reader.tensors, timeout=1.0)
    assert not pair.open


@given(
    st.lists(
        st.dictionaries(st.sampled_from(("actor:0", "actor:1", "rollout:0")), st.integers(0, 3)), max_size=6
    )
)
def test_the_bytes_of_each_source_are_told_and_once_more_when_nothing_comes_of_it(
    versions: list[dict[str, int]],
) -> None:
    """In each report by name, and no name for ever."""
    channel = Channel()
    channel.begins()
    reader = channel.readers[0]
    receiver: Any = reader.channel
    try:
        before: set[str] = set()
        for sizes in versions:
            views = {who: [torch.zeros(size, dtype=torch.uint8)] for who, size in sizes.items()}
            receiver._receiver.last = [
                SimpleNamespace(source=SimpleNamespace(who=who), path="sent", views=found)
                for who, found in views.items()
            ]
            reader.worker.told.clear()
            receiver._tell()
            told = {name: value for name, value in reader.worker.told.items() if FROM in name}
            assert told == {
                f"policy{FROM}{who}/sent": float(sizes.get(who, 0)) for who in before | sizes.keys()
            }
            before = {who for who, size in sizes.items() if size}
    finally:
        receiver._receiver.last = []
        channel.job.close()


def test_versions_that_follow_each_other_are_told_once_a_moment_later(channel: Channel) -> None:
    """By one timer for all of them."""
    for _ in range(5):
        channel.all_publish(False, 0)
    assert len(channel.job.timers) == len(channel.publishers)
    channel.job.later(VERSION_REPORT_INTERVAL)
    assert not channel.job.timers
    channel.versions_are_told()


@pytest.mark.parametrize("wanted", [None, 1, 2])
def test_a_receiver_has_the_version_of_another_while_there_is_no_publisher(
    channel: Channel, wanted: int | None
) -> None:
    """If it is the one that it wants, or a later one."""
    first, second = (channel.readers[rank] for rank in (0, 1))
    assert first.channel.receive(first.tensors, timeout=1.0) == 1
    channel.die()
    with pytest.raises(WeightsTimeout) if wanted == 2 else nullcontext():
        assert second.channel.receive(second.tensors, min_version=wanted, timeout=1.0) == 1
        assert same(second.tensors, content(0, 1))


def test_after_the_loss_of_a_publisher_receive_waits_for_the_news_of_its_death_and_for_its_successor(
    channel: Channel,
) -> None:
    """A process that dies may still have connections accepted by its kernel, and the news take a while."""
    reader = channel.readers[0]
    assert reader.channel.receive(reader.tensors, timeout=1.0) == 1
    lost = channel.job.workers["actor", 0]
    channel.job.meanwhile.append(partial(channel.job.dies, lost, told=False))
    with pytest.raises(PeerLost):
        reader.channel.receive(reader.tensors, min_version=2, timeout=20.0)

    def successor() -> None:
        channel.start_publisher(0)
        channel.all_publish(False, 0)

    channel.job.meanwhile.extend((lambda: None, lambda: None, channel.job.tells, successor))
    assert reader.channel.receive(reader.tensors, min_version=2, timeout=20.0) == 2


def begin_again(channel: Channel, rank: int) -> None:
    """This publisher is started again; what is published from now on is not the same to the bit."""
    channel.job.dies(channel.job.workers["actor", rank])
    channel.start_publisher(rank)
    channel.epoch += 1
    channel.latest.clear()


class TestPublishersThatGoBackToAnEarlierState:
    """A version that some of them had is of one state all the same."""

    def test_a_version_is_of_one_state_after_some_were_started_again(self, channel: Channel) -> None:
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

    def test_those_who_wait_get_what_is_published_next(self, channel: Channel) -> None:
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
    def test_parts_from_before_and_after_a_withdrawal_are_not_mixed(
        self, rank: int, channel: Channel
    ) -> None:
        """A receiver has the part of one publisher, and waits for that of the other one, which it gets after that."""
        channel.way = 3
        channel.all_publish(False, 0)
        reader = channel.readers[rank]
        assert reader.channel.receive(reader.tensors, timeout=1.0) == 2
        channel.publish(0)
        channel.job.meanwhile.extend([*[lambda: None] * 8, channel.withdraw])
        assert reader.channel.receive(reader.tensors, min_version=3, timeout=5.0) == 3
        assert same(reader.tensors, content(1, 3))

    @pytest.mark.parametrize("moments", range(12, 24))
    def test_a_receiver_does_not_wait_for_a_version_that_some_had_before_a_withdrawal(
        self, moments: int, channel: Channel
    ) -> None:
        channel.way = 3
        channel.all_publish(False, 0)
        channel.all_publish(False, 0)
        channel.publish(0)
        reader = channel.readers[1]

        def goes_back() -> None:
            for publisher in channel.publishers.values():
                publisher.withdraw()
            channel.epoch += 1
            channel.latest.clear()
            channel.all_publish(False, 0)

        channel.job.meanwhile.extend([*[lambda: None] * moments, goes_back])
        found = reader.channel.receive(reader.tensors, timeout=5.0)
        assert same(reader.tensors, content(int(found == 1), found))

    def test_receivers_have_nothing_to_withdraw(self, channel: Channel) -> None:
        with pytest.raises(UsageError, match="rollout receives channel 'policy'"):
            channel.readers[0].channel.withdraw()
