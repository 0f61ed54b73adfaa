"""The plugin that runs tests in forks, on small projects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.waiting import WAIT_TIMEOUT

pytestmark = pytest.mark.starts_processes

SHARED = """
import os, pathlib, pytest

@pytest.fixture(scope="session")
def ends(tmp_path_factory):
    yield
    pathlib.Path(f"ended-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(3))
def test_that_says_where_it_runs(ends, number):
    with open("ran", "a") as file:
        print(__name__, os.getpid(), file=file)
"""

CRASH = """
import os, signal

def test_before():
    pass

def test_that_ends_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    print("after")
    assert False
"""


def run(folder: Path, *options: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """pytest in three processes, on `modules`."""
    for name, source in modules.items():
        (folder / f"test_{name}.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Without the installed plugins, as their import takes longer than the tests.
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.forked"]
    return subprocess.run(
        [*command, "--processes", "3", *options],
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


def test_the_tests_of_a_file_run_in_one_process_whose_fixtures_end(tmp_path: Path) -> None:
    done = run(tmp_path, a=SHARED, b=SHARED, c=SHARED)
    assert (done.returncode, closing(done)) == (0, "9 passed"), done.stdout + done.stderr
    ran = {*(tmp_path / "ran").read_text().splitlines()}
    assert sorted(line.split()[0] for line in ran) == ["test_a", "test_b", "test_c"]
    ended = {path.name.removeprefix("ended-") for path in tmp_path.glob("ended-*")}
    assert ended == {line.split()[1] for line in ran}


def test_the_end_of_a_process_fails_its_test_and_the_others_run(tmp_path: Path) -> None:
    done = run(tmp_path, "-rA", a=CRASH, b=SHARED)
    assert (done.returncode, closing(done)) == (1, "2 failed, 4 passed"), done.stdout + done.stderr
    assert "FAILED test_a.py::test_that_ends_its_process - its process has ended with -9" in done.stdout
    assert "Captured stdout call ---" in done.stdout
    assert "FAILED test_a.py::test_after - assert False" in done.stdout


def test_nothing_is_begun_after_the_failure_that_is_the_last(tmp_path: Path) -> None:
    done = run(tmp_path, "-x", a="def test_that_fails():\n    assert False\n" + SHARED)
    assert (done.returncode, closing(done)) == (1, "1 failed"), done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()


def test_an_error_in_a_process_outside_of_tests_ends_the_run(tmp_path: Path) -> None:
    conftest = "def pytest_runtest_protocol(item):\n    raise ValueError('a plugin is broken')\n"
    (tmp_path / "conftest.py").write_text(conftest)
    done = run(tmp_path, a="def test_that_passes():\n    pass\n")
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "an error outside of tests" in done.stdout
    assert "ValueError: a plugin is broken" in done.stdout
