"""The package itself: its names, and the command."""

from __future__ import annotations

import subprocess
import sys

import pytest

import unirun
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
