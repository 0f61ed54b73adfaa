"""A model that a trial has saved, read by vLLM and by lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.engines.environment import binaries, python_with
from tests.engines.llama import LONGEST, is_greedy, llama, prompts
from tests.engines.server import ENVIRONMENT, KV_CACHE
from unirun.experiments import Model, ModelName, Place, topology
from unirun.experiments.models.api import FinetuneSpec, save_whole
from unirun.experiments.models.backends import InferenceBackend, causal_lm

LIMIT = 1800.0
SEED = 0

VLLM = f"""
import json, sys
from vllm import LLM, SamplingParams

model = LLM(
    model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len={LONGEST}, kv_cache_memory_bytes={KV_CACHE}
)
how = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
made = model.generate([{{"prompt_token_ids": each}} for each in json.loads(sys.argv[2])], how)
print("\\nfound", json.dumps([list(each.outputs[0].token_ids) for each in made]), flush=True)
"""

LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

model = HFLM(pretrained=sys.argv[1], device="cpu", dtype="float32", batch_size=1)
asked = [Instance("loglikelihood", {}, tuple(each), 0) for each in json.loads(sys.argv[2])]
print("\\nfound", json.dumps([float(score) for score, _ in model.loglikelihood(asked)]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(models: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as the interface of a trial saves it."""
    place = Place(ModelName("actor"), topology(), 0, torch.device("cpu"))
    tokenizer: Any = AutoTokenizer.from_pretrained(models(SEED))
    model = Model(place, causal_lm(place, path=str(models(SEED))), tokenizer)
    found = tmp_path_factory.mktemp("saved")
    save_whole(InferenceBackend().initialize(model, FinetuneSpec(1, 8, 8)), found)
    return found


def said(python: Path, script: str, folder: Path, given: Sequence[Any]) -> Any:
    """The JSON that a script prints for `given`, among other lines."""
    command = [str(python), "-c", script, str(folder), json.dumps(given)]
    env = {**os.environ, **ENVIRONMENT, "HF_HOME": str(folder.parent / "hub")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = (line for line in done.stdout.splitlines() if line.startswith("found "))
    return json.loads(found.removeprefix("found "))


def test_vllm_reads_a_saved_model(folder: Path) -> None:
    asked = prompts(4)
    found = said(binaries() / "python", VLLM, folder, asked)
    assert [len(each) for each in found] == [16] * 4
    network = llama(SEED)
    assert all(
        is_greedy(network, prompt + made, len(prompt)) for prompt, made in zip(asked, found, strict=True)
    )


def test_lm_eval_reads_a_saved_model(folder: Path) -> None:
    texts = [["1+2=", "3"], ["a b", " c"], ["the sum is", " 12."]]
    found = said(
        python_with("lm_eval", "lm-eval==0.4.13", alone=("accelerate==1.12.0",)), LM_EVAL, folder, texts
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    network = llama(SEED)
    for (context, words), score in zip(texts, found, strict=True):
        tokens = torch.tensor([tokenizer.encode(context + words)])
        with torch.no_grad():
            logprobs = network(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        assert score == pytest.approx(logprobs[-len(words) :].sum().item(), abs=1e-3)
