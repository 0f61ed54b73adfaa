"""Imports the classes and functions that a job names, as its workers will."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from unirun.spec.builder import EntryDraft, Loaded


def importable(module: Any) -> Any:
    """The name under which workers can import `module`: for ``__main__`` that of its file."""
    main = sys.modules["__main__"]
    if module != "__main__":
        return module
    if main.__spec__ is not None:
        return main.__spec__.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module


def entry_of(function: Any) -> EntryDraft:
    """The module and name of a function, given as the object or as ``pkg.mod:name``."""
    if isinstance(function, str):
        module, _, attribute = function.partition(":")
        return EntryDraft(importable(module), attribute)
    name = getattr(function, "__qualname__", function)
    return EntryDraft(importable(getattr(function, "__module__", None)), name)


def load(module: Any, name: Any) -> Loaded:
    """Import the class or function `name` of `module`. Errors are in the result."""
    if not all(isinstance(part, str) and part for part in (module, name)):
        return Loaded(error="it has no name")
    try:
        with _working_directory_on_path():
            home = _main_module(module) or importlib.import_module(module)
            found = getattr(home, name, None)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code is a fault of the job
        return Loaded(error=f"{type(error).__name__}: {error}")
    if found is None:
        names = [each for each, value in vars(home).items() if callable(value)]
        close = difflib.get_close_matches(name, names, n=1)
        return Loaded(error=f"{module} has no {name!r}" + (f", did you mean {close[0]!r}?" if close else ""))
    if not isinstance(found, type):
        return Loaded("function") if callable(found) else Loaded(error="it is neither a class nor a function")
    match getattr(found, "__unirun_kind__", ""):
        case "workload":
            return Loaded("workload")
        case "trainer":
            return Loaded("trainer")
    return Loaded()


def _main_module(module: str) -> ModuleType | None:
    """``__main__``, when it is the file that `module` names: running it a second time could submit a second job."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or module in sys.modules:
        return None
    if module.rpartition(".")[2] != Path(file).stem:
        return None
    found = importlib.util.find_spec(module)
    same = found is not None and found.origin is not None and os.path.samefile(found.origin, file)
    return main if same else None


@contextlib.contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """Workers find modules in their working directory, so this process searches there, too."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def python_path() -> str:
    """The PYTHONPATH with which another interpreter finds the modules that this one does.

    Besides this process's PYTHONPATH it has the folder of the script, and all that was added to ``sys.path`` since.
    """
    installed = {
        os.path.realpath(path) for path in (*sysconfig.get_paths().values(), *site.getsitepackages())
    }
    standard = os.path.realpath(sysconfig.get_path("stdlib"))
    installed |= {os.path.join(standard, "lib-dynload"), site.getusersitepackages()}
    bundle = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    folders = [os.path.abspath(path) for path in sys.path]
    kept = [f for f in folders if os.path.realpath(f) not in installed and os.path.basename(f) != bundle]
    return os.pathsep.join(dict.fromkeys(kept))
