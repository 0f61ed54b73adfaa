"""The requests to a server, in rounds: `Source`, and `Sender`, the base of the trainer engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch

from unirun.errors import Fault, WeightsError
from unirun.weights.integrations.checkpoint import Checkpoint
from unirun.weights.safetensors import Param
from unirun.weights.tensors import Weights, is_dtensor, tensors_of


class WeightSource(Protocol):
    """Whole tensors by name, as often as they are asked for: what vLLM calls a ``WeightSource``."""

    def metadata(self) -> list[Param]:
        """The metadata of the tensors that iteration yields, in the same order."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, from the first one."""


class Source:
    """The tensors of a module or a dict, with the names that they have there; the server has to know these names.

    It has what vLLM's engines for NCCL and CUDA IPC ask of a ``WeightSource``, so that it can be given to them, too.
    What sharded engines ask (``held_names``, ``groups``) it does not have.
    """

    def __init__(self, weights: Weights) -> None:
        """`weights` is looked at in every round. Raises `WeightsError` for tensors that are parts (DTensors)."""
        self._weights = weights
        self._tensors()

    def metadata(self) -> list[Param]:
        """Name, dtype and shape of each tensor."""
        return [Param(name, value.dtype, tuple(value.shape)) for name, value in self._tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors().items())

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = tensors_of(self._weights)
        whole = {n: v for n, v in tensors.items() if isinstance(v, torch.Tensor) and not is_dtensor(v)}
        parts = [
            Fault(
                name,
                f"a {type(tensors[name]).__name__} is a part",
                "receive into plain tensors, which are whole",
            )
            for name in tensors
            if name not in whole
        ]
        if parts:
            raise WeightsError("a server takes whole tensors", faults=parts)
        return whole


class Sender(ABC):
    """Gives the tensors of `source` to a server, through a `Checkpoint` that is written again in each round."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self._checkpoint: Checkpoint | None = None

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send all tensors, and return when the server has loaded them; its label for them is then `weight_version`.

        When it raises, the server may have some of the new tensors. Raises `ServerError`, `ServerTimeout`, and
        `WeightsError` with all tensors that cannot be sent.
        """
        params = tuple(Param(p.name, p.dtype, tuple(p.shape)) for p in self.source.metadata())
        if self._checkpoint is not None and self._checkpoint.params != params:
            self.shutdown()
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(params)
        try:
            self._checkpoint.write(self.source)
            self._deliver(self._checkpoint, weight_version)
        except BaseException:
            # The server may still read this memory, so it is not written again.
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Give the memory back. The next round takes new memory."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    @abstractmethod
    def _deliver(self, checkpoint: Checkpoint, weight_version: str | None) -> None:
        """Have the server load `checkpoint`, and wait for it."""
