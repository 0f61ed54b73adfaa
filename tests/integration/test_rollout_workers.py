"""Rollout workers that put groups of trajectories into the queue of a trial, one of which dies."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.integration.harness import Unirun
from tests.waiting import eventually

STUB = Path(__file__).parents[1] / "testbed" / "engine.py"
TRIALS = Path(__file__).parent / "scripts" / "trials"


def job(root: Path, workload: str, count: int) -> Path:
    """The file of a job with rollout workers of this class."""
    made = {
        "name": "rolling",
        "roles": {
            "model_worker": {"count": 1, "workload": "rolling:Consumer"},
            "rollout_worker": {"count": count, "workload": workload, "max_restarts": 3},
        },
        "trainer": "rolling:Taker",
        "config": {"experiment": "rolling", "trial": "first", "root": str(root), "modules": ["rolling"]},
    }
    file = root / "job.json"
    file.write_text(json.dumps(made))
    return file


@pytest.mark.usefixtures("warm_models")
def test_groups_of_rollout_workers_arrive_once_and_never_too_old_though_one_worker_dies(
    unirun: Unirun, tmp_path: Path
) -> None:
    result = unirun("--config", job(tmp_path, "rolling:Rolling", 2), env={"PYTHONPATH": str(TRIALS)})
    assert result.code == 0, result.err
    assert "32 groups, 32 ids, ages 0 to 1" in result.out, result.out
    assert "rollout_worker:0" in result.err
    lines = [*map(json.loads, (tmp_path / "trajectories" / "1.jsonl").read_text().splitlines())]
    assert lines[0]["trajectories"][0]["text"].endswith("=AB")


@pytest.mark.chaos
@pytest.mark.usefixtures("warm_models")
@pytest.mark.timeout(900)
def test_five_thousand_episodes_are_open_in_one_worker_though_a_process_may_have_1024_files(
    unirun: Unirun, tmp_path: Path
) -> None:
    file = job(tmp_path, "rolling:Many", 1)
    made = json.loads(file.read_text())
    made["roles"]["model_worker"]["workload"] = "rolling:ConsumerOfMany"
    made["trainer"] = "rolling:Watcher"
    stub = [str(STUB), "--port", "{port}", "--latency", "1000", "--enable-scale-out"]
    # Each has 625 requests.
    made["roles"]["generation_server"] = {
        "program": sys.executable,
        "args": stub,
        "service": True,
        "ready": "http://{addr}/health",
        "count": 8,
    }
    file.write_text(json.dumps(made))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 16384))

    running = unirun.start("--config", file, env={"PYTHONPATH": f"{TRIALS}:{ROOT}"}, preexec_fn=limit)

    running.lines("begun", within=250)

    def open_ones() -> bool:
        assert running.popen.poll() is None, running.text
        return bool(unirun.workers()["rollout_worker:0"]["metrics"].get("rollout/episodes") == 5000)

    eventually(open_ones, "all episodes are open", 600)
    (tmp_path / "enough").touch()
    result = running.end()
    assert result.code == 0, result.err
    assert "Too many open files" not in result.err


@pytest.mark.usefixtures("warm_models")
def test_an_agent_that_cannot_be_made_ends_the_job_at_once_with_the_cause(
    unirun: Unirun, tmp_path: Path
) -> None:
    result = unirun("--config", job(tmp_path, "rolling:Broken", 1), env={"PYTHONPATH": str(TRIALS)})
    assert result.code != 0
    assert "the rollout workers cannot begin: FileNotFoundError: [Errno 2] No such file" in result.err
    assert "with an error that a restart cannot mend" in result.err
    assert "restart 1" not in result.err
