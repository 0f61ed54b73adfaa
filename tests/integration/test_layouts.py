"""A model computes the same in each layout: outputs, gradients and parameters after steps, and what it generates.

Ten families of decoders do so too, or are refused; `tests/soak/test_families.py` walks all that there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.effort import CHAOS
from unirun.experiments.starting import PRELOAD

from .harness import Unirun
from .test_trials import TRIALS

pytestmark = [pytest.mark.usefixtures("warm_models"), pytest.mark.long]

ONE = "111-ddp"
FEW = ["221-ddp", "212-fsdp2", "122-ddp-tied"]
MORE = [
    "211-ddp",
    "121-ddp",
    "112-ddp",
    "212-ddp",
    "122-ddp",
    "211-fsdp2",
    "221-fsdp2",
    "121-ddp-tied",
    "112-ddp-tied",
    "212-fsdp2-tied",
]
LAYOUTS = [*FEW, *(MORE if CHAOS else ())]
"""Ranks along data, tensor and pipe, the backend, and whether embeddings are tied."""


class Found:
    """The results of one layout."""

    def __init__(self, folder: Path) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.generated: dict[str, list[int]] = {}
        for path in sorted(folder.glob("[0-9].pt")):
            by_id, figures = torch.load(path)
            self.figures: list[dict[str, float]] = figures
            for each, (output, tokens) in by_id.items():
                self.outputs[each], self.generated[each] = output, tokens.tolist()
        self.network: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")


MODULES = ",".join(PRELOAD)
"""The ranks of both jobs are forked from a process that has imported these."""


@pytest.fixture(scope="module")
def folder(home: Unirun) -> Path:
    """All layouts were run by one job of four ranks."""
    path = home.root / "layouts"
    path.mkdir()
    script, layouts = TRIALS / "layouts.py", (ONE, f"{ONE}-tied", *LAYOUTS)
    result = home("--roles", "model=4", "--preload", MODULES, script, "--", path, *layouts, within=240)
    assert result.code == 0, result.err
    return path


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_rank_computes(folder: Path, layout: str) -> None:
    tied = layout.endswith("-tied")
    one, found = Found(folder / (f"{ONE}-tied" if tied else ONE)), Found(folder / layout)
    close(found.outputs, one.outputs)
    # What parameters have lost in two steps are the gradients.
    for ours, theirs in zip(found.figures, one.figures, strict=True):
        close(ours, theirs)
    close(found.network, one.network)
    assert found.generated == one.generated
    assert torch.equal(found.network["lm_head.weight"], found.network["model.embed_tokens.weight"]) == tied


FAMILIES = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mixtral": {},
    "gemma3_text": {},
    "starcoder2": {},
    "phi3": {"tensor": "no linear layers are as the plan has them"},
    "olmo2": {"tensor": "self_attn (with k_norm.weight, q_norm.weight)"},
    "gemma2": dict.fromkeys(
        ("tensor", "pipe", "fsdp2"), "the network changes its logits after the last layer"
    ),
    "gpt2": dict.fromkeys(("tensor", "pipe", "fsdp2"), "GPT2LMHeadModel is not built as Llama is"),
}
"""Families, and the layouts that each is refused in, with the reason."""


@pytest.fixture(scope="module")
def walked(home: Unirun) -> dict[str, dict[str, str]]:
    """The results of two ranks that have walked all families."""
    file = home.root / "families.json"
    script = TRIALS / "families.py"
    result = home("--roles", "model=2", "--preload", MODULES, script, "--", file, *FAMILIES, within=240)
    assert result.code == 0, result.err
    found: dict[str, dict[str, str]] = json.loads(file.read_text())
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.chaos
def test_a_family_computes_what_one_rank_computes_or_is_refused(
    walked: dict[str, dict[str, str]], family: str
) -> None:
    for layout, state in walked[family].items():
        why = FAMILIES[family].get(layout)
        if why is None:
            assert state == "equal"
        else:
            assert state.startswith(f"refused: models.actor@0: the family {family} cannot run")
            assert why in state
