"""The record of the files that processes enter between two marks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import simulated
from benchmarks.entered import VARIABLE, Entered
from benchmarks.figure import Bar, BenchmarkError
from benchmarks.suites.house import Journeys, Sides

PROGRAM = """
import os, threading
from benchmarks.entered import Entered
from house import before, marked, forked, threads, after

before.call()
with Entered.inherited().marked():
    marked.call()
    thread = threading.Thread(target=threads.call)
    thread.start()
    thread.join()
    if not (child := os.fork()):
        forked.call()
        os._exit(0)
    os.waitpid(child, 0)
after.call()
print(os.getpid(), child)
"""


@pytest.mark.starts_processes
def test_calls_between_the_marks_are_recorded_in_every_thread_and_process(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    for name in ("before", "marked", "forked", "threads", "after"):
        (package / f"{name}.py").write_text("def call(): ...\n")
    entered = Entered.new(tmp_path)
    variables = entered.variables(package)
    path = [variables.pop("PYTHONPATH"), str(tmp_path), str(Path(__file__).parents[3])]
    env = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    parent, child = map(int, done.stdout.split())
    assert entered.files({parent}) == ["marked.py", "threads.py"]
    assert entered.files({child}) == ["forked.py"]
    assert entered.files({parent, child}) == ["forked.py", "marked.py", "threads.py"]


def test_the_restart_in_the_simulation_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{Entered.new(tmp_path).folder}{os.pathsep}house")
    simulated.main(str(tmp_path / "result.json"))
    # This process has no recorder.
    assert json.loads((tmp_path / "result.json").read_text()) == {"cores": []}


FILES = Bar("files", "files", 3)


def test_a_file_counts_once_on_all_sides_of_a_journey() -> None:
    usual = {"caller": ["a.py", "b.py"], "called": ["b.py"]}
    runs = iter([usual, {"caller": ["a.py", "b.py", "c.py"], "called": []}, usual])
    journeys = Journeys("a call", 3, lambda: next(runs))
    assert journeys.figure(FILES).own == (2, 3, 2)
    assert journeys.figure(FILES, "called").own == (1, 0, 1)
    assert journeys.figure(FILES).note.splitlines() == ["caller, 2: a.py b.py", "called, 1: b.py"]


def test_a_journey_that_fails_does_not_hold() -> None:
    def fail() -> Sides:
        raise BenchmarkError("the job ended with 1")

    figure = Journeys("a call", 2, fail).figure(FILES)
    assert (figure.value, figure.fault, figure.holds) == (None, "the job ended with 1", False)
