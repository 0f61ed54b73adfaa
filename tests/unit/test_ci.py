"""`.ci/run` with the Makefile, on a small project: a test that fails twice is a failure, one that fails once
is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.waiting import WAIT_TIMEOUT

ALWAYS = "def test_that_always_fails():\n    assert False\n"
FLAKY = """
import pathlib
def test_that_fails_once():
    seen = pathlib.Path("seen")
    before = seen.exists()
    seen.touch()
    assert before
"""


def run(folder: Path, source: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`.ci/run` on a project with one module of tests; its checks find nothing."""
    for name in (".ci/run", "Makefile", "tests/flaky.py", "tests/forked.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests" / "test_small.py").write_text(source)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, does in (
        ("python", f'{before}exec {sys.executable} "$@"'),
        ("ruff", "exit 0"),
        ("mypy", "exit 0"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    for stamp in (".installed", ".dev", ".system"):
        (folder / ".venv" / stamp).touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE"))}
    # Without the installed plugins, as their import takes longer than the tests.
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [folder / ".ci" / "run"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=False,
    )


def closing(done: subprocess.CompletedProcess[str]) -> str:
    """The last line, without the time."""
    return done.stdout.splitlines()[-1].partition(" in ")[0]


@pytest.mark.starts_processes
def test_a_test_that_passes_alone_is_named_as_flaky_and_the_run_passes(tmp_path: Path) -> None:
    done = run(tmp_path, FLAKY + "def test_that_passes():\n    pass\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nflaky: tests/test_small.py::test_that_fails_once has failed, and passes alone\n" in done.stdout
    assert closing(done) == "1 passed"


@pytest.mark.starts_processes
def test_nothing_is_run_again_after_a_crash_and_the_run_fails(tmp_path: Path) -> None:
    """`python` is pytest the second time only: the first time it leaves what pytest leaves after a crash."""
    ended = """mkdir -p .pytest_cache/v/flaky; echo '{"status": 1, "crashed": true}' >.pytest_cache/v/flaky/ended"""
    first = f'test -e .pytest_cache || {{ {ended}; echo "1 failed in 2.00s"; exit 1; }}; '
    done = run(tmp_path, FLAKY, before=first)
    assert done.returncode != 0, done.stdout + done.stderr
    assert "not run again: a process of the tests has crashed" in done.stdout
    assert closing(done) == "1 failed"


@pytest.mark.starts_processes
def test_a_test_that_fails_twice_is_a_failure_whatever_the_others_do(tmp_path: Path) -> None:
    done = run(tmp_path, FLAKY + ALWAYS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\nflaky: tests/test_small.py::test_that_fails_once " in done.stdout
    assert "flaky: tests/test_small.py::test_that_always_fails" not in done.stdout
    assert closing(done) == "1 failed, 1 passed"
