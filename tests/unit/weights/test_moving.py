"""Publishers and receivers: what is published is received, bit for bit, and each version whole."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Shard

from tests.effort import examples
from tests.unit.weights.harness import WeightsHarness, weights_harness
from tests.unit.weights.shardings import Sharding, shardings
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import PeerLost, UsageError, WeightsError, WeightsTimeout
from unirun.weights.integrations.sending import read
from unirun.weights.publishing import Packing
from unirun.weights.tensors import Layout, LocalShard, tensors_of

pytestmark = pytest.mark.starts_processes

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WeightsHarness]:
    with weights_harness(tmp_path) as made:
        yield made


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits, for bool random truths."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, nan included."""
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "sockets"])
class TestEverything:
    def test_every_dtype_and_shape_arrives_bit_for_bit(self, harness: WeightsHarness, tcp: bool) -> None:
        sent = {f"{dtype}": noise(3, 5, dtype=dtype) for dtype in DTYPES}
        sent |= {
            "scalar": torch.tensor(2**24 + 1),
            "empty": torch.zeros(0, 3),
            "columns": noise(6, 8).t(),
            "every second": noise(8, 8)[::2, 1::2],
            "expanded": noise(1, 4).expand(3, 4),
        }
        publisher, endpoint = harness.publisher(tcp=tcp)
        publisher.publish(sent, 7)
        got = {
            name: torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for name, tensor in sent.items()
        }
        got["columns"] = torch.empty(6, 8).t()
        assert harness.receiver(endpoint, tcp=tcp).receive(got) == 7
        assert [name for name in sent if not same(sent[name], got[name])] == []

    def test_parameters_buffers_and_tied_weights_of_a_module_arrive(
        self, harness: WeightsHarness, tcp: bool
    ) -> None:
        def module() -> torch.nn.Sequential:
            made = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 5))
            made[2].weight = made[0].weight
            return made

        sent, got = module(), module()
        sent(torch.rand(9, 5)).sum().backward()
        publisher, endpoint = harness.publisher(tcp=tcp)
        publisher.publish(tensors_of(sent), 0)
        harness.receiver(endpoint, tcp=tcp).receive(tensors_of(got))
        assert all(
            same(a, b) for a, b in zip(sent.state_dict().values(), got.state_dict().values(), strict=True)
        )
        assert got[2].weight is got[0].weight
        assert got[0].weight.grad is None

    @examples(20)
    @given(shardings(), shardings())
    def test_any_layout_becomes_any_other(
        self,
        harness: WeightsHarness,
        tcp: bool,
        monkeypatch: pytest.MonkeyPatch,
        source: Sharding,
        target: Sharding,
    ) -> None:
        whole = noise(7, 10, dtype=torch.bfloat16)
        endpoints = []
        for at in source.coordinates:
            publisher, endpoint = harness.publisher(tcp=tcp)
            _publish_as(monkeypatch, publisher, source.local(whole, at), {"w": source.part(whole, at)})
            endpoints.append(endpoint)
        for at in target.coordinates[:2]:
            got = torch.zeros_like(target.local(whole, at))
            with monkeypatch.context() as patch:
                patch.setattr(
                    "unirun.weights.receiving.layout_of", lambda _, at=at: {"w": target.part(whole, at)}
                )
                harness.receiver(*endpoints, tcp=tcp).receive({"w": got})
            assert same(got, target.local(whole, at))

    def test_a_receiver_of_empty_parts_waits_for_the_version_all_the_same(
        self, harness: WeightsHarness, monkeypatch: pytest.MonkeyPatch, tcp: bool
    ) -> None:
        whole, few = noise(3), Sharding((4,), (Shard(0),))
        publisher, endpoint = harness.publisher(tcp=tcp)
        publisher.publish({"w": whole}, 5)
        got = few.local(whole, (3,))
        with monkeypatch.context() as patch:
            patch.setattr("unirun.weights.receiving.layout_of", lambda _: {"w": few.part(whole, (3,))})
            receiver = harness.receiver(endpoint, tcp=tcp)
            assert (receiver.receive({"w": got}), got.numel()) == (5, 0)
            with pytest.raises(WeightsTimeout):
                receiver.receive({"w": got}, at_least=6, within=0.05)


def _publish_as(
    monkeypatch: pytest.MonkeyPatch, publisher: object, local: torch.Tensor, layout: Layout
) -> None:
    """Publish a local tensor with a layout as a DTensor has it, which takes a process for each rank."""
    with monkeypatch.context() as patch:
        patch.setattr("unirun.weights.publishing.layout_of", lambda _: layout)
        publisher.publish({"w": local}, 0)  # type: ignore[attr-defined]


class TestVersions:
    def test_a_receiver_waits_for_the_version_that_it_wants(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver, got = harness.receiver(endpoint), {"w": torch.zeros(4)}
        publisher.publish({"w": torch.ones(4)}, 1)
        assert receiver.receive(got) == 1
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(receiver.receive(got, at_least=3)))
        waiting.start()
        publisher.publish({"w": torch.full((4,), 2.0)}, 2)
        publisher.publish({"w": torch.full((4,), 3.0)}, 3)
        waiting.join()
        assert (found, got["w"].tolist()) == ([3], [3.0] * 4)

    def test_a_late_receiver_gets_the_last_version_at_once(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        for version in range(5):
            publisher.publish({"w": torch.full((4,), float(version))}, version)
        got = {"w": torch.zeros(4)}
        assert harness.receiver(endpoint).receive(got) == 4
        assert got["w"].tolist() == [4.0] * 4

    def test_a_receiver_of_several_publishers_gets_one_version_of_all(self, harness: WeightsHarness) -> None:
        halves = [harness.publisher(rank) for rank in range(2)]
        receiver = harness.receiver(*(endpoint for _, endpoint in halves))
        got = {"a": torch.zeros(2), "b": torch.zeros(2)}
        for number, (publisher, _) in enumerate(halves):
            publisher.publish({"ab"[number]: torch.full((2,), 1.0)}, 1)
        assert receiver.receive(got) == 1
        halves[0][0].publish({"a": torch.full((2,), 2.0)}, 2)
        late = threading.Timer(0.05, halves[1][0].publish, ({"b": torch.full((2,), 2.0)}, 2))
        late.start()
        assert receiver.receive(got, at_least=1) == 2
        late.join()
        assert got["a"].tolist() == got["b"].tolist() == [2.0, 2.0]

    def test_nothing_changes_when_no_version_is_new_enough(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        publisher.publish({"w": torch.ones(4)}, 1)
        got = {"w": torch.zeros(4)}
        with pytest.raises(WeightsTimeout, match="actor:0 has published nothing new enough"):
            harness.receiver(endpoint).receive(got, at_least=2, within=0.05)
        assert got["w"].tolist() == [0.0] * 4

    def test_versions_ascend(self, harness: WeightsHarness) -> None:
        publisher, _ = harness.publisher()
        publisher.publish({"w": torch.ones(4)}, 1)
        with pytest.raises(UsageError, match="version 1 of channel 'policy' comes after 1"):
            publisher.publish({"w": torch.ones(4)}, 1)

    def test_a_publisher_may_publish_other_tensors_later(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver = harness.receiver(endpoint)
        publisher.publish({"w": torch.ones(4)}, 1)
        receiver.receive({"w": torch.zeros(4)})
        publisher.publish({"w": torch.ones(4), "v": noise(1000)}, 2)
        got = {"v": torch.zeros(1000)}
        assert receiver.receive(got, at_least=2) == 2
        assert got["v"].count_nonzero() > 0

    def test_what_does_not_fit_is_told_and_changes_nothing(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        publisher.publish({"w": torch.ones(4), "v": torch.ones(1)}, 1)
        got = {"w": torch.zeros(5), "v": torch.zeros(1)}
        with pytest.raises(WeightsError, match="float32"):
            harness.receiver(endpoint).receive(got)
        assert got["v"].tolist() == [0.0]


class TestMemory:
    def test_two_blocks_are_enough_however_many_versions_there_are(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver, got = harness.receiver(endpoint), {"w": torch.zeros(1000)}
        before = _memfds()
        for version in range(50):
            publisher.publish({"w": torch.full((1000,), float(version))}, version)
            assert receiver.receive(got, at_least=version) == version
        assert _memfds() - before == 2

    def test_without_shared_memory_weights_go_over_sockets_with_a_warning(
        self, harness: WeightsHarness, capfd: pytest.CaptureFixture[str]
    ) -> None:
        publisher, endpoint = harness.publisher()
        receiver, sent, got = (
            harness.receiver(endpoint),
            {"w": noise(1000, 1000)},
            {"w": torch.zeros(1000, 1000)},
        )
        publisher.publish({"w": torch.ones(1000, 1000)}, 0)
        receiver.receive(got)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            publisher.publish(sent, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        words = r"there is no shared memory for 4000\d{3} bytes of weights \(File too large\)"
        assert re.search(words, capfd.readouterr().err)
        assert receiver.receive(got, at_least=1) == 1
        assert same(got["w"], sent["w"])

    def test_a_version_that_is_being_read_is_not_overwritten(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        source = harness.receiver(endpoint).sources[0]
        publisher.publish({"w": torch.full((1000,), 1.0)}, 1)
        from unirun.weights.messages import Describe, Described, Fetched
        from unirun.weights.sources import answer_of
        from unirun.weights.tensors import Box, NamedBox

        described = answer_of(source.ask(Describe("policy", 1.0)).result(WAIT_TIMEOUT).head)
        assert isinstance(described, Described)
        source.describe(Packing(described.layout, described.number, described.offsets))
        take = NamedBox("w", Box((0,), (1000,)))
        parcel = source.fetch(0, (take,), 1.0, keep=False).result(WAIT_TIMEOUT)
        fetched = answer_of(parcel.head)
        assert isinstance(fetched, Fetched)
        (view,) = source.mapped(fetched, parcel, keep=False).views((take,))
        for version in range(2, 12):
            publisher.publish({"w": torch.full((1000,), float(version))}, version)
            assert view.unique().tolist() == [1.0]

    def test_ten_thousand_versions_under_a_reader_are_never_torn(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver, got = harness.receiver(endpoint), {"a": torch.zeros(5000), "b": torch.zeros(3)}
        count = 10_000
        torn: list[int] = []
        seen: list[int] = []

        def read() -> None:
            version = -1
            while version < count - 1:
                version = receiver.receive(got, at_least=version + 1)
                seen.append(version)
                if {*got["a"].unique().tolist(), *got["b"].unique().tolist()} != {float(version)}:
                    torn.append(version)

        reading = threading.Thread(target=read)
        reading.start()
        for version in range(count):
            publisher.publish(
                {"a": torch.full((5000,), float(version)), "b": torch.full((3,), float(version))}, version
            )
        reading.join()
        assert torn == []
        assert seen == sorted(set(seen))

    def test_a_publisher_that_ends_is_told_by_name_to_who_waits_for_it(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver, got = harness.receiver(endpoint), {"w": torch.zeros(4)}
        publisher.publish({"w": torch.ones(4)}, 1)
        receiver.receive(got)
        ending = threading.Timer(0.05, harness.end_publishers)
        ending.start()
        with pytest.raises(PeerLost, match="actor:0 is gone"):
            receiver.receive(got, at_least=2)
        ending.join()
        assert got["w"].tolist() == [1.0] * 4


def _memfds() -> int:
    """The memfds of channels that this process has open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:unirun-weights" in os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
    return found


class TestAssigning:
    def test_parameters_become_tensors_over_the_publishers_memory(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver, module = harness.receiver(endpoint), torch.nn.Linear(4, 3)
        parameter = module.weight
        for version in (1, 2):
            sent = {"weight": torch.full((3, 4), float(version)), "bias": torch.full((3,), float(version))}
            publisher.publish(sent, version)
            assert receiver.receive(module, at_least=version, assign=True) == version
            assert module(torch.ones(4)).tolist() == [5.0 * version] * 3
        assert module.weight is parameter

    def test_what_was_assigned_stays_while_others_are_published(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver, got = harness.receiver(endpoint), {"w": torch.zeros(1000)}
        publisher.publish({"w": torch.full((1000,), 1.0)}, 1)
        receiver.receive(got, assign=True)
        for version in range(2, 12):
            publisher.publish({"w": torch.full((1000,), float(version))}, version)
            assert got["w"].unique().tolist() == [1.0]
        assert receiver.receive(got, assign=True) == 11
        assert got["w"].unique().tolist() == [11.0]

    def test_writing_to_what_was_assigned_changes_nothing_for_others(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        publisher.publish({"w": torch.ones(1000)}, 1)
        mine, others = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
        harness.receiver(endpoint).receive(mine, assign=True)
        mine["w"].fill_(5.0)
        harness.receiver(endpoint).receive(others)
        assert others["w"].unique().tolist() == [1.0]

    def test_a_block_is_written_again_when_all_that_was_assigned_from_it_is_freed(
        self, harness: WeightsHarness
    ) -> None:
        publisher, endpoint = harness.publisher()
        receiver, got = harness.receiver(endpoint), {"w": torch.zeros(1000), "v": torch.zeros(1000)}
        before = _memfds()
        for version in range(20):
            publisher.publish({name: torch.full((1000,), float(version)) for name in got}, version)
            receiver.receive(got, at_least=version, assign=True)
        # The news that one is free come with the next request.
        assert _memfds() - before <= 3

    def test_what_comes_from_another_host_is_copied(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher(tcp=True)
        publisher.publish({"w": torch.ones(1000)}, 1)
        got = {"w": torch.zeros(1000)}
        before = got["w"]
        harness.receiver(endpoint, tcp=True).receive(got, assign=True)
        assert got["w"] is before
        assert before.unique().tolist() == [1.0]

    def test_a_receiver_may_ask_which_version_there_is(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        publisher.publish({"w": torch.ones(1)}, 5)
        assert harness.receiver(endpoint).latest() == 5


class TestBorrowing:
    """Versions as files, which are the memory of the publisher."""

    def test_a_borrowed_version_is_a_file_with_all_tensors(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        tensors = {"a": noise(3, 5), "b": noise(7, dtype=torch.bfloat16), "empty": torch.empty(0, 2)}
        tensors |= {"bytes": torch.arange(5, dtype=torch.uint8), "wide": noise(3, dtype=torch.float64)}
        publisher.publish(tensors, 4)
        version, file = harness.receiver(endpoint).borrow(4)
        assert version == 4
        found = read(file.path, file.token)
        assert found.keys() == tensors.keys()
        assert all(same(found[name], value) for name, value in tensors.items())
        assert all(value.data_ptr() % value.element_size() == 0 for value in found.values())

    def test_it_is_not_written_to_as_long_as_it_is_needed(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver = harness.receiver(endpoint)
        publisher.publish({"w": torch.full((1000,), 1.0)}, 1)
        _, first = receiver.borrow(1)
        mapped = read(first.path, first.token)["w"]
        for version in range(2, 9):
            publisher.publish({"w": torch.full((1000,), float(version))}, version)
            _, latest = receiver.borrow(version)
            assert read(latest.path, latest.token)["w"].unique().tolist() == [float(version)]
            assert mapped.unique().tolist() == [1.0]

    def test_a_publisher_has_two_versions_in_memory(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver = harness.receiver(endpoint)
        for version in range(20):
            publisher.publish({"w": torch.full((1000,), float(version))}, version)
            _, file = receiver.borrow(version)
            # The publisher learns with the next request that the one before is not needed.
            assert receiver.latest() == version
        assert len(publisher._blocks._blocks) == 2
        assert file.is_intact()

    def test_it_stays_when_the_publisher_ends(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        publisher.publish({"w": torch.ones(1000)}, 1)
        receiver = harness.receiver(endpoint)
        _, file = receiver.borrow(1)
        publisher.close()
        harness.end_publishers()
        assert read(file.path, file.token)["w"].unique().tolist() == [1.0]
        eventually(lambda: not file.is_intact(), "the connection has ended, and the publisher may live")
        receiver.publishers_have_ended = True
        assert file.is_intact()
        late = {"w": torch.zeros(1000)}
        assert harness.receiver().receive_held(harness.holders(receiver), late) == 1
        assert late["w"].unique().tolist() == [1.0]

    def test_its_descriptor_is_closed_with_it(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        publisher.publish({"w": torch.ones(1000)}, 1)
        _, file = harness.receiver(endpoint).borrow(1)
        path = file.path
        assert os.path.exists(path)
        del file
        assert not os.path.exists(path)

    def test_every_rank_has_to_have_the_version(self, harness: WeightsHarness) -> None:
        (one, first), (other, second) = harness.publisher(0), harness.publisher(1)
        weights = {"w": torch.ones(3)}
        one.publish(weights, 1)
        other.publish(weights, 1)
        receiver = harness.receiver(first, second)
        assert receiver.borrow(1)[0] == 1
        one.publish(weights, 2)
        with pytest.raises(WeightsTimeout):
            receiver.borrow(2, within=0.2)
        other.publish(weights, 2)
        assert receiver.borrow(2)[0] == 2

    def test_a_rank_that_lacks_tensors_lends_nothing(self, harness: WeightsHarness) -> None:
        (one, first), (other, second) = harness.publisher(0), harness.publisher(1)
        one.publish({"w": torch.ones(3)}, 1)
        other.publish({"w": torch.ones(3), "v": torch.ones(2)}, 1)
        _, file = harness.receiver(first, second).borrow(1)
        assert read(file.path, file.token).keys() == {"w", "v"}
        other.publish({"v": torch.ones(2)}, 2)
        one.publish({"w": torch.ones(3)}, 2)
        receiver = harness.receiver(first, second)
        assert receiver._receiver.borrow(receiver.sources, 2, time.monotonic() + WAIT_TIMEOUT) is None

    @pytest.mark.parametrize("case", ["another host", "parts", "no code"])
    def test_what_is_no_file_has_to_be_received(self, case: str, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher(tcp=case == "another host")
        if case == "parts":
            publisher.publish({"w": LocalShard(torch.ones(3), shape=(6,), start=(0,))}, 1)
        else:
            publisher.publish({"w": torch.ones(3, dtype=torch.complex128 if case == "no code" else None)}, 1)
        receiver = harness.receiver(endpoint, tcp=case == "another host")
        assert receiver._receiver.borrow(receiver.sources, 1, time.monotonic() + WAIT_TIMEOUT) is None

    def test_other_tensors_may_be_published_later(self, harness: WeightsHarness) -> None:
        publisher, endpoint = harness.publisher()
        receiver = harness.receiver(endpoint)
        publisher.publish({"w": torch.ones(1000)}, 1)
        receiver.borrow(1)
        publisher.publish({"v": torch.ones(4)}, 2)
        deadline = time.monotonic() + WAIT_TIMEOUT
        assert receiver._receiver.borrow(receiver.sources, 2, deadline) is None, "this one is received"
        for version in (2, 3):
            _, file = receiver.borrow(version)
            assert read(file.path, file.token).keys() == {"v"}
            # The memory of the larger ones is free now.
            publisher.publish({"v": torch.ones(4)}, version + 1)
