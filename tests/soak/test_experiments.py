"""Each ready experiment learns, with three seeds: ten minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT


@pytest.mark.timeout(3600)
def test_each_ready_experiment_learns_with_three_seeds(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.prove",
        "--root",
        str(tmp_path),
        "--out",
        str(tmp_path / "learning.png"),
    ]
    env = {**os.environ, "UNIRUN_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "learning.png").stat().st_size > 10_000
