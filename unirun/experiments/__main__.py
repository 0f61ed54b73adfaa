"""``python -m unirun.experiments start …`` is ``unirun experiment start …``."""

from __future__ import annotations

import runpy
import sys

sys.argv.insert(1, "experiment")
runpy.run_module("unirun", run_name="__main__", alter_sys=True)
