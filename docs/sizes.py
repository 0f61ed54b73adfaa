"""Prints which packages unirun and its extras install, and their sizes in this environment, as a table.

Run ``python docs/sizes.py`` after ``pip install .[EXTRA,…]``. Extras that are not installed are left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the table: unirun, what it needs besides torch, torch, and what each extra adds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = closure(["torch"], set())
    needed = names(project["dependencies"])
    base = closure(project["dependencies"], torch)
    print("| what | packages | size |\n| --- | --- | --- |")
    print(f"| unirun | {project['name']} | {megabytes(tree(ROOT / 'unirun'))} |")
    print(row("its dependencies but for torch", [each for each in needed if each != "torch"], base))
    print(row(f"torch {distribution('torch').version}", ["torch"], torch))
    for extra, more in project["optional-dependencies"].items():
        if extra != "dev":
            try:
                print(row(f"`{extra}`", names(more), closure(more, torch | base)))
            except PackageNotFoundError:
                continue


def closure(requirements: Iterable[str], there: set[str]) -> set[str]:
    """The distributions that `requirements` install, but for those that are `there`."""
    found: set[tuple[str, str]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        wanted = todo.pop()
        key = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if key in there or (key, extra) in found:
                continue
            found.add((key, extra))
            for text in distribution(key).requires or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append(needed)
    return {name for name, _ in found}


def names(requirements: Iterable[str]) -> list[str]:
    """The names in requirements, without versions."""
    return [str(canonicalize_name(Requirement(text).name)) for text in requirements]


def row(what: str, named: list[str], every: set[str]) -> str:
    """A row of the table."""
    size = sum(size_of(distribution(name)) for name in every)
    others = len(every.difference(named))
    more = f" and {others} other{'s' * (others > 1)}" if others else ""
    return f"| {what} | {', '.join(named)}{more} | {megabytes(size)} |"


def size_of(package: Distribution) -> int:
    """The bytes of the files of a distribution."""
    paths = [Path(str(package.locate_file(file))) for file in package.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def tree(folder: Path) -> int:
    """The bytes of the files in a folder, but for compiled modules."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")


def megabytes(size: int) -> str:
    """``12 MB``"""
    return f"{size / 1e6:.1f} MB" if size < 10e6 else f"{size / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
