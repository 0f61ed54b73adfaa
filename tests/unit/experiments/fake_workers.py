"""Processes in memory that ask each other's shelves, and what is on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import torch

from unirun.errors import PeerLost
from unirun.experiments.model_worker import NAME, DataClient, DataStore, Lines
from unirun.experiments.sample import SequenceSample
from unirun.roles.transport.protocol import Parcel
from unirun.weights.messages import Query
from unirun.weights.tensors import LocalShard

Parts = Mapping[str, Any]
"""Tensors by name, some of them `LocalShard`."""


def copied(parcel: Parcel) -> Parcel:
    """A copy in memory of its own, as a socket would deliver it."""
    return Parcel(parcel.head, tuple(memoryview(bytearray(buffer)) for buffer in parcel.buffers))


class FakeConnection:
    """A `Line` to the shelf of a process, in memory. It keeps what was asked."""

    def __init__(self, shelf: DataStore) -> None:
        self.shelf = shelf
        self.asked: list[dict[str, Any]] = []
        self.breaks = 0
        """The number of times that the connection still breaks."""

    def ask(self, head: bytes) -> Future[Parcel]:
        if self.breaks:
            self.breaks -= 1
            lost: Future[Parcel] = Future()
            lost.set_exception(PeerLost("the connection has ended", worker="1"))
            return lost
        question = msgspec.json.decode(head, type=Query)
        assert question.name == NAME
        self.asked.append(msgspec.json.decode(question.body))
        future: Future[Parcel] = Future()
        self.shelf.answer(bytes(question.body), lambda parcel: future.set_result(copied(parcel)))
        return future


class FakeWorkers:
    """So many processes, each with a shelf; every one can ask every other one."""

    def __init__(self, count: int) -> None:
        self.shelves = [DataStore() for _ in range(count)]
        self.connections = [FakeConnection(shelf) for shelf in self.shelves]

    def getting(self, rank: int) -> DataClient:
        def line(other: int) -> FakeConnection:
            assert other != rank, "a process asks itself"
            return self.connections[other]

        return DataClient(rank, self.shelves[rank], cast("Lines", line), timeout=1.0)

    @property
    def asked(self) -> list[tuple[int, str, tuple[str, ...]]]:
        """The processes that were asked for data, with the key and ids."""
        return [
            (rank, want["key"], tuple(want["ids"]))
            for rank, wire in enumerate(self.connections)
            for want in wire.asked
        ]


def batch(count: int = 4) -> SequenceSample:
    """Ids with tokens (int64), numbers (bfloat16) and pictures, of different lengths; ids with none of one too."""
    lengths = [[at, 2] if at % 2 else [at] for at in range(count)]
    total = sum(sum(each) for each in lengths)
    return SequenceSample.packed(
        {
            "tokens": torch.arange(total) + 2**40,
            "logprobs": torch.randn(total, generator=torch.Generator().manual_seed(0)).bfloat16(),
            "image": torch.arange(6 * count, dtype=torch.uint8).view(count, 2, 3),
        },
        {"tokens": lengths, "logprobs": lengths, "image": [[1]] * count},
        [f"id{at}" for at in range(count)],
        row=[{"n": at} for at in range(count)],
    )


def rows(tensor: torch.Tensor, at: int, count: int, axis: int = 0) -> LocalShard:
    """The part `at` of `count` equal parts along an axis."""
    size = tensor.shape[axis] // count
    start = [0] * tensor.dim()
    start[axis] = at * size
    return LocalShard(tensor.narrow(axis, at * size, size).clone(), shape=tensor.shape, start=start)


NETWORK = {
    "a": torch.randn(12, 6, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(6, 12, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "norm": torch.randn(7, generator=torch.Generator().manual_seed(2)),
    "steps": torch.tensor(2**40 + 1),
}

Layout = Callable[[int], Parts]


def tensor_parallel(count: int) -> list[Parts]:
    """Each rank has rows of `a`, columns of `b`, and all of the rest."""
    return [
        {
            "a": rows(NETWORK["a"], at, count),
            "b": rows(NETWORK["b"], at, count, 1),
            "norm": NETWORK["norm"].clone(),
            "steps": NETWORK["steps"].clone(),
        }
        for at in range(count)
    ]


def pipeline(count: int) -> list[Parts]:
    """Each rank has some of the tensors."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for stage, (name, tensor) in zip(itertools.cycle(found), NETWORK.items()):
        stage[name] = tensor.clone()
    return [*found]


LAYOUTS: dict[str, list[Parts]] = {
    "whole": tensor_parallel(1),
    "whole twice": [*tensor_parallel(1), *tensor_parallel(1)],
    "tensor 2": tensor_parallel(2),
    "tensor 3": tensor_parallel(3),
    "tensor 6": tensor_parallel(6),
    "pipe 2": pipeline(2),
    "pipe 3": pipeline(3),
}
