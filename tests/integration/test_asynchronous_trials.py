"""Asynchronous trials whose rollout workers make trajectories by themselves, and whose processes are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT

from .harness import Unirun
from .test_trials import TRIALS, environment

pytestmark = [pytest.mark.usefixtures("warm_models"), pytest.mark.timeout(300), pytest.mark.long]

STEPS, BATCH, ETA = 8, 4, 1


def run(unirun: Unirun, name: str, kills: str = "") -> tuple[Path, Any]:
    """A trial to its end."""
    root = unirun.root / "trials" / name
    env = environment(unirun, KILL=kills, TRAINED=str(root / "trained"))
    env["PYTHONPATH"] += f":{ROOT}"
    made = [sys.executable, str(TRIALS / "stub_rollouts.py"), str(root), f"stub-{name}"]
    subprocess.run(made, check=True, env=env, timeout=120)
    result = unirun("--config", root / "job.json", env=env, within=240)
    assert result.code == 0, result.err
    return root, result


def check(root: Path) -> None:
    """Each step has trained on trajectories of its own, not too old; what was made again is the same."""
    trained: dict[int, set[frozenset[str]]] = {}
    parts: dict[tuple[int, int], set[frozenset[str]]] = {}
    for line in map(json.loads, (root / "trained").read_text().splitlines()):
        parts.setdefault((line["step"], line["rank"]), set()).add(frozenset(line["ids"]))
    for (step, _), some in parts.items():
        # In each attempt the same ones.
        assert len(some) == 1, parts
        trained.setdefault(step, set()).update(some)
    steps = {step: frozenset().union(*some) for step, some in trained.items()}
    assert [*steps] == [*range(STEPS)]
    assert all(len(ids) == BATCH for ids in steps.values())
    assert len(frozenset().union(*steps.values())) == STEPS * BATCH
    taken = [json.loads(line) for line in (root / "recover/buffer/taken.jsonl").read_text().splitlines()]
    # Those of the steps that a checkpoint goes back to: there is one after every second step, and two are kept.
    assert [line["step"] for line in taken] == [*range(STEPS - 2, STEPS)]
    assert all(frozenset(line["ids"]) == steps[line["step"]] for line in taken)
    figures = [json.loads(line) for line in (root / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in figures] == [*range(1, STEPS + 1)]
    assert [line["train/groups"] for line in figures] == [BATCH] * STEPS
    assert [line["train/w"] for line in figures] == pytest.approx(
        [each / 2 * 2 for each in range(1, STEPS + 1)]
    )
    ages = [
        int(key.rpartition("_")[2])
        for line in figures
        for key in line
        if key.startswith("trajectories/staleness_")
    ]
    assert max(ages) <= ETA
    assert sum(line["trajectories/rejected"] for line in figures) > 0


def test_what_rollout_workers_make_is_trained_on_once_in_the_order_of_arrival(home: Unirun) -> None:
    root, _ = run(home, "unbroken")
    check(root)


@pytest.mark.chaos
def test_whatever_dies_no_accepted_trajectory_is_lost_or_used_twice(home: Unirun) -> None:
    kills = "put:3:0,train:2:0,train:4:1,checkpoint:2:0,restore:2:1,trainer@train:6:0"
    root, result = run(home, "broken", kills)
    check(root)
    assert "goes on from its last checkpoint" in result.err
