"""``unirun plan``: the picture above the table, and all of it for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirun.cli import main

TWO = ("--inventory", "fake:nodes=2,devices=2", "--roles", "a=2,b=1", "train.py")


def plan(*argv: str) -> int:
    with pytest.raises(SystemExit) as leave:
        main(["plan", *argv])
    assert isinstance(leave.value.code, int)
    return leave.value.code


def test_the_picture_is_above_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*TWO) == 0
    _, picture, table = capsys.readouterr().out.split("\n\n")
    assert picture == ("NODE   cuda 0  cuda 1  FREE\nnode0  a:0     a:1     0\nnode1  b:0     ·       1")
    assert table.startswith("ROLE")


def test_one_role_on_one_node_needs_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--inventory", "fake:devices=2", "--roles", "a=2", "train.py") == 0
    assert "FREE" not in capsys.readouterr().out


def test_the_picture_is_written_as_svg(capsys: pytest.CaptureFixture[str], scripts: Path) -> None:
    assert plan("--svg", "plan.svg", *TWO) == 0
    assert (scripts / "plan.svg").read_text(encoding="utf-8").startswith("<svg")
    assert plan("--svg", "no/such.svg", *TWO) == 2
    assert "no/such.svg cannot be written" in capsys.readouterr().err


def test_programs_are_told_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--json", *TWO) == 0
    whole = json.loads(capsys.readouterr().out)
    assert {*whole} == {"spec", "note", "spares", "crossing", "workers"}
    assert (whole["spares"], whole["crossing"]) == ([], 0.0)
    assert [(each["own"], each["share"], each["numa"]) for each in whole["workers"]] == [
        (["0"], 1.0, 0),
        (["1"], 1.0, 0),
        (["0"], 1.0, 0),
    ]
