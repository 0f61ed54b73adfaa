"""What a warm process does with itself before it waits."""

from __future__ import annotations

from pathlib import Path

from unirun.launcher.warm.process import leave_code


def of_files() -> int:
    """How many kB of this process's memory are pages of files."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {row[0]: int(row[1]) for row in rows}
    return sizes["Rss:"] - sizes["Anonymous:"]


def test_the_code_that_imports_have_run_is_given_back_and_comes_back_when_it_is_run() -> None:
    before = of_files()
    leave_code()
    assert of_files() < before
    assert sorted(str(number) for number in range(3)) == ["0", "1", "2"]
