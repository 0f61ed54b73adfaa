"""``python -m benchmarks [SUITE…] [--runs N] [--json]``."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import cast

from benchmarks import suites
from benchmarks.figure import Figure
from benchmarks.table import table

Figures = Callable[[int], list[Figure]]
"""A suite: a function that measures each of its figures in this many runs."""


def suite_names() -> list[str]:
    """The modules of `benchmarks.suites`, in alphabetical order."""
    return sorted(found.name for found in pkgutil.iter_modules(suites.__path__) if found.name[0] != "_")


def load(name: str) -> Figures:
    """The function `figures` of a suite."""
    return cast(Figures, importlib.import_module(f"benchmarks.suites.{name}").figures)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 when every bar holds, else 1. Figures that need a missing program do not count."""
    names = suite_names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="unirun beside its peers.")
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"what to measure (default: all of {', '.join(names)})"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs per figure, of which the median counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error("--runs must be 1 or more")
    unknown = [name for name in options.suites if name not in names]
    if unknown:
        parser.error(f"there is no suite {', '.join(unknown)}; there are {', '.join(names)}")
    # As SystemExit, so that what was started is swept away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures = [figure for name in options.suites or names for figure in load(name)(options.runs)]
    if options.json:
        for figure in figures:
            for line in figure.fault.splitlines():
                print(f"{figure.bar.name}: {line}", file=sys.stderr)
        print(json.dumps({"figures": [figure.to_json() for figure in figures]}, indent=2, ensure_ascii=False))
    else:
        print(table(figures))
    return 0 if all(figure.holds or figure.missing for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
