"""Makes the package `benchmarks` importable, as it is from the root of a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
