"""`unirun render`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from unirun.cli.commands import call
from unirun.errors import SpecError, UsageError


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text("name: my ppo\nscript: train.py\nroles: {actor: gpu, rollout: 2}\n")


def test_a_batch_script_for_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["slurm", "job.yaml", "roles.rollout.count=4", "--nodes", "2", "--gpus", "4"]
    assert call("render", argv) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --job-name=my-ppo\n" in text
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gres=gpu:4\n" in text
    assert " --config job.yaml roles.rollout.count=4 &\n" in text


def test_a_batch_script_asks_for_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    call("render", ["slurm", "--slurm", "nodes=3,partition=p,gres=gpu:1", "--gpus", "1", "job.yaml"])
    assert "#SBATCH --partition=p\n" in capsys.readouterr().out


@pytest.mark.parametrize(("form", "documents"), [("compose", 1), ("jobset", 2)])
def test_files_for_containers_say_how_the_token_is_made(
    form: str, documents: int, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [form, "job.yaml", "--image", "img:1", "--nodes", "2", "--gpus", "4", "args=[1]"]
    assert call("render", argv) == 0
    text = capsys.readouterr().out
    assert len([*yaml.safe_load_all(text)]) == documents
    assert "# head -c 32 /dev/urandom | " in text
    assert "args=[1]" in text


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("compose job.yaml --gpus 1", "needs --image"),
        ("compose job.yaml --gpus 1 --image i --slurm nodes=1", "only a batch script asks Slurm"),
        ("jobset job.yaml --nodes 0", "'0' is no number of nodes"),
        ("helm job.yaml", "invalid choice: 'helm'"),
    ],
)
def test_wrong_options_are_refused(argv: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        call("render", argv.split())


def test_faults_of_the_job_are_told() -> None:
    with pytest.raises(SpecError, match="has no GPU"):
        call("render", ["slurm", "job.yaml"])
    with pytest.raises(SpecError, match="no-such"):
        call("render", ["slurm", "no-such.yaml"])
