"""Weights from one role through another into an inference server, as the documents show it."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.documents import files
from tests.integration.harness import Script, Unirun
from tests.unit.weights.integrations import standins

MODEL = {"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}


def test_the_example_of_the_documents_brings_weights_into_a_server(
    unirun: Unirun, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in standins.vllm_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "unirun.weights.integrations.vllm_worker", raising=False)
    server = standins.Vllm(MODEL)
    try:
        result = unirun(
            "--roles",
            "actor=1,rollout=1",
            script(files("docs/weights.md")["rollouts.py"]),
            env={"SERVER": server.url},
        )
        assert result.code == 0, result.err
    finally:
        server.close()
    assert server.version == "1"
    assert server.seen[-1] == "/resume"
    assert all(value.any() for value in server.weights.values())
