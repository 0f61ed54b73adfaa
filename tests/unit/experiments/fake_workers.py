"""Processes in memory that ask each other's stores, and what these have."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import torch

from unirun.experiments.model_worker import Ask, DataStore
from unirun.experiments.sample import SequenceSample
from unirun.roles.calls.call import InvocationRef
from unirun.weights.tensors import LocalShard

Parts = Mapping[str, Any]
"""Tensors by name, some of them `LocalShard`."""


class FakeWorkers:
    """So many processes, each with a store; every one can ask every other one. It keeps what was asked."""

    def __init__(self, count: int) -> None:
        self.stores = [DataStore(rank, self._asks(rank)) for rank in range(count)]
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []

    def _asks(self, rank: int) -> Ask:
        def ask(other: int, what: str, *request: Any) -> InvocationRef[Any]:
            assert other != rank, "a process asks itself"
            self.calls.append((other, what, request))
            future: Future[Any] = Future()
            try:
                # In memory of its own, as a call delivers it.
                future.set_result(copy.deepcopy(getattr(self.stores[other], what)(*request)))
            except Exception as error:  # noqa: BLE001 - a call raises what the method has raised
                future.set_exception(error)
            return cast("InvocationRef[Any]", future)

        return ask

    @property
    def asked(self) -> list[tuple[int, str, tuple[str, ...]]]:
        """The processes that were asked for data, with the key and ids."""
        return [(rank, key, tuple(ids)) for rank, what, (_, key, ids) in self.of("data")]

    def of(self, what: str) -> list[tuple[int, str, tuple[Any, ...]]]:
        """The calls of this method of a store."""
        return [call for call in self.calls if call[1] == what]


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
