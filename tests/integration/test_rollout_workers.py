"""Rollout workers that put groups of trajectories into the queue of a trial, one of which dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.harness import Unirun

TRIALS = Path(__file__).parent / "scripts" / "trials"


@pytest.mark.usefixtures("warm_models")
def test_groups_of_rollout_workers_arrive_once_and_never_too_old_though_one_worker_dies(
    unirun: Unirun, tmp_path: Path
) -> None:
    job = {
        "name": "rolling",
        "roles": {
            "model_worker": {"count": 1, "workload": "rolling:Consumer"},
            "rollout_worker": {"count": 2, "workload": "rolling:Rolling", "max_restarts": 3},
        },
        "trainer": "rolling:Taker",
        "config": {"experiment": "rolling", "trial": "first", "root": str(tmp_path), "modules": ["rolling"]},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    result = unirun("--config", tmp_path / "job.json", env={"PYTHONPATH": str(TRIALS)})
    assert result.code == 0, result.err
    assert "32 groups, 32 ids, ages 0 to 1" in result.out, result.out
    assert "rollout_worker:0" in result.err
    lines = [*map(json.loads, (tmp_path / "trajectories" / "1.jsonl").read_text().splitlines())]
    assert lines[0]["trajectories"][0]["text"].endswith("=AB")
