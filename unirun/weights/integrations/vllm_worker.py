"""`WorkerEngine`: the end of a weight transfer in each worker of a vLLM server. vLLM imports it, nobody else can.

Written to "Implementing a Custom Engine" in vLLM's ``training/weight_transfer/base.md``, and run in vLLM 0.32.0 on the
CPU (``make engines``); see `unirun.weights.integrations.vllm` for what was not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from unirun.errors import Fault, WeightsError
from unirun.weights.integrations.sending import read

REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that the loaders of vLLM's models raise for a foreign name or shape."""


NAMES = "publish the tensors under the names, and of the shapes, of the model's checkpoint"


class WeightsFile(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]
    """A file of weights in the trainer's memory."""

    def __init__(self, path: str, token: str) -> None:
        self.path, self.token = path, token


class WorkerEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads whole tensors in checkpoint format from the memory of the trainer, which is on this host."""

    init_info_cls = update_info_cls = WeightsFile

    def init_transfer_engine(self, init_info: WeightsFile) -> None:
        """Look whether the trainer's memory can be read here. Raises `UsageError`."""
        read(init_info.path, init_info.token)

    def start_weight_update(self) -> None:
        """Restore the layers to what a checkpoint has."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WeightsFile) -> None:
        """Load all tensors. Raises `UsageError`, and `WeightsError` with the first one that the model does not take, or
        with all parameters that it did not get."""
        tensors = read(update_info.path, update_info.token)
        last = ""

        def given() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for last in tensors:
                yield last, tensors[last]

        try:
            loaded = self.model.load_weights(given())
        except REFUSALS as error:
            # The first one only: another tensor cannot be tried now, as layers that were loaded before it take none.
            raise WeightsError(
                "the model does not take this tensor",
                NAMES,
                faults=[Fault(last, f"{type(error).__name__}: {error}")],
            ) from error
        # As vLLM's own loader does: a quantized model has parameters that no checkpoint has.
        if loaded is not None and self.model_config.quantization is None:
            missing = sorted({name for name, _ in self.model.named_parameters()} - set(loaded))
            if missing:
                raise WeightsError(
                    "the model did not get these parameters",
                    NAMES,
                    faults=[Fault(name, "no tensor is for it") for name in missing],
                )

    def finish_weight_update(self) -> None:
        """Process what was loaded, as vLLM's own engines do. The trainer's memory is not read any more after it."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between rounds."""
