"""Check whether a new interpreter would load the same files as this process has loaded."""

from __future__ import annotations

import importlib
import os
import re
import site
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

# Apply another PYTHONPATH in a fork, if the modules that are imported already would be found in the same files.
#
# It is the only variable read at the start of an interpreter for which this is possible. Programs that submit jobs have
# their own PYTHONPATH, so that workers can import from their folder.

VARIABLE = "PYTHONPATH"

AT_START = ("sitecustomize", "usercustomize")
"""Optional modules that an interpreter imports at start."""

_HARMLESS = {
    *("console_scripts", "gui_scripts", "torchrun.handlers", "vllm.general_plugins"),
    *("unirun.train.backends", "unirun.device_types"),
}
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


_Mark = tuple[int, int, int, int]
"""Inode, size, mtime and ctime. File contents are not read."""

_TIMESTAMP_DELAY = 0.02
"""Maximum delay of file system timestamps in seconds."""


class LoadedFiles:
    """The files that this process has loaded. Create it after all imports."""

    def __init__(self) -> None:
        paths: set[str | None] = {sys.executable}
        paths |= {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        paths |= _libraries()
        self._hooks = _hooks()
        self._files: dict[str, _Mark | None] = dict(self._hooks)
        self._files |= {path: mark for path in sorted(filter(None, paths)) if (mark := _mark(path))}
        self._folders = {path: _mark(path) for path in (*sys.path, site.getusersitepackages())}
        self._origins = {name: _origin(name) for name in (*imported(), *AT_START)}

    def changed_since(self, start: float) -> str:
        """A file that has changed since `start` (seconds since the epoch), perhaps after it was loaded; empty: none."""
        first = (start - _TIMESTAMP_DELAY) * 1e9
        return next((path for path, mark in self._files.items() if mark is not None and mark[3] > first), "")

    def replaced(self) -> str:
        """A file that has changed since it was loaded, or a module that is now found elsewhere; empty: none."""
        for path, mark in self._files.items():
            if _mark(path) != mark:
                return path
        if all(_mark(path) == mark for path, mark in self._folders.items()):
            return ""
        if hooks := sorted(path for path, _ in _hooks().items() ^ self._hooks.items()):
            return hooks[0]
        # Python caches directories that did not exist.
        importlib.invalidate_caches()
        moved = (name for name, origin in self._origins.items() if _origin(name) != origin)
        return str(next(moved, ""))


def imported() -> dict[str, str]:
    """This process's top-level modules, each with its file or an empty text."""
    names = {name.partition(".")[0] for name in sys.modules} - {"__main__", "__mp_main__"}
    return {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in sorted(names)}


def _mark(path: str) -> _Mark | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _libraries() -> set[str]:
    """Files mapped as executable code; files mapped as data may change."""
    rows = [line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {row[5] for row in rows if len(row) == 6 and "x" in row[1] and row[5].startswith("/")}
    # The kernel marks files that were replaced since they were mapped.
    return {path.removesuffix(" (deleted)") for path in mapped}


def _origin(name: str) -> str | None:
    try:
        spec = PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return None
    return str(spec.origin) if spec is not None else None


def _hooks() -> dict[str, _Mark | None]:
    """Files in site directories that run code or change the search path when an interpreter starts, and the metadata of
    distributions: torch imports those that register as its backends."""
    user = site.getusersitepackages()
    folders = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    patterns = ("*.pth", "*.dist-info", "*.egg-info")
    found = {str(Path(sys.prefix, "pyvenv.cfg"))}
    found |= {str(path) for folder in folders for pattern in patterns for path in Path(folder).glob(pattern)}
    if site.ENABLE_USER_SITE and user not in sys.path:
        # Python adds it to the search path once it exists.
        found.add(user)
    return {path: _mark(path) for path in found}
