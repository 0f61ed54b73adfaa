"""Roles whose entry is a function of a module."""

from __future__ import annotations

from pathlib import Path

from tests.integration.harness import Unirun

MODULE = """
import sys
import torch.distributed as dist

def main(ctx):
    dist.init_process_group("gloo")
    print(f"{ctx.role}:{ctx.rank} of {dist.get_world_size()} {sys.argv}")

def alone():
    print("alone")
    return 3
"""

JOB = """
roles:
  train: {count: 2, function: "steps:main", args: [--lr, 1]}
  data: {count: 1, function: "steps:alone", start_method: exec}
"""


def test_each_rank_calls_its_roles_function(unirun: Unirun, tmp_path: Path) -> None:
    """A function may take the context or nothing; its return value is not an exit code."""
    (tmp_path / "steps.py").write_text(MODULE)
    (tmp_path / "job.yaml").write_text(JOB)
    result = unirun("--cwd", tmp_path, "--config", tmp_path / "job.yaml")
    assert result.code == 0, result.err
    said = "\n".join(result.lines)
    for line in ("train:0 of 2", "train:1 of 2", "alone", "['steps:main', '--lr', '1']"):
        assert line in said


def test_a_role_may_run_a_function_from_the_command_line(unirun: Unirun, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(MODULE)
    result = unirun("--cwd", tmp_path, "--roles", "train=2@steps:main", "--", "--lr", "1")
    assert result.code == 0, result.err
    said = "\n".join(result.lines)
    for line in ("train:0 of 2", "train:1 of 2", "['steps:main', '--lr', '1']"):
        assert line in said


def test_a_missing_function_is_refused_before_anything_starts(unirun: Unirun, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(MODULE)
    (tmp_path / "job.yaml").write_text(JOB.replace("steps:main", "steps:mian"))
    result = unirun("--cwd", tmp_path, "--config", tmp_path / "job.yaml")
    assert result.code == 2
    assert "roles.train.function" in result.err
    assert "did you mean 'main'?" in result.err
