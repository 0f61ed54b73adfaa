"""Makes the modules of examples/ppo_cartpole importable, as they are when its train.py is the script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "ppo_cartpole"))
