"""Numbers of thousands of digits, and digits that are no numbers, are refused like any other nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.in_process import run_cli
from unirun.cli.output import screen_width

NUMBERS = ("9" * 5000, "9" * 30, "\u00b2", "nan", "-1")


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    Path("job.yaml").write_text("roles: {actor: {script: x.py, args: [1, 2]}}\n")


@pytest.mark.parametrize("number", NUMBERS, ids=["thousands", "thirty", "power", "nan", "negative"])
@pytest.mark.parametrize(
    "words",
    [
        "--nnodes N x.py",
        "--nnodes 2 --rdzv-endpoint h1:N x.py",
        "--nnodes 2 --rdzv-endpoint h1:1 --node-rank N x.py",
        "--rdzv-conf last_call_timeout=N x.py",
        "--nproc-per-node N x.py",
        "--max-restarts N x.py",
        "--roles actor=1:N x.py",
        "--hosts h1:N x.py",
        "--hosts h[1-N] x.py",
        "plan --inventory fake:nodes=N x.py",
        "plan --config job.yaml roles.actor.args.N=3",
        "plan --config job.yaml roles.actor.cpus=N",
        "plan --config job.yaml roles.actor.count=N",
        "plan --config job.yaml master_port=N",
        "plan --config job.yaml port_range=1-N",
        "plan --config job.yaml stdin=actor:N",
        "render slurm --nodes N x.py",
        "--slurm nodes=N --dry-run x.py",
        "--slurm nodes=1,cpus_per_task=N --dry-run x.py",
        "dashboard --port N",
        "top --interval N",
        "logs -n N",
        "logs --attempt N",
        "stop --grace N",
    ],
)
def test_it_is_refused_in_one_line(words: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*(word.replace("N", number) for word in words.split())) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("number", NUMBERS[:2])
def test_devices_whose_number_is_none_are_one(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--slurm", f"nodes=1,gres=gpu:{number}", "--dry-run", "--nproc-per-node", "gpu", "x.py")
    assert run_cli(*words) == 0
    assert f"--gres=gpu:{number}" in capsys.readouterr().out


@pytest.mark.parametrize("number", NUMBERS)
def test_a_screen_of_such_a_width_is_none(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", number)
    assert screen_width() is None
