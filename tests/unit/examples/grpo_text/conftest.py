"""Makes the modules of examples/grpo_text importable, as they are when the example is run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[4] / "examples" / "grpo_text"))


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A model so small that a test is over at once, with weights large enough for clear preferences."""
    from llama import make_model

    made = make_model(seed=0, width=16, layers=2)
    for parameter in made.parameters():
        parameter.data *= 4.0
    return made
