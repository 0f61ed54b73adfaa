"""The ready asynchronous experiment with real vLLM as its server: the steps are on the policy that it has generated with."""

from __future__ import annotations

import json

import pytest

from tests.documents import ROOT
from tests.engines.environment import binaries
from tests.engines.server import ENVIRONMENT, START_TIMEOUT
from tests.integration.harness import Unirun
from unirun.experiments.buffer import Buffer

STEPS, ETA = 4, 1


def test_async_grpo_trains_on_what_vllm_has_generated_with_the_versions_of_its_steps(unirun: Unirun) -> None:
    env = {"PYTHONPATH": str(ROOT / "examples"), **ENVIRONMENT}
    trial = ("-e", "async-grpo", "-f", "vllm", "--module", "experiments.async_grpo")
    settings = (
        f"steps={STEPS}",
        "batch=4",
        f"eta={ETA}",
        "group=4",
        "updates=2",
        "samples=200",
        "servers=1",
        "ckpt_freq_steps=100",
    )
    engine = ("backend=vllm", f"python={binaries().parent}")
    result = unirun("experiment", "start", *trial, *settings, *engine, env=env, within=START_TIMEOUT)
    assert result.code == 0, result.err
    root = unirun.home / "experiments/async-grpo/vllm"
    figures = [json.loads(line) for line in (root / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in figures] == [*range(1, STEPS + 1)]
    # vLLM has the weights that are trained: its log-probabilities are those of a forward pass.
    assert figures[0]["actorTrain/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    buffer, newest = Buffer(root / "recover/buffer"), 0
    for line in map(json.loads, (root / "recover/buffer/taken.jsonl").read_text().splitlines()):
        sample = buffer.read(line["ids"])
        made = sample["versions"][~sample["prompt_mask"]]
        assert bool((made >= max(line["step"] - ETA, 0)).all() and (made <= line["step"]).all())
        newest = max(newest, int(made.max()))
    assert newest > 0
