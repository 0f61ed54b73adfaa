"""Weights into an SGLang server on the same host, by ``/update_weights_from_disk`` out of shared memory.

::

    client = sglang.SGLangClient("http://127.0.0.1:30000")
    engine = sglang.TrainerEngine(client, sglang.Source(model))
    version = channel.receive(into=model)
    with client.paused():
        engine.send_weights(str(version))

The "disk" is a folder with a link to memory: nothing is written to a disk, nothing is pickled, and the
server needs no plug-in, as its ranks load their parts as from any checkpoint.

Written to "SGLang for RL Systems" of SGLang's documentation in 2026 (``advanced_features/sglang_for_rl``, at commits
934953f and 067bfe9, which agree on what is used here). Tested against a stand-in that follows it and reads the folder
with the safetensors library. Never run with SGLang itself, nor with a GPU, a quantized model or several ranks: SGLang
could not be installed.

A model in SGLang may ignore names that it does not know, and say so in its log only. These routes are not used:
``/update_weights_from_distributed`` (NCCL, from a GPU of the trainer's) and ``/update_weights_from_tensor`` (CUDA IPC).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from unirun.weights.integrations.sending import ServerClient, Source, TrainerEngine

__all__ = ["SGLangClient", "Source", "TrainerEngine"]


class SGLangClient(ServerClient):
    """The HTTP routes of one SGLang server."""

    def update_weights_from_disk(self, model_path: str, weight_version: str | None = None) -> None:
        """Load the safetensors in the folder `model_path`; the cache is flushed.

        The format is named: a server that was started with ``--load-format dummy`` would make up weights again.
        """
        body = {"model_path": model_path, "load_format": "safetensors", "flush_cache": True}
        if weight_version is not None:
            body["weight_version"] = weight_version
        self.post("/update_weights_from_disk", body)

    def deliver(self, path: str, token: str, weight_version: str | None) -> None:
        """Have the server load the file at `path`, which it finds in a folder."""
        with tempfile.TemporaryDirectory(prefix="unirun-") as folder:
            os.symlink(path, os.path.join(folder, "model.safetensors"))
            self.update_weights_from_disk(folder, weight_version)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Generation stands still meanwhile; requests end with what they have. When the block raises, it stays so.

        SGLang's other modes keep requests, so that the cache cannot be flushed when weights change.
        """
        self.post("/pause_generation", {"mode": "abort"})
        yield
        self.post("/continue_generation")
