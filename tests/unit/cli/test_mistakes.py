"""A word that is no script is told what it looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Compose
from unirun.cli.commandline import parse
from unirun.cli.compose import misplaced, warnings
from unirun.errors import SpecError, UsageError


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["config.lr=3"],
            "config.lr=3 changes a value of a job file, and no job file is named; write --config FILE",
        ),
        (["+config.lr=3", "train.py"], "no job file is named"),
        (["roles.actor.count=3", "train.py"], "no job file is named"),
        (["statsu"], "there is no command and no script 'statsu'; did you mean unirun status?"),
        (["log"], "did you mean unirun logs?"),
        (["-q", "status"], "status is a command, and stands before all options; write unirun status …"),
        (
            ["python", "train.py"],
            "unirun starts Python itself; leave it out, or write --no-python before it",
        ),
        (["run", "train.py"], "no command and no script 'run'; write unirun SCRIPT, or unirun --config FILE"),
        (["help"], "there is no command and no script 'help'; write unirun --help"),
        (["version"], "write unirun --version"),
        (
            ["--roles", "a=1", "b=1", "train.py"],
            "b=1 stands where the script is expected; write --roles a=1,b=1",
        ),
        (["--env", "A=1", "B=2", "train.py"], "B=2 stands where the script is expected; write --env B=2"),
        (
            ["--config", "job.yaml", "config.lr"],
            "config.lr has no value; write config.lr=VALUE, without blanks",
        ),
        (["--config", "job.yaml", "config.lr", "=", "3"], "config.lr has no value"),
    ],
)
def test_a_word_in_the_place_of_the_script_that_is_a_mistake_is_refused(
    compose: Compose, scripts: Path, argv: list[str], says: str
) -> None:
    (scripts / "job.yaml").write_text("{script: train.py, config: {lr: 1}}")
    with pytest.raises(UsageError) as caught:
        compose(*argv)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["train.py", "--nproc-per-node", "2"],
            "--nproc-per-node stands behind train.py, so it is an argument",
        ),
        (
            ["--roles", "a=1", "train.py", "--x", "--max_restarts=3"],
            "--max_restarts=3 stands behind train.py",
        ),
        (["train.py", "--config", "x.yaml"], ""),
        (["train.py", "--lr", "3"], ""),
    ],
)
def test_an_option_after_the_script_is_warned_of(argv: list[str], says: str) -> None:
    words = [*misplaced(parse(argv))]
    assert [says in word for word in words] == [True] * bool(says)


@pytest.mark.parametrize(
    ("environ", "options", "nodes"),
    [
        ({"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-3]"}, [], "n[2-3]"),
        ({"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n1"}, [], ""),
        ({"SLURM_JOB_NODELIST": "node-of-nobody[1-3]"}, [], "node-of-nobody[1-3]"),
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, ["--hosts", "n1,n2,n3"], ""),
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, ["--nnodes", "3", "--rdzv-endpoint", "n1"], ""),
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, ["--slurm", "nodes=2"], ""),
    ],
)
def test_nodes_of_an_allocation_that_a_job_does_not_use_are_told(
    compose: Compose, environ: dict[str, str], options: list[str], nodes: str
) -> None:
    told = warnings(parse([*options, "train.py"]), compose("train.py"), environ)
    expected = f"the allocation's nodes {nodes} are not used; start the job with: srun "
    assert [text.startswith(expected) for text in told] == [True] * bool(nodes)


@pytest.mark.parametrize("name", ["a=1", "statsu", "status", "python", "run"])
def test_a_file_with_the_name_of_a_command_is_run(compose: Compose, scripts: Path, name: str) -> None:
    (scripts / name).touch()
    assert compose(name).roles[0].entry.target == name


def test_a_program_may_have_any_name(compose: Compose) -> None:
    assert compose("--no-python", "python3", "x.py").roles[0].entry.target == "python3"


def test_a_word_that_is_near_nothing_is_a_missing_script(compose: Compose) -> None:
    with pytest.raises(SpecError, match="script 'rewards' does not exist; looked in"):
        compose("rewards")
