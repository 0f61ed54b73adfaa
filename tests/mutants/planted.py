"""Plants one bug after another, of the kinds that people make, and says which ones no test has noticed.

Each file of ``planted/`` is of one room, and each table in it is a bug: the `file`, the text that is replaced (`old`) and
what comes in its place (`new`), the `tests` that should notice, and what they notice it by. The text is in the file once;
a bug whose text is not there is stale, and refused. Bugs are planted in a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).parent / "planted"
TIME_LIMIT = 300.0
"""Seconds that the tests of one bug have. A bug that makes them hang is noticed."""

ENOUGH = 0.95
"""The share of the bugs that tests have to notice."""

KINDS = ("arithmetic", "second time", "exactly once", "half-written", "deadline", "leak", "mode", "wake-up")

PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "--timeout=120")

SMALL = 1 << 16
"""The size of the largest script, in bytes."""

LINKED = (
    "benchmarks",
    "docs",
    "examples",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
)


class Bug(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bug. `notices`: the model or the invariant that it breaks."""

    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    notices: str


def bugs() -> dict[str, Bug]:
    """All bugs, by ``ROOM/NAME``."""
    found = {}
    for path in sorted(LIST.glob("*.toml")):
        for name, table in tomllib.loads(path.read_text()).items():
            found[f"{path.stem}/{name}"] = msgspec.convert(table, Bug)
    return found


def stale(bug: Bug) -> str:
    """The reason why a bug cannot be planted in this tree; empty when it can."""
    path = ROOT / bug.file
    count = path.read_text().count(bug.old) if path.exists() else 0
    if count != 1:
        return f"{bug.file} has its text {count} times"
    absent = [each for each in bug.tests if not (ROOT / each.partition("::")[0]).exists()]
    return f"there is no {absent[0]}" if absent else ""


class Tree:
    """A copy of the tree, in which one bug at a time is planted, and of the environment, for which that is unirun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skipped = shutil.ignore_patterns("__pycache__")
        for name in ("unirun", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=skipped)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)
        self._environment(folder / ".venv", Path(sys.prefix))

    def _environment(self, made: Path, there: Path) -> None:
        """Make an environment with all that is in the present one. What names this tree, names the copy."""
        site = Path(sysconfig.get_path("purelib"))
        names = {made / "bin": there / "bin", made / site.relative_to(there): site}
        for here, source in names.items():
            here.mkdir(parents=True)
            for path in source.iterdir():
                text = path.read_bytes() if path.is_file() and path.stat().st_size < SMALL else b""
                if path.name.startswith("__editable__") or text.startswith(f"#!{there}".encode()):
                    text = text.replace(str(there).encode(), str(made).encode())
                    (here / path.name).write_bytes(
                        text.replace(str(ROOT).encode(), str(self.folder).encode())
                    )
                    shutil.copymode(path, here / path.name)
                else:
                    (here / path.name).symlink_to(path.readlink() if path.is_symlink() else path)
        shutil.copy(there / "pyvenv.cfg", made)
        self.python = str(made / "bin" / "python")

    def run(self, tests: Iterable[str], limit: float = TIME_LIMIT) -> str:
        """The end of the output of the tests when they fail, or take longer than `limit`; empty when they pass."""
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [self.python, "-m", "pytest", *PYTEST, *tests],
                cwd=self.folder,
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"not done within {limit:g} s"
            output.seek(0)
            lines = output.read().splitlines()
        if not code:
            return ""
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return (failed or lines or [f"pytest ends with {code}"])[-1]

    def plant(self, bug: Bug) -> str:
        """The end of the output of its tests with the bug, which is gone afterwards."""
        path, source = self.folder / bug.file, (ROOT / bug.file).read_text()
        path.write_text(source.replace(bug.old, bug.new))
        try:
            compile(path.read_text(), str(path), "exec")
            return self.run(bug.tests)
        finally:
            path.write_text(source)


def main() -> int:
    """Plant the bugs whose names have the given words in them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names or of kinds; all bugs without any")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    chosen = {
        name: bug
        for name, bug in bugs().items()
        if not options.words or any(word in f"{name} {bug.kind}" for word in options.words)
    }
    if refused := {name: why for name, bug in chosen.items() if (why := stale(bug))}:
        print(*(f"{name} is stale: {why}" for name, why in refused.items()), sep="\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(options.jobs):
            trees.put(Tree(Path(folder, str(number))))

        def planted(name: str) -> bool:
            tree, began = trees.get(), time.monotonic()
            try:
                said = tree.plant(chosen[name])
            finally:
                trees.put(tree)
            bug = chosen[name]
            word = f"noticed: {said}" if said else f"SURVIVED; it should be noticed by {bug.notices}"
            print(f"{name} ({bug.kind}, {time.monotonic() - began:.0f} s) {word}", flush=True)
            return bool(said)

        tree = trees.get()
        trees.put(tree)
        tests = sorted({test for bug in chosen.values() for test in bug.tests})
        # In forks, as in `make test`: the tests of a file may leave something that disturbs those of another one.
        forks = ("-p", "tests.forked", "--processes", str(options.jobs))
        if said := tree.run([*forks, *tests], len(chosen) * TIME_LIMIT):
            print(f"the tests fail without a bug: {said}")
            return 2
        with ThreadPoolExecutor(options.jobs) as pool:
            noticed = sum(pool.map(planted, chosen))
    print(f"{noticed} of {len(chosen)} are noticed")
    return int(noticed < ENOUGH * len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
