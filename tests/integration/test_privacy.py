"""The files of a job are private, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Script, Unirun


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_logs_below_log_dir_are_private(unirun: Unirun, script: Script) -> None:
    where = unirun.root / "logs"
    where.mkdir(mode=0o755)
    train = script("print('loss 1'); raise ValueError('failed')")
    options = ("--duplicate-stdout-filters", "loss", "--log-dir", where, "--rdzv-id", "mine")
    assert unirun(*options, train).code == 1
    found = [where / "mine", *(where / "mine").rglob("*")]
    names = {"filtered_stdout.log", "stdout.log", "stderr.log", "error.json"}
    assert {path.name for path in found} >= names
    assert {(path.is_dir(), mode(path)) for path in found} == {(True, 0o700), (False, 0o600)}
    assert [mode(path) for path in (unirun.home, unirun.home / "jobs", unirun.job_dir())] == [0o700] * 3


@pytest.mark.breaks("^directory .*/home has mode 777$")
def test_a_home_that_others_may_replace_is_refused_before_anything_starts(
    unirun: Unirun, script: Script
) -> None:
    unirun.home.mkdir(mode=0o777)
    result = unirun(script("print('never')"))
    assert (result.code, result.out) == (2, "")
    assert f"jobs are not safe in {unirun.home}/jobs: {unirun.home} may be written by all users" in result.err
    assert [*unirun.home.iterdir()] == []
