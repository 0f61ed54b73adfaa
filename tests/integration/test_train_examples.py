"""The examples of `Trainer`: a script beside the one it was made of, and a notebook, which is executed."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.documents import ROOT, blocks, pattern, text_of

from .harness import START_TIMEOUT, Unirun

pytestmark = [pytest.mark.usefixtures("warm_functions"), pytest.mark.long]

EXAMPLE = ROOT / "examples" / "train_function"
README = "examples/train_function/README.md"
SEARCH = ROOT / "examples/tune_digits/tune.py"
NOTEBOOK = ROOT / "examples" / "notebook" / "train.ipynb"
LARGEST = 60_000
"""Bytes of the stored notebook."""


class TestScript:
    def test_the_readme_shows_in_which_lines_the_distributed_script_differs(self) -> None:
        (shown,) = (block.text for block in blocks(README) if block.language == "diff")
        names = ("plain.py", "distributed.py")
        labels = [word for name in names for word in ("--label", name)]
        command = ["diff", "-u", *labels, *names]
        real = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, check=False).stdout
        assert shown == real
        changed = re.findall(r"^\+(?!\+\+).+$", real, re.MULTILINE)
        assert 3 <= len(changed) <= 8
        number = ["three", "four", "five", "six", "seven", "eight"][len(changed) - 3]
        assert text_of(README).startswith(f"# From one process to many, in {number} lines\n")

    @pytest.mark.chaos
    def test_distributed_training_is_as_accurate_as_plain_training_though_a_worker_is_killed(
        self, unirun: Unirun
    ) -> None:
        plain = unirun.start_program([sys.executable, str(EXAMPLE / "plain.py")])
        expected = final_accuracy(plain.end().out)
        assert expected > 0.95
        running = unirun.start_program([sys.executable, str(EXAMPLE / "distributed.py")])
        running.lines("^iteration 1: ")
        victim = unirun.pid_of("worker:1")
        running.lines("^iteration 3: ")
        os.kill(victim, signal.SIGKILL)
        running.lines("failure 1 of 3: worker:1 was killed by SIGKILL")
        done = running.end()
        assert done.code == 0, done.err
        assert final_accuracy(done.out) > expected - 0.01
        # Each epoch once, and in the report that has its number.
        reports = re.findall(r"^iteration (\d+): epoch (\d+),", done.out, re.MULTILINE)
        assert reports == [(str(number), str(number)) for number in range(1, 21)]
        for line in lines_of_readme():
            printed = (done.out + done.err).splitlines()
            assert any(pattern(line).fullmatch(each.strip()) for each in printed), line


def final_accuracy(printed: str) -> float:
    """The accuracy that both scripts print at their end."""
    found = re.search(r"^final accuracy (\S+)$", printed, re.MULTILINE)
    assert found, printed
    return float(found[1])


def lines_of_readme() -> list[str]:
    """The output that the page shows."""
    shown = (block.text for block in blocks(README) if block.language == "text")
    return [line for text in shown for line in text.splitlines()]


@pytest.fixture
def jupyter(unirun: Unirun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """A configuration with which kernels find nothing of this user, and leave nothing."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(unirun.root / name.lower()))
    # A port that is found free may be taken when the kernel listens; the path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        yield Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/socket"}})


class TestNotebook:
    @pytest.mark.chaos
    def test_the_notebook_runs_from_start_to_end_and_shows_what_it_is_stored_with(
        self, unirun: Unirun, jupyter: Config
    ) -> None:
        stored: Any = nbformat.read(NOTEBOOK, as_version=4)
        notebook = copy.deepcopy(stored)
        at_the_end: dict[int, str] = {}

        def executed(cell: Any, **_: Any) -> None:
            if cell is notebook.cells[-1]:
                at_the_end.update(unirun.processes())

        client = NotebookClient(
            notebook, timeout=int(START_TIMEOUT), config=jupyter, on_cell_executed=executed
        )
        client.execute(env=unirun.environment(), cwd=str(unirun.root))
        assert not [output for output in outputs(notebook) if output.output_type == "error"]
        assert [shown(cell) for cell in notebook.cells] == [shown(cell) for cell in stored.cells]
        (accuracy,) = re.findall(r"reads (\d+)% of", "".join(map(str, outputs(notebook))))
        assert int(accuracy) > 90
        assert len(at_the_end) == 1, "after shutdown there is the kernel alone"
        unirun.assert_nothing_left()

    def test_the_stored_notebook_says_nothing_of_the_machine_that_ran_it(self) -> None:
        stored: Any = nbformat.read(NOTEBOOK, as_version=4)
        nbformat.validate(stored)
        assert NOTEBOOK.stat().st_size < LARGEST
        kinds = [(output.output_type, output.get("name", "stdout")) for output in outputs(stored)]
        assert {*kinds} == {("stream", "stdout"), ("display_data", "stdout")}
        counts = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
        assert counts == [*range(1, len(counts) + 1)]
        assert {*stored.metadata} == {"kernelspec", "language_info"}
        assert {*stored.metadata.language_info} == {"name"}
        assert not [cell.metadata for cell in stored.cells if cell.metadata]
        texts = [output.get("text") or output.data["text/plain"] for output in outputs(stored)]
        place = re.compile(r"/(?:home|root|tmp|usr|work|Users)\b|\bPID\b|0x[0-9a-f]{6}")
        assert not [text for text in texts if place.search(text)]


def outputs(notebook: Any) -> list[Any]:
    """The outputs of all cells."""
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def shown(cell: Any) -> list[str]:
    """The output that a cell shows below it: lines of texts, with # for numbers, and the kinds of figures.

    Those of workers come in any order. What is told on stderr is left out, as matplotlib's list of fonts on a
    fresh machine.
    """
    lines: list[str] = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        lines += [kind for kind in data if kind != "text/plain"]
        if output.get("name") != "stderr":
            lines += (output.get("text") or data.get("text/plain", "")).splitlines()
    plain = (re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines)
    return sorted(" ".join(re.sub(r"\d[\d.e-]*", "#", line).split()) for line in plain)


class TestSearch:
    @pytest.mark.chaos
    def test_the_best_of_a_few_trials_is_told_and_they_are_drawn(self, unirun: Unirun) -> None:
        picture = unirun.root / "plot.png"
        command = [sys.executable, str(SEARCH), "--trials", "4", "--out", str(picture)]
        done = unirun.start_program(command).end()
        assert done.code == 0, done.err
        found = re.search(r"^accuracy (\S+)% with$", done.out, re.MULTILINE)
        assert found, done.out
        values = re.findall(r"finished with value: (\S+) and", done.err)
        assert len(values) == 4
        assert f"{max(map(float, values)):.1%}" == f"{found[1]}%"
        assert picture.read_bytes().startswith(b"\x89PNG")
