"""``examples/vllm_grpo`` with real vLLM, as its README says: it learns, though an engine is killed meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.engines.environment import binaries
from tests.engines.server import START_TIMEOUT
from tests.integration.harness import Unirun

FOLDER = Path(__file__).parents[2] / "examples" / "vllm_grpo"
SEED, STEPS, BAR = 0, 20, 15.0
"""`BAR`: points of accuracy that it has to gain."""


def test_grpo_with_two_engines_learns_although_one_of_them_is_killed(unirun: Unirun, tmp_path: Path) -> None:
    model = tmp_path / "model"
    subprocess.run(
        [sys.executable, "prepare.py", model, str(SEED)], cwd=FOLDER, check=True, timeout=START_TIMEOUT
    )
    setting = (f"config.model={model}", f"config.seed={SEED}", f"config.steps={STEPS}")
    job = unirun.start(
        "--config", "job.yaml", *setting, f"roles.engine.python={binaries().parent}", cwd=FOLDER
    )
    job.lines(r"step +0  held-out", within=START_TIMEOUT)
    os.kill(int(unirun.workers()["engine:0"]["pid"]), signal.SIGKILL)
    job.lines(r"engine:0 was killed by SIGKILL; restart 1 of 10")
    done = job.end(START_TIMEOUT)
    assert done.code == 0, done.err
    accuracy = [float(found) for found in re.findall(r"held-out accuracy (\S+)%", done.out)]
    assert len(accuracy) == STEPS // 10 + 1
    assert accuracy[-1] >= accuracy[0] + BAR, accuracy
