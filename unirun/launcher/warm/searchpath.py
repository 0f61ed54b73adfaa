"""Apply another PYTHONPATH in a fork, if the modules that are imported already would be found in the same files.

It is the only variable read at the start of an interpreter for which this is possible. Programs that submit jobs have
their own PYTHONPATH, so that workers can import from their folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

VARIABLE = "PYTHONPATH"

AT_START = ("sitecustomize", "usercustomize")
"""Optional modules that an interpreter imports at start."""

_HARMLESS = {"console_scripts", "gui_scripts", "torchrun.handlers"}
"""Groups of entry points that are not read during imports; torch imports those of ``torch.backends``."""


def folders_of(value: str | None, cwd: str) -> tuple[str, ...]:
    """The folders of a PYTHONPATH as in ``sys.path`` of an interpreter started in `cwd`."""
    parts = value.split(os.pathsep) if value else []
    return tuple(dict.fromkeys(os.path.normpath(os.path.join(cwd, part)) for part in parts))


def found_elsewhere(there: Sequence[str], wanted: Sequence[str], imported: Mapping[str, str]) -> str:
    """Describe why a process with the folders `there` and the modules `imported` (with their files) cannot use the
    folders `wanted` instead; empty when it can."""
    if [folder for folder in wanted if folder in there] != [*there]:
        return f"{VARIABLE} is {os.pathsep.join(wanted)!r:.80}, there {os.pathsep.join(there)!r:.80}"
    for folder in wanted:
        if folder in there:
            continue
        for name in sorted({*imported, *AT_START}):
            spec = PathFinder.find_spec(name, [folder])
            if spec is not None and spec.loader is not None and not _same(spec.origin, imported.get(name)):
                return f"{VARIABLE} has {folder}, where there is another {name}"
        for file in Path(folder).glob("*.*-info/entry_points.txt"):
            if _groups(file) - _HARMLESS:
                return f"{VARIABLE} has {folder}, whose {file.parent.name} may be for what is imported"
    return ""


def _groups(file: Path) -> set[str]:
    """The groups of entry points in `file`; the error as a group when it cannot be read."""
    try:
        return {*re.findall(r"^\[(.+)\]", file.read_text(errors="replace"), re.MULTILINE)}
    except OSError as error:
        return {str(error)}


def _same(one: str | None, other: str | None) -> bool:
    return bool(one and other) and os.path.realpath(str(one)) == os.path.realpath(str(other))


def take_over(there: Sequence[str], wanted: Sequence[str]) -> None:
    """Replace the folders `there` by `wanted` in this process's ``sys.path``."""
    rest = [folder for folder in sys.path if folder not in there]
    sys.path[:] = dict.fromkeys([*wanted, *rest])
