"""Checks that the entry of a role exists and can be run, before anything starts."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from unirun.spec.classes import ELSEWHERE, Kind, Missing, missing_name
from unirun.spec.job import Entry

_NO_SCRIPTS = {
    ".yaml": "is a job file; write --config {}",
    ".yml": "is a job file; write --config {}",
    ".json": "is a job file; write --config {}",
    ".sh": "is a shell script; write --no-python ./{}",
    ".ipynb": "is a notebook; make a script of it: jupyter nbconvert --to script {}",
}

_MAIN = ("__main__.py", "__main__.pyc")
"""The files that Python runs when it is given a directory."""


def missing_entry(
    entry: Entry, cwd: str | None, python_path: Sequence[str], path: str | None = None
) -> Missing | None:
    """The reason why `entry` cannot be run in `cwd`; None when no reason is found. Programs are searched in `path`
    (None: PATH)."""
    match entry.kind:
        case "script":
            return _script(entry.target, Path(cwd or ".", entry.target))
        case "module":
            return _module(entry.target)
        case "program":
            return _program(entry.target, Path(cwd or ".", entry.target), path)
        case kind:
            what: Kind = "function" if kind == "function" else "class"
            return missing_name(entry.target, what, [cwd or ".", *python_path])


def _script(name: str, path: Path) -> Missing | None:
    if name == "-":
        return Missing("a script is read from stdin by its name", "write unirun /dev/stdin")
    # os.path answers False where pathlib raises: a name too long, a directory that may not be entered.
    if os.path.isdir(path) and not any(os.path.isfile(path / main) for main in _MAIN):
        return Missing(f"script {name!r} is a directory", "name the file in it")
    if not os.path.exists(path):
        return Missing(f"script {name!r} does not exist", _near(path))
    if not os.access(path, os.R_OK):
        return Missing(f"script {name!r} cannot be read", "check its permissions")
    if (words := _NO_SCRIPTS.get(path.suffix)) and not _is_python(path):
        problem, _, remedy = words.format(name.removeprefix("./")).partition("; ")
        return Missing(f"{name!r} {problem}", remedy)
    return None


def _is_python(path: Path) -> bool:
    """Return True if Python runs the file despite its suffix: a zip application, or a ``#!…python`` line."""
    import zipfile

    if os.path.isdir(path) or zipfile.is_zipfile(path):
        return True
    with open(path, "rb") as file:
        return re.match(rb"#!.*python", file.readline(1000)) is not None


def _near(path: Path) -> str:
    """The remedy: a script with a similar name, or the folder that was searched."""
    folder = os.path.abspath(path.parent)
    try:
        stems = [name.removesuffix(".py") for name in os.listdir(folder) if name.endswith(".py")]
    except OSError:
        stems = []
    if near := difflib.get_close_matches(path.name.removesuffix(".py"), stems, n=1):
        return f"did you mean {str(path.with_name(f'{near[0]}.py'))!r}?"
    return f"looked in {folder}; {ELSEWHERE}"


def _module(name: str) -> Missing | None:
    """Only the form of the name is checked: the module is found when it is imported."""
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        return Missing(f"{name!r} is a file and no module", f"write -m {dotted}, or leave out -m")
    if ":" in name:
        return Missing(f"{name!r} is a class and no module", f"give it to a role: --roles actor=1@{name}")
    return None


def _program(name: str, path: Path, folders: str | None) -> Missing | None:
    if "/" not in name and shutil.which(name, path=folders) is not None:
        return None
    if not os.path.isfile(path):
        return Missing(f"program {name!r} is not found", "give its path, or check PATH")
    if path.suffix == ".py" and not os.access(path, os.X_OK):
        return Missing(f"{name!r} is a Python script", "leave out --no-python")
    if "/" not in name:
        return Missing(f"program {name!r} is not on the PATH", f"write ./{name}")
    if not os.access(path, os.X_OK):
        return Missing(f"program {name!r} may not be executed", f"chmod +x {name}")
    return None
