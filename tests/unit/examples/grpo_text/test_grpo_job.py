"""The whole job, small and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unirun import BaseWorkload, run_in_process

pytestmark = pytest.mark.leaves


def run(setting: dict[str, Any]) -> dict[str, float]:
    # Here, as transformers takes seconds, which every process that collects tests would spend.
    from grpo_text import Actor, GRPOTrainer, Reference, Reward, Rollout

    roles: dict[str, tuple[type[BaseWorkload], int]] = {
        "actor": (Actor, 1),
        "rollout": (Rollout, 2),
        "reference": (Reference, 1),
        "reward": (Reward, 1),
    }
    result: dict[str, float] = run_in_process(GRPOTrainer, roles, setting)
    return result


def small(out: Path, **more: Any) -> dict[str, Any]:
    quick = {"warmup_steps": 3, "steps": 3, "evaluate_every": 2, "prompts": 6, "group": 4, "held_out": 9}
    return quick | {"bar": -100.0, "out": str(out)} | more


def test_all_roles_play_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.png"
    result = run(small(out))
    assert set(result) == {"warm", "final"}
    assert all(0.0 <= share <= 1.0 for share in result.values())
    assert out.exists()
    printed = capsys.readouterr().out
    assert [line.split()[2] for line in printed.splitlines() if line.startswith("GRPO step")] == [
        "0",
        "2",
        "3",
    ]


def test_the_job_fails_below_its_bar(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="below the bar of 100 points"):
        run(small(tmp_path / "accuracy.png", bar=100.0))
