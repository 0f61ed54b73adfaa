"""`WorkerEngine`: the end of a weight transfer in each worker of a vLLM server. vLLM imports it, nobody else can.

Written to "Implementing a Custom Engine" in vLLM's ``training/weight_transfer/base.md``, at commit 21713fb. vLLM's base
class and its layerwise reload have been stand-ins wherever this has run; see `unirun.weights.integrations.vllm`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from unirun.errors import Fault, WeightsError
from unirun.weights.integrations.checkpoint import read

REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that the loaders of vLLM's models raise for a foreign name or shape."""


class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The place where the trainer writes its tensors in each round."""

    def __init__(self, path: str, token: str) -> None:
        self.path, self.token = path, token


class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: the trainer's memory says itself what it has."""


class WorkerEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads whole tensors in checkpoint format from the memory of the trainer, which is on this host."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Look whether the trainer's memory can be read here. Raises `UsageError`."""
        read(init_info.path, init_info.token)
        self._where = init_info

    def start_weight_update(self) -> None:
        """Restore the layers to what a checkpoint has."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors. Raises `UsageError`, and `WeightsError` with all that the model does not take or misses."""
        tensors = read(self._where.path, self._where.token)
        try:
            loaded = self.model.load_weights(iter(tensors.items()))
        except REFUSALS as error:
            faults = self._refused(tensors) or [Fault("", f"{type(error).__name__}: {error}")]
            raise WeightsError("the model does not take these tensors", faults=faults) from error
        # As vLLM's own loader does: a quantized model has parameters that no checkpoint has.
        if loaded is not None and self.model_config.quantization is None:
            missing = sorted({name for name, _ in self.model.named_parameters()} - set(loaded))
            if missing:
                raise WeightsError(
                    "the model did not get these parameters",
                    "publish the tensors under the names of the model's checkpoint",
                    faults=[Fault(name, "no tensor is for it") for name in missing],
                )

    def _refused(self, tensors: Mapping[str, torch.Tensor]) -> list[Fault]:
        """Every tensor that the model does not take by itself; loading many ends with the first one."""
        faults = []
        for name, tensor in tensors.items():
            try:
                self.model.load_weights(iter([(name, tensor)]))
            except REFUSALS as error:
                faults.append(Fault(name, f"{type(error).__name__}: {error}"))
        return faults

    def finish_weight_update(self) -> None:
        """Process what was loaded, as vLLM's own engines do. The trainer's memory is not read any more after it."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between rounds."""
