"""PYTHONPATH in a fork: of the variables that count when an interpreter starts, the one that can be taken over later.

That is so when what is imported already would be found where it was found. Programs that submit jobs have a PYTHONPATH
of their own, as their workers import what is in their folder.
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
"""Modules that an interpreter imports when they are there."""

_HARMLESS = {"console_scripts", "gui_scripts", "torchrun.handlers"}
"""Groups of entry points that no import looks at; torch imports those of ``torch.backends``."""


def folders_of(value: str | None, cwd: str) -> tuple[str, ...]:
    """The folders of a PYTHONPATH as ``sys.path`` of an interpreter that is started in `cwd` has them."""
    parts = value.split(os.pathsep) if value else []
    return tuple(dict.fromkeys(os.path.normpath(os.path.join(cwd, part)) for part in parts))


def found_elsewhere(there: Sequence[str], wanted: Sequence[str], imported: Mapping[str, str]) -> str:
    """Why a process with the folders `there`, which has `imported` modules from files, cannot take over `wanted`; empty
    when it can."""
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
    """The groups of entry points in `file`; one that cannot be read may have any."""
    try:
        return {*re.findall(r"^\[(.+)\]", file.read_text(errors="replace"), re.MULTILINE)}
    except OSError as error:
        return {str(error)}


def _same(one: str | None, other: str | None) -> bool:
    return bool(one and other) and os.path.realpath(str(one)) == os.path.realpath(str(other))


def take_over(there: Sequence[str], wanted: Sequence[str]) -> None:
    """Let this process look for modules in the folders `wanted` where it has looked in `there`."""
    rest = [folder for folder in sys.path if folder not in there]
    sys.path[:] = dict.fromkeys([*wanted, *rest])
