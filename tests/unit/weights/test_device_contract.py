"""The contract of every `DeviceInterface`, in two processes that use it: the fake one everywhere, CUDA where there is a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.unit.weights.fake_device import FakeMachine
from unirun.weights.devices import CudaDevice, DeviceError, DeviceInterface

pytestmark = pytest.mark.starts_processes

SIZES = (1, 4096, 5 << 20)


class Hands:
    """One process that uses a device. Memory is known by numbers."""

    def __init__(self, device: DeviceInterface) -> None:
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}
        self._host: list[torch.Tensor] = []

    def _known(self, memory: torch.Tensor) -> int:
        number = len(self._memory)
        self._memory[number] = memory
        return number

    def allocate(self, size: int) -> int:
        return self._known(self._device.allocate(size))

    def write(self, number: int, value: int) -> None:
        """Begin to write `value` into all bytes, and wait until it is done."""
        memory = self._memory[number]
        self._host = [torch.full((memory.numel(),), value, dtype=torch.uint8)]
        self._device.copy([memory], self._host)
        self._device.finish()

    def read(self, number: int) -> list[int]:
        """The values of its bytes."""
        memory = self._memory[number]
        into = torch.empty(memory.numel(), dtype=torch.uint8)
        self._device.copy([into], [memory])
        self._device.finish()
        found: list[int] = into.unique().tolist()
        return found

    def lend(self, number: int) -> bytes:
        return self._device.lend(self._memory[number])

    def borrow(self, handle: bytes) -> int:
        return self._known(self._device.borrow(handle))

    def end(self, number: int) -> None:
        self._device.end(self._memory.pop(number))
        self._memory[-1 - number] = torch.empty(0)

    def free_bytes(self) -> int:
        """Memory of the GPU that nobody has; CUDA only."""
        free: int = torch.cuda.mem_get_info()[0]
        return free


class Remote:
    """`Hands` in another process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=obey, args=(theirs,), daemon=True)
        self._process.start()

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: object) -> Any:
            self._pipe.send((name, arguments))
            assert self._pipe.poll(60), f"{name} took too long"
            error, value = self._pipe.recv()
            if error is not None:
                raise DeviceError(error)
            return value

        return ask

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()


def obey(pipe: Connection) -> None:
    """Do what is asked for, in a process of its own."""
    hands = Hands(CudaDevice(0))
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send((None, getattr(hands, name)(*arguments)))
        except DeviceError as error:
            pipe.send((str(error), None))


@contextmanager
def remotes() -> Iterator[list[Remote]]:
    pair = [Remote(), Remote()]
    try:
        yield pair
    finally:
        for each in pair:
            each.kill()


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    if request.param == "fake":
        machine = FakeMachine()
        yield [Hands(machine.process(number)) for number in (0, 1)]
    else:
        with remotes() as found:
            yield found


@pytest.mark.parametrize("size", SIZES)
def test_what_one_process_has_written_the_other_reads(pair: list[Any], size: int) -> None:
    owner, reader = pair
    memory = owner.allocate(size)
    for value in (7, 250, 0):
        owner.write(memory, value)
        borrowed = reader.borrow(owner.lend(memory))
        assert reader.read(borrowed) == [value]
        reader.end(borrowed)
    owner.end(memory)


def test_memory_is_borrowed_again_after_it_was_written_again(pair: list[Any]) -> None:
    owner, reader = pair
    blocks = [owner.allocate(1 << 20) for _ in range(2)]
    for version in range(40):
        memory = blocks[version % 2]
        owner.write(memory, version)
        borrowed = reader.borrow(owner.lend(memory))
        assert reader.read(borrowed) == [version]
        reader.end(borrowed)


def test_both_lend_to_each_other(pair: list[Any]) -> None:
    memory = [each.allocate(100) for each in pair]
    for number, each in enumerate(pair):
        each.write(memory[number], number + 1)
    borrowed = [pair[1 - n].borrow(pair[n].lend(memory[n])) for n in (0, 1)]
    assert [pair[1 - n].read(borrowed[n]) for n in (0, 1)] == [[1], [2]]


@pytest.mark.parametrize("handle", [b"", b"what is this", b"\xff" * 72])
def test_a_handle_of_nothing_is_refused(pair: list[Any], handle: bytes) -> None:
    with pytest.raises(DeviceError):
        pair[1].borrow(handle)


@pytest.mark.gpu
class TestOnAGpu:
    def test_the_owner_frees_the_memory_also_when_a_borrower_was_killed(self) -> None:
        with remotes() as (owner, reader):
            owner.end(owner.allocate(1))
            before = owner.free_bytes()
            memory = owner.allocate(1 << 30)
            owner.write(memory, 3)
            assert reader.read(reader.borrow(owner.lend(memory))) == [3]
            reader.kill()
            owner.end(memory)
            assert owner.free_bytes() >= before - (64 << 20)
