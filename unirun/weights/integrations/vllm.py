"""Weights into a vLLM server on the same host, by vLLM's own weight-transfer API.

::

    client = vllm.Client("http://127.0.0.1:8000")
    engine = vllm.TrainerEngine(client, vllm.Source(model))
    version = channel.receive(into=model)
    with client.paused("keep"):
        engine.send_weights(str(version))

The server is started with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "unirun"}'``. vLLM
finds the engine of that name in each of its processes, by the entry point ``vllm.general_plugins`` of this package.
Weights go to its workers through shared memory (`checkpoint`): each maps it, and loads its own part.

Written to ``training/weight_transfer`` of vLLM's documentation at the time of v0.32.0 (2026; ``README.md`` at commit
0318007, ``base.md`` at 21713fb, ``nccl.md`` at 030ea52) and to ``serve/dev/rlhf/api_router.py`` at 0100a21. Tested
against a stand-in that follows them. Never run with vLLM itself, nor with a GPU, a quantized model or a model that is
sharded by vLLM: vLLM could not be installed.

For a trainer with a GPU of its own, vLLM has a way over NCCL (``WeightTransferTrainerFactory`` with
``NCCLTrainerInitInfo``), which by its documentation takes a `Client` and a `Source` as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from unirun.weights.integrations.checkpoint import Checkpoint
from unirun.weights.integrations.endpoint import Endpoint
from unirun.weights.integrations.sending import Sender, Source, WeightSource

__all__ = ["Client", "Source", "TrainerEngine", "register"]

BACKEND = "unirun"

HALF_NEW = "its log has the cause; start it again, as some of its weights may be new and others old"


class Client:
    """The HTTP routes of one vLLM server; a ``VLLMWeightSyncClient``.

    Each call waits at most `timeout` seconds, and raises `ServerError`, with the words of the server when it refuses,
    and `ServerTimeout`.
    """

    def __init__(self, url: str, *, timeout: float = 300.0, api_key: str = "") -> None:
        """`url` is ``http://host:port``; `api_key` is that of ``vllm serve --api-key``. Raises `UsageError`."""
        self._endpoint = Endpoint(url, timeout, api_key)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Phase 1, before the first round: what the server has to know of the trainer."""
        self._endpoint.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Phase 2: the server prepares for new weights."""
        self._endpoint.post("/start_weight_update", remedy=HALF_NEW)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Phase 3: it takes them. When this returns, it has loaded them."""
        self._endpoint.post("/update_weights", {"update_info": update_info}, HALF_NEW)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Phase 4: it does what comes after loading, and labels its outputs with `weight_version` from now on."""
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._endpoint.post("/finish_weight_update", body, HALF_NEW)

    @contextmanager
    def paused(self, mode: str = "abort") -> Iterator[None]:
        """Generation stands still meanwhile. When the block raises, it stays so: the weights may be half new.

        `mode` is vLLM's: ``abort`` ends requests at once, ``wait`` waits for them, ``keep`` goes on with them later.
        """
        self._endpoint.post(f"/pause?mode={mode}")
        yield
        self._endpoint.post("/resume")


class TrainerEngine(Sender):
    """Sends weights to the server's engine ``unirun``; a ``TrainerWeightTransferEngine`` in all but its base class.

    The base class would need vLLM in this process. One process makes it for each server.
    """

    def __init__(self, client: Client, source: WeightSource) -> None:
        super().__init__(source)
        self._client = client
        self._announced: Checkpoint | None = None

    def _deliver(self, checkpoint: Checkpoint, weight_version: str | None) -> None:
        if self._announced is not checkpoint:
            self._client.init_weight_transfer_engine({"path": checkpoint.path, "token": checkpoint.token})
            self._announced = checkpoint
        self._client.start_weight_update()
        self._client.update_weights({})
        self._client.finish_weight_update(weight_version)


@cache
def register() -> None:
    """Make the engine ``unirun`` known to vLLM. vLLM calls it in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "unirun.weights.integrations.vllm_worker", "WorkerEngine"
    )
