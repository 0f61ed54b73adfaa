"""CPython's own tests end in a worker as they end in a fresh process.

They know more of processes than ours: of pools, signals, exit handlers, children. It takes half an hour: ``make soak``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import unirun
from tests.integration.harness import SCRIPTS, Unirun

__all__ = ["unirun"]

LIMIT = 1200.0
"""Seconds for all tests of one module."""

ONE = 120
"""Seconds for one of them."""

MODULES = (
    "test_atexit",
    "test_signal",
    "test_faulthandler",
    "test_subprocess",
    "test_fork1",
    "test_threading",
    "test_multiprocessing_main_handling",
    "test_multiprocessing_fork",
    "test_multiprocessing_spawn",
    "test_multiprocessing_forkserver",
)

WITHOUT = {"WithThreadsTestPool.test_terminate": "hangs now and then under plain python (3.11.7, spawn)"}
"""Tests that are not run, by the end of their id, with the reason."""

DIFFERENT: dict[str, str] = {}
"""Reasons for a different outcome in a worker, by the end of the test's id."""

pytestmark = [
    pytest.mark.timeout(4 * LIMIT),
    pytest.mark.skipif(
        importlib.util.find_spec("test.support") is None, reason="this Python has no package `test`"
    ),
]


class Runs:
    """Runs a module of tests, under plain python or in a worker."""

    def __init__(self, unirun: Unirun, module: str) -> None:
        self._unirun, self._module = unirun, module

    def outcomes(self, method: str, only: list[str]) -> dict[str, str]:
        """The outcome of each test by its id; `method` is ``python``, ``fork`` or ``exec``."""
        file = self._unirun.root / f"{method}.json"
        file.unlink(missing_ok=True)
        without = [f"-{name}" for name in WITHOUT]
        argv = [str(SCRIPTS / "cpython.py"), str(file), self._module, str(ONE), *without, *only]
        if method == "python":
            self._in_python(argv)
        else:
            logs = self._unirun.root / "logs"
            self._unirun("--start-method", method, "--log-dir", logs, *argv, within=LIMIT)
        assert file.exists(), f"{self._module} has run no test ({method}); see {self._unirun.root}"
        # Of a test that failed in more than one way, as of one that has ended, the last word counts.
        return dict(json.loads(line) for line in file.read_text().splitlines())

    def _in_python(self, argv: list[str]) -> None:
        with Path(self._unirun.root / "python.log").open("ab") as log:
            subprocess.run(
                [sys.executable, "-u", *argv],
                cwd=self._unirun.root,
                env=self._unirun.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                timeout=LIMIT,
                check=False,
            )

    def differences(self, only: list[str]) -> dict[str, str]:
        """The tests with a different outcome in a worker, by id, with the start method."""
        expected = self.outcomes("python", only)
        differ = {}
        for method in ("fork", "exec"):
            found = self.outcomes(method, only)
            for name in {**expected, **found}:
                if found.get(name) != expected.get(name):
                    differ[name] = f"{found.get(name)} ({method}) instead of {expected.get(name)}"
        return differ


@pytest.mark.parametrize("module", MODULES)
def test_cpythons_tests_end_in_a_worker_as_in_a_fresh_process(unirun: Unirun, module: str) -> None:
    runs = Runs(unirun, module)
    differ = runs.differences([])
    if differ:
        # Some fail now and then on a busy machine. What is different in a worker is so each time.
        differ = runs.differences([*differ])
    differ = {name: how for name, how in differ.items() if not name.endswith((*DIFFERENT,))}
    assert not differ, "\n".join(f"{name}: {how}" for name, how in differ.items())
