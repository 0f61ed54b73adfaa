"""Weights that stay on a device, on a twin of one: what arrives, in which order memory is used, and when it is freed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.weights.pairs import Place, Reader, place
from tests.unit.weights.twin import Machine, Misuse, Twin
from unirun.weights.packing import DeviceError
from unirun.weights.publishing import Publisher

pytestmark = pytest.mark.starts_processes

SIZE = 1000


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def filled(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE,), value), "b": torch.full((3, 5), value, dtype=torch.bfloat16)}


def values(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {value for tensor in tensors.values() for value in tensor.float().unique().tolist()}


def on_device(here: Place, machine: Machine, *, tcp: bool = False) -> tuple[Publisher, str]:
    publisher, endpoint = here.publisher(tcp=tcp)
    device = machine.process(0)
    publisher._device = lambda _: device
    return publisher, endpoint


def reader(here: Place, endpoint: str, device: Twin | None) -> Reader:
    made = here.reader(endpoint)
    made._receiver._device = lambda _: device
    return made


class TestOnOneHost:
    def test_versions_go_from_device_to_device_and_the_memory_is_used_again(self, here: Place) -> None:
        machine = Machine()
        publisher, endpoint = on_device(here, machine)
        readers = [reader(here, endpoint, machine.process(number)) for number in (1, 2)]
        for version in range(20):
            publisher.publish(filled(float(version)), version)
            for each in readers:
                got = filled(-1.0)
                assert each.receive(got, version) == version
                assert values(got) == {float(version)}
                assert {one.path for one in each._receiver.last} == {"device memory"}
        assert not machine.borrowed
        # One with the current version, and one that the next is written to.
        assert len(machine.regions) == 2
        publisher.close()
        assert not machine.used

    def test_a_reader_on_the_host_gets_a_copy_that_is_made_when_the_first_one_asks(self, here: Place) -> None:
        machine = Machine()
        publisher, endpoint = on_device(here, machine)
        near, hosts = reader(here, endpoint, machine.process(1)), [reader(here, endpoint, None) for _ in "ab"]
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

    def test_a_device_that_cannot_be_reached_is_tried_once(
        self, here: Place, capfd: pytest.CaptureFixture[str]
    ) -> None:
        machine = Machine(reaches=False)
        publisher, endpoint = on_device(here, machine)
        far = reader(here, endpoint, machine.process(1))
        for version in range(3):
            publisher.publish(filled(float(version)), version)
            got = filled(-1.0)
            assert far.receive(got, version) == version
            assert values(got) == {float(version)}
        assert capfd.readouterr().err.count("there is no way to the other device") == 1

    def test_without_memory_on_the_device_weights_go_through_the_host(
        self, here: Place, capfd: pytest.CaptureFixture[str]
    ) -> None:
        machine = Machine(room=10)
        publisher, endpoint = on_device(here, machine)
        near = reader(here, endpoint, machine.process(1))
        publisher.publish(filled(3.0), 1)
        got = filled(-1.0)
        assert near.receive(got) == 1
        assert values(got) == {3.0}
        assert "weights go through the memory of the host" in capfd.readouterr().err

    def test_an_average_and_a_saved_file_have_the_version_of_the_device(self, here: Place) -> None:
        machine = Machine()
        publisher, endpoint = on_device(here, machine)
        near = reader(here, endpoint, machine.process(1))
        publisher.publish(filled(8.0), 1)
        got = filled(4.0)
        near.receive(got, eta=0.25)
        assert values(got) == {5.0}
        with publisher.current() as (_, packing, block):
            assert packing.view(block.memory, "w", packing.layout["w"].pieces[0].box).tolist() == [8.0] * SIZE
        assert not machine.borrowed

    def test_it_is_whole_while_the_next_ones_are_published(self, here: Place) -> None:
        machine = Machine()
        publisher, endpoint = on_device(here, machine)
        readers = [reader(here, endpoint, machine.process(1)), reader(here, endpoint, None)]
        seen: list[set[float]] = []

        def read(each: Reader) -> None:
            version = 0
            while version < 250:
                got = filled(-1.0)
                version = each.receive(got, version + 1)
                seen.append(values(got) - {float(version)})

        threads = [threading.Thread(target=read, args=(each,)) for each in readers]
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


class TestBetweenHosts:
    def test_a_version_on_a_device_is_sent_from_the_host(self, here: Place) -> None:
        machine = Machine()
        publisher, endpoint = on_device(here, machine, tcp=True)
        far = here.reader(endpoint, tcp=True)
        for version in range(3):
            publisher.publish(filled(float(version)), version)
            got = filled(-1.0)
            assert far.receive(got, version) == version
            assert values(got) == {float(version)}


class TestTheTwin:
    """It fails where a device would do anything."""

    @pytest.fixture
    def devices(self) -> tuple[Twin, Twin]:
        machine = Machine()
        return machine.process(0), machine.process(1)

    def test_memory_that_is_lent_before_it_is_written(self, devices: tuple[Twin, Twin]) -> None:
        memory = devices[0].allocate(4)
        devices[0].copy([memory], [torch.zeros(4, dtype=torch.uint8)])
        with pytest.raises(Misuse, match="lent before it is written"):
            devices[0].lend(memory)

    def test_a_handle_that_its_own_process_opens(self, devices: tuple[Twin, Twin]) -> None:
        handle = devices[0].lend(devices[0].allocate(4))
        with pytest.raises(Misuse, match="its own handle"):
            devices[0].borrow(handle)

    def test_memory_that_is_used_after_it_was_given_back(self, devices: tuple[Twin, Twin]) -> None:
        memory = devices[0].allocate(4)
        borrowed = devices[1].borrow(devices[0].lend(memory))
        into = torch.zeros(4, dtype=torch.uint8)
        devices[1].copy([into], [borrowed])
        with pytest.raises(Misuse, match="while it is used"):
            devices[1].end(borrowed)
        devices[1].finish()
        devices[1].end(borrowed)
        with pytest.raises(Misuse, match="not borrowed"):
            devices[1].copy([into], [borrowed])
        with pytest.raises(Misuse, match="not borrowed"):
            devices[1].end(borrowed)

    def test_memory_that_is_freed_or_written_to_while_others_have_it(
        self, devices: tuple[Twin, Twin]
    ) -> None:
        memory = devices[0].allocate(4)
        handle = devices[0].lend(memory)
        borrowed = devices[1].borrow(handle)
        with pytest.raises(Misuse, match="freed while others"):
            devices[0].end(memory)
        with pytest.raises(Misuse, match="written to while others"):
            devices[0].copy([memory], [torch.zeros(4, dtype=torch.uint8)])
        devices[1].end(borrowed)
        devices[0].end(memory)
        with pytest.raises(Misuse, match="freed memory"):
            devices[1].borrow(handle)

    def test_a_device_without_room_says_so(self) -> None:
        with pytest.raises(DeviceError):
            Machine(room=3).process(0).allocate(4)
