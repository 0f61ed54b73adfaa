"""The nodes that a job is planned for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.in_process import run_cli
from unirun.cli.commandline import parse
from unirun.cli.compose import inventory_of
from unirun.collocation import local_inventory, parse_fake
from unirun.errors import UsageError

JobFile = Callable[[str], str]


def test_nodes_are_those_of_the_option_or_this_host() -> None:
    assert inventory_of(parse(["--inventory", "fake:nodes=2", "train.py"])) == parse_fake("fake:nodes=2")
    assert inventory_of(parse(["train.py"])) == local_inventory()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--roles", "actor=1@ppo:Actor"], "actor serves calls and nothing ends that; a --trainer would"),
        (
            ["--roles", "actor=1@ppo:Actor,rollout=1@ppo:Rollout"],
            "actor and rollout serve calls and nothing ends that; a --trainer would",
        ),
        (["--roles", "actor=1@ppo:Actor", "--trainer", "ppo:PPOTrainer"], ""),
        (["--roles", "actor=1@ppo:Actor,driver=1", "train.py"], ""),
        (["--roles", "actor=1@ppo:Actor,driver=1", "--primary", "actor", "train.py"], "actor serves calls"),
        (["train.py"], ""),
    ],
)
def test_a_job_that_nothing_ends_says_so_at_its_start(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert run_cli("plan", *argv) == 0
    error = capsys.readouterr().err
    assert error.startswith(
        "unirun: this job runs until it is stopped (Ctrl-C, unirun stop): " if says else ""
    )
    assert says in error
    assert len(error.splitlines()) == bool(says)


@pytest.mark.parametrize(
    "argv",
    [
        ("train.py",),
        ("-d", "train.py"),
        ("plan", "train.py"),
        ("status",),
    ],
    ids=" ".join,
)
def test_a_working_directory_that_is_gone_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", "beside")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run_cli(*argv) == 2
    assert capsys.readouterr().err == "unirun: the working directory is gone; call unirun in another one\n"
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", ["", "nodes=2", "slurm"])
def test_an_inventory_that_is_not_known_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="--inventory .* is none that is known; write fake:"):
        inventory_of(parse([f"--inventory={text}", "train.py"]))
