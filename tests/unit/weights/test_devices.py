"""Weights that stay on a device, on a fake one: what arrives, in which order memory is used, and when it is freed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.weights.fake_device import FakeDevice, FakeMachine, MemoryMisuse
from tests.unit.weights.harness import ReceiverHarness, WeightsHarness, weights_harness
from unirun.weights.devices import CudaDevice, DeviceError
from unirun.weights.integrations.sending import read
from unirun.weights.publishing import CURRENT, Blocks, Publisher

pytestmark = pytest.mark.starts_processes

SIZE = 1000


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WeightsHarness]:
    with weights_harness(tmp_path) as made:
        yield made


def filled(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE,), value), "b": torch.full((3, 5), value, dtype=torch.bfloat16)}


def values(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {value for tensor in tensors.values() for value in tensor.float().unique().tolist()}


def on_device(harness: WeightsHarness, machine: FakeMachine, *, tcp: bool = False) -> tuple[Publisher, str]:
    publisher, endpoint = harness.publisher(tcp=tcp)
    device = machine.process(0)
    publisher._device = lambda tensors: device
    return publisher, endpoint


def receiver(harness: WeightsHarness, endpoint: str, device: FakeDevice | None) -> ReceiverHarness:
    made = harness.receiver(endpoint)
    made._receiver._device = lambda tensors: device
    return made


class TestOnOneHost:
    def test_versions_go_from_device_to_device_and_the_memory_is_used_again(
        self, harness: WeightsHarness
    ) -> None:
        machine = FakeMachine()
        publisher, endpoint = on_device(harness, machine)
        receivers = [receiver(harness, endpoint, machine.process(number)) for number in (1, 2)]
        for version in range(20):
            publisher.publish(filled(float(version)), version)
            for each in receivers:
                got = filled(-1.0)
                assert each.receive(got, version) == version
                assert values(got) == {float(version)}
                assert {one.path for one in each._receiver.last} == {"device memory"}
        assert not machine.borrowed
        # One with the current version, and one that the next is written to.
        assert len(machine.regions) == 2
        publisher.close()
        assert not machine.used

    def test_a_reader_on_the_host_gets_a_copy_that_is_made_when_the_first_one_asks(
        self, harness: WeightsHarness
    ) -> None:
        machine = FakeMachine()
        publisher, endpoint = on_device(harness, machine)
        near, hosts = (
            receiver(harness, endpoint, machine.process(1)),
            [receiver(harness, endpoint, None) for _ in "ab"],
        )
        for version in range(5):
            publisher.publish(filled(float(version)), version)
            near.receive(filled(-1.0), version)
            assert publisher._current is not None
            assert publisher._current.host is None
            for each in hosts:
                got = filled(-1.0)
                assert each.receive(got, version) == version
                assert values(got) == {float(version)}
                assert {one.path for one in each._receiver.last} == {"shared memory"}
        assert len([region for region in machine.regions if not region.freed]) == 2

    def test_a_version_is_borrowed_as_a_file_from_the_host(self, harness: WeightsHarness) -> None:
        machine = FakeMachine()
        publisher, endpoint = on_device(harness, machine)
        borrower = receiver(harness, endpoint, None)
        for version in range(5):
            publisher.publish(filled(float(version)), version)
            number, file = borrower.borrow(version)
            assert number == version
            assert values(read(file.path, file.token)) == {float(version)}

    def test_a_device_that_cannot_be_reached_is_tried_once(
        self, harness: WeightsHarness, capfd: pytest.CaptureFixture[str]
    ) -> None:
        machine = FakeMachine(reaches=False)
        publisher, endpoint = on_device(harness, machine)
        far = receiver(harness, endpoint, machine.process(1))
        for version in range(3):
            publisher.publish(filled(float(version)), version)
            got = filled(-1.0)
            assert far.receive(got, version) == version
            assert values(got) == {float(version)}
        assert capfd.readouterr().err.count("there is no way to the other device") == 1

    def test_without_memory_on_the_device_weights_go_through_the_host(
        self, harness: WeightsHarness, capfd: pytest.CaptureFixture[str]
    ) -> None:
        machine = FakeMachine(room=10)
        publisher, endpoint = on_device(harness, machine)
        near = receiver(harness, endpoint, machine.process(1))
        publisher.publish(filled(3.0), 1)
        got = filled(-1.0)
        assert near.receive(got) == 1
        assert values(got) == {3.0}
        assert "weights go through the memory of the host" in capfd.readouterr().err

    def test_an_average_and_a_saved_file_have_the_version_of_the_device(
        self, harness: WeightsHarness
    ) -> None:
        machine = FakeMachine()
        publisher, endpoint = on_device(harness, machine)
        near = receiver(harness, endpoint, machine.process(1))
        publisher.publish(filled(8.0), 1)
        got = filled(4.0)
        near.receive(got, eta=0.25)
        assert values(got) == {5.0}
        with publisher.current() as (_, packing, block):
            assert packing.view(block.memory, "w", packing.layout["w"].pieces[0].box).tolist() == [8.0] * SIZE
        assert not machine.borrowed

    def test_only_the_last_version_is_kept_however_it_was_read(self, harness: WeightsHarness) -> None:
        machine = FakeMachine()
        publisher, _ = on_device(harness, machine)
        device = publisher._device({})
        assert device is not None
        copy, later = device.copy, list[int]()

        def copies(into: list[torch.Tensor], from_: list[torch.Tensor]) -> None:
            copy(into, from_)
            if later:
                publisher.publish(filled(3.0), later.pop())

        for version, meanwhile in ((1, []), (2, [3]), (4, []), (5, [6]), (7, [])):
            publisher.publish(filled(3.0), version)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(device, "copy", copies)
                later[:] = meanwhile
                with publisher.current() as (read, _, _):
                    assert read == version
        publisher.publish(filled(3.0), 8)
        assert [block.readers for block in publisher._blocks._blocks if block.readers] == [{CURRENT}]

    def test_it_is_whole_while_the_next_ones_are_published(self, harness: WeightsHarness) -> None:
        machine = FakeMachine()
        publisher, endpoint = on_device(harness, machine)
        receivers = [receiver(harness, endpoint, machine.process(1)), receiver(harness, endpoint, None)]
        seen: list[set[float]] = []

        def read(each: ReceiverHarness) -> None:
            version = 0
            while version < 250:
                got = filled(-1.0)
                version = each.receive(got, version + 1)
                seen.append(values(got) - {float(version)})

        threads = [threading.Thread(target=read, args=(each,)) for each in receivers]
        for thread in threads:
            thread.start()
        for version in range(1, 251):
            publisher.publish(whole_numbers(version), version)
        for thread in threads:
            thread.join(60)
        assert seen
        assert not any(seen)


def whole_numbers(version: int) -> dict[str, torch.Tensor]:
    """Up to 256, which bfloat16 has."""
    return {"w": torch.full((SIZE,), float(version)), "b": torch.full((3, 5), float(version)).bfloat16()}


def test_memory_of_a_device_that_somebody_reads_is_not_freed_by_its_owner() -> None:
    machine = FakeMachine()
    blocks, device = Blocks(), machine.process(0)
    read, unread = (blocks.take(size, "a reader", device) for size in (10, 20))
    unread.readers.clear()
    blocks.close()
    assert machine.used == read.size


class TestBetweenHosts:
    def test_a_version_on_a_device_is_sent_from_the_host(self, harness: WeightsHarness) -> None:
        machine = FakeMachine()
        publisher, endpoint = on_device(harness, machine, tcp=True)
        far = harness.receiver(endpoint, tcp=True)
        for version in range(3):
            publisher.publish(filled(float(version)), version)
            got = filled(-1.0)
            assert far.receive(got, version) == version
            assert values(got) == {float(version)}


class TestTheTwin:
    """It fails where a device would do anything."""

    @pytest.fixture
    def devices(self) -> tuple[FakeDevice, FakeDevice]:
        machine = FakeMachine()
        return machine.process(0), machine.process(1)

    def test_memory_that_is_lent_before_it_is_written(self, devices: tuple[FakeDevice, FakeDevice]) -> None:
        memory = devices[0].allocate(4)
        devices[0].copy([memory], [torch.zeros(4, dtype=torch.uint8)])
        with pytest.raises(MemoryMisuse, match="lent before it is written"):
            devices[0].lend(memory)

    def test_a_handle_that_its_own_process_opens(self, devices: tuple[FakeDevice, FakeDevice]) -> None:
        handle = devices[0].lend(devices[0].allocate(4))
        with pytest.raises(MemoryMisuse, match="its own handle"):
            devices[0].borrow(handle)

    def test_memory_that_is_used_after_it_was_given_back(
        self, devices: tuple[FakeDevice, FakeDevice]
    ) -> None:
        memory = devices[0].allocate(4)
        borrowed = devices[1].borrow(devices[0].lend(memory))
        into = torch.zeros(4, dtype=torch.uint8)
        devices[1].copy([into], [borrowed])
        with pytest.raises(MemoryMisuse, match="while it is used"):
            devices[1].end(borrowed)
        devices[1].finish()
        devices[1].end(borrowed)
        with pytest.raises(MemoryMisuse, match="not borrowed"):
            devices[1].copy([into], [borrowed])
        with pytest.raises(MemoryMisuse, match="not borrowed"):
            devices[1].end(borrowed)

    def test_memory_that_is_freed_or_written_to_while_others_have_it(
        self, devices: tuple[FakeDevice, FakeDevice]
    ) -> None:
        memory = devices[0].allocate(4)
        handle = devices[0].lend(memory)
        borrowed = devices[1].borrow(handle)
        with pytest.raises(MemoryMisuse, match="freed while others"):
            devices[0].end(memory)
        with pytest.raises(MemoryMisuse, match="written to while others"):
            devices[0].copy([memory], [torch.zeros(4, dtype=torch.uint8)])
        devices[1].end(borrowed)
        devices[0].end(memory)
        with pytest.raises(MemoryMisuse, match="freed memory"):
            devices[1].borrow(handle)

    def test_a_device_without_room_says_so(self) -> None:
        with pytest.raises(DeviceError):
            FakeMachine(room=3).process(0).allocate(4)


class FakeCuda:
    """The calls of ``cuda.bindings`` by which memory comes and goes. An address is used again when it is free."""

    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self) -> None:
        self.there: dict[int, str] = {}

    def _comes(self, kind: str) -> tuple[int, int]:
        address = next(number for number in range(64, 1 << 20, 64) if number not in self.there)
        self.there[address] = kind
        return 0, address

    def _goes(self, kind: str, address: int) -> tuple[int]:
        assert self.there.pop(address) == kind
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        return self._comes("allocated")

    def cudaFree(self, address: int) -> tuple[int]:
        return self._goes("allocated", address)

    def cudaIpcMemHandle_t(self) -> SimpleNamespace:
        return SimpleNamespace(reserved=b"")

    def cudaIpcOpenMemHandle(self, handle: object, flags: int) -> tuple[int, int]:
        return self._comes("borrowed")

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[int]:
        return self._goes("borrowed", address)


@given(st.lists(st.sampled_from(["allocate", "borrow", "end the first", "end the last"]), max_size=12))
def test_memory_of_cuda_is_given_back_as_it_was_had(history: list[str]) -> None:
    """The address of memory that was freed may be that of memory that is borrowed later."""
    cuda, found = FakeCuda(), list[Any]()
    device: Any = object.__new__(CudaDevice)
    device._device, device._cuda, device._own = torch.device("cpu"), cuda, set()

    def tensor(place: Any, device: torch.device) -> SimpleNamespace:
        address, _ = place.__cuda_array_interface__["data"]
        return SimpleNamespace(data_ptr=lambda: address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch, "as_tensor", tensor)
        for event in [*history, *["end the first"] * len(history)]:
            if event == "allocate":
                found.append(device.allocate(8))
            elif event == "borrow":
                found.append(device.borrow(bytes(72)))
            elif found:
                device.end(found.pop(0 if event == "end the first" else -1))
    assert not cuda.there
