"""The package itself: its names, and the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unirun
from tests.documents import ROOT
from tests.waiting import WAIT_TIMEOUT


def test_dir_of_unirun_lists_names_before_they_are_imported() -> None:
    assert {*unirun.__all__, "__all__"} <= {*dir(unirun)}


@pytest.mark.starts_processes
def test_python_m_unirun_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unirun", "--version"],
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stdout[:7], done.stderr) == (0, "unirun ", "")


@pytest.mark.starts_processes
def test_the_sdist_has_each_file_of_the_repository(tmp_path: Path) -> None:
    """setuptools writes the list of its files without building it."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    lists = [
        sys.executable,
        "-c",
        "import setuptools; setuptools.setup()",
        "egg_info",
        "--egg-base",
        str(tmp_path),
    ]
    done = subprocess.run(lists, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    listed = {*(tmp_path / "torch_unirun.egg-info" / "SOURCES.txt").read_text().splitlines()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {*tracked.stdout.splitlines()} - listed == set()
    assert not [name for name in listed if "__pycache__" in name]
