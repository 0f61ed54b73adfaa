"""``unirun graph``: the edges of a job file, or those that follow from a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from unirun.cli import main

LOOP = """
script: train.py
roles: {actor: 2, rollout: 4}
edges:
  - {from: actor, to: rollout, invocation: load, kind: broadcast, async: true, weight: 2GB}
  - "rollout -> actor: update"
"""
TREE = "actor ×2\n└─ load · broadcast · 2.0 GB ⇢ rollout ×4\n   └─ update · all_to_all → actor ×2 (above)\n"


def graph(*argv: str) -> int:
    with pytest.raises(SystemExit) as leave:
        main(["graph", *argv])
    assert isinstance(leave.value.code, int)
    return leave.value.code


def test_a_tree_is_drawn_of_the_edges(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]
) -> None:
    assert graph("--config", job_file(LOOP)) == 0
    output = capsys.readouterr()
    assert output.out == TREE
    assert output.err == ""


def test_a_trainer_without_edges_calls_every_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert graph("--roles", "actor=1@ppo:Actor,rollout=2@ppo:Rollout", "--trainer", "ppo:PPOTrainer") == 0
    assert capsys.readouterr().out == ("trainer ×1\n├─ one_to_one → actor ×1\n└─ scatter → rollout ×2\n")


@pytest.mark.parametrize(
    ("form", "begins"), [("mermaid", "flowchart LR"), ("dot", "digraph"), ("svg", "<svg")]
)
def test_other_forms_by_their_names(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str], form: str, begins: str
) -> None:
    assert graph("--format", form, "--config", job_file(LOOP)) == 0
    assert capsys.readouterr().out.startswith(begins)


def test_a_file_is_written(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str], scripts: Path
) -> None:
    assert graph("--format", "svg", "-o", "job.svg", "--config", job_file(LOOP)) == 0
    assert capsys.readouterr().out == ""
    assert ElementTree.fromstring((scripts / "job.svg").read_text(encoding="utf-8")).tag.endswith("svg")


def test_what_is_odd_is_said_beside_the_picture(
    capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]
) -> None:
    path = job_file("{script: train.py, roles: {a: 1, b: 1, c: 1}, edges: ['a -> b']}")
    assert graph("--config", path) == 0
    output = capsys.readouterr()
    assert output.err.startswith("unirun: role c has no edge")
    assert output.out == "a ×1\n└─ one_to_one → b ×1\nc ×1\n"


def test_every_fault_is_told(capsys: pytest.CaptureFixture[str], job_file: Callable[[str], str]) -> None:
    path = job_file("{script: train.py, roles: {actor: 1, b: 1}, edges: ['actr -> b', 'b -> b']}")
    assert graph("--config", path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any("edges[0]" in line and "actor" in line for line in lines)
    assert any("edges[1]" in line for line in lines)


def test_nodes_that_are_not_there_count_too(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--inventory", "fake:devices=8", "--nproc-per-node", "gpu", "train.py")
    assert graph(*argv) == 0
    assert capsys.readouterr().out == "default ×8\n"


def test_a_file_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert graph("-o", "no/such/folder.txt", "train.py") == 2
    assert (
        capsys.readouterr().err == "unirun: no/such/folder.txt cannot be written: no such file or directory\n"
    )
