"""The output that the launch suite reads: points of ranks, reports of imports, its surroundings."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.job import Point, environment, parse_points
from benchmarks.suites.launch import imported_modules


def test_points_are_read_line_by_line() -> None:
    assert parse_points("1 0 42 17.500000\n0 2 43 18.000000\n") == [
        Point(1, 0, 42, 17.5),
        Point(0, 2, 43, 18.0),
    ]


def test_a_point_that_is_still_being_written_is_left_out() -> None:
    assert parse_points("1 0 42 17.500000\n0 2 4") == [Point(1, 0, 42, 17.5)]


def test_imports_are_found_whatever_imported_them() -> None:
    report = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:       562 |        951 |         torch\n"
        "a line of the program: torchvision | 1 | torchvision\n"
        "import time:      3617 |       3617 | unirun.cli\n"
    )
    assert imported_modules(report) == {"imported package", "torch", "unirun.cli"}


def test_variables_that_would_change_the_measurement_do_not_reach_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("LANG", "C.UTF-8")
    env = environment(Path("/home/of/jobs"))
    assert not {"PET_NPROC_PER_NODE", "OMP_NUM_THREADS"} & env.keys()
    assert env["LANG"] == "C.UTF-8"
    assert env["UNIRUN_HOME"] == "/home/of/jobs"
