"""Stale trajectories cost no more accuracy than the margin, with the decoupled loss and five seeds: three hours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

SETTINGS = ("samples=3000", "batch=125", "epochs=8", "updates=4")
"""Those of the ready GRPO: 192 steps of 1000 answers, of which the first fifty gain nothing."""


@pytest.mark.timeout(6 * 3600)
def test_with_the_decoupled_loss_staleness_costs_no_more_than_the_margin(tmp_path: Path) -> None:
    # The margin, ten points, and the bound are those of the script.
    plot = tmp_path / "staleness.png"
    command = [sys.executable, "-m", "experiments.staleness", "--root", str(tmp_path), "--out", str(plot)]
    env = {**os.environ, "UNIRUN_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*command, *SETTINGS], cwd=ROOT / "examples", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.stat().st_size > 10_000
