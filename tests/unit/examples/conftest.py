"""Makes the modules of the examples importable, as they are when one of them is run."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"

for name in ("", "ppo_cartpole", "sft_digits", "online_learning", "multimodal", "vllm_grpo"):
    sys.path.insert(0, str(EXAMPLES / name))


@pytest.fixture(scope="session", autouse=True)
def fonts() -> None:
    """On a fresh machine matplotlib lists the fonts at its first import, with a process, which no test here may start."""
    importlib.import_module("matplotlib.font_manager")
