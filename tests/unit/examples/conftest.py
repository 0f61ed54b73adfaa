"""Makes the modules of the examples importable, as they are when one of them is run."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"

for name in ("ppo_cartpole", "sft_digits", "online_learning", "multimodal"):
    sys.path.insert(0, str(EXAMPLES / name))
