"""What the documentation says of job files is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unirun.spec import parse_job
from unirun.spec.parse import JOB_KEYS, LOG_KEYS
from unirun.spec.roles import ROLE_KEYS, TRAINER_KEYS
from unirun.spec.yaml import load_job_file

TEXT = (Path(__file__).parents[3] / "docs" / "job-file.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_job_file_is_one(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "serve.py"):
        Path(name).touch()
    Path("ppo.py").write_text("class Actor: ...\nclass Rollout: ...\nclass PPOTrainer: ...")
    Path("job.yaml").write_text(block.replace("/data", "."))
    assert parse_job(load_job_file("job.yaml"), count_slots=lambda _: 1, run_id="x").roles


def test_every_key_is_explained() -> None:
    keys = {*JOB_KEYS, *ROLE_KEYS, *TRAINER_KEYS, *(f"log.{key}" for key in LOG_KEYS)} - {"nproc_per_node"}
    assert {key for key in keys if not re.search(rf"\b{re.escape(key)}\b", TEXT)} == set()
