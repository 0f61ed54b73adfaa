"""Checks that the entry of a role exists and can be run, before anything starts."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, Literal

from unirun.errors import Fault
from unirun.spec.job import Entry

# Checks that a class ``pkg.mod:Class`` or a function ``pkg.mod:name`` exists, from the source of its module alone.
#
# Modules are found by the finders of the import system, and parsed, never imported. What the source does not show (an
# extension, a star import, a module ``__getattr__``) is assumed to exist.

ELSEWHERE = "--cwd DIR names another folder"
_MAKE_NAMES = frozenset({"globals", "vars", "locals", "exec", "setattr"})
"""With one of these at its top level, a module may bind names that its source does not show."""


Kind = Literal["class", "function"]


def missing_name(target: str, kind: Kind, folders: Sequence[str] | None) -> Fault | None:
    """The reason why the class or function `target` (``pkg.mod:name``) does not exist; None when it does, or may.

    `folders` are searched like ``sys.path``, before it. Without them, only the form of the name is checked.
    """
    module, colon, name = target.partition(":")
    if not colon or module.endswith(".py") or not _is_name(module, name):
        remedy = _likely(target) or f"name the module, a colon, the {kind}"
        form = "pkg.mod:Class" if kind == "class" else "pkg.mod:function"
        return Fault("", f"{target!r} is not of the form {form}", remedy)
    if folders is None:
        return None
    found = _find(module, folders)
    if isinstance(found, Fault):
        return found
    if found.loader is None or found.origin is None:
        return Fault(
            "", f"{module} is a folder without __init__.py", f"name the module in it: {module}.…:{name}"
        )
    if not isinstance(found.loader, SourceFileLoader):
        return None
    return _look_into(found.origin, module, name, kind)


def is_function(target: str, folders: Sequence[str]) -> bool:
    """Return True if the source of its module shows that `target` is a function."""
    return (
        missing_name(target, "function", folders) is None
        and missing_name(target, "class", folders) is not None
    )


def _is_name(module: str, name: str) -> bool:
    return all(part.isidentifier() for part in (*module.split("."), name))


def _likely(target: str) -> str:
    """The remedy for ``ppo.Actor`` or ``./ppo.py:Actor``."""
    module, _, name = target.removesuffix(".py").rpartition(":" if ":" in target else ".")
    module = module.removesuffix(".py").strip("./").replace("/", ".")
    likely = f"{module}:{name}"
    return f"did you mean {likely!r}?" if _is_name(module, name) and likely != target else ""


def _find(module: str, folders: Sequence[str]) -> ModuleSpec | Fault:
    parts = module.split(".")
    found = _top_level(parts[0], folders)
    if found is None:
        near = _nearest(parts[0], _modules_in(folders))
        looked = ", ".join(os.path.abspath(folder) for folder in folders)
        return Fault(
            "", f"there is no module {parts[0]!r}", near or f"looked in {looked} and on sys.path; {ELSEWHERE}"
        )
    for i in range(1, len(parts)):
        parent, name = ".".join(parts[:i]), ".".join(parts[: i + 1])
        places = found.submodule_search_locations
        if places is None:
            return Fault("", f"there is no module {name!r}: {parent} is a module, not a package", "")
        deeper = _ask(name, [*places])
        if deeper is None:
            siblings = [f"{parent}.{sibling}" for sibling in _modules_in([*places])]
            near = _nearest(name, siblings)
            return Fault("", f"there is no module {name!r}", near or f"looked in {', '.join(places)}")
        found = deeper
    return found


def _top_level(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Workers look in `folders` first; an empty entry of ``sys.path`` is their working directory, so it is there."""
    path = [os.path.abspath(folder) for folder in folders] + [entry for entry in sys.path if entry]
    return PathFinder.find_spec(name, path) or _ask(name, None)


def _ask(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Ask all finders: editable installs add their own."""
    for finder in sys.meta_path:
        try:
            found = finder.find_spec(name, path)
        except KeyError:
            # A folder without __init__.py in a package that is not imported, in which Python looks for its parent.
            found = finder.find_spec(name.rpartition(".")[2], path)
        if found is not None:
            return found
    return None


def _modules_in(folders: Sequence[str]) -> list[str]:
    names = []
    for folder in folders:
        if os.path.isdir(folder):
            with os.scandir(folder) as entries:
                shown = [each for each in entries if each.name[:1] not in "._"]
            names += [
                each.name.removesuffix(".py") for each in shown if each.name.endswith(".py") or each.is_dir()
            ]
    return names


def _nearest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _look_into(path: str, module: str, name: str, kind: Kind) -> Fault | None:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    except OSError as error:
        return Fault(
            "", f"{path} cannot be read: {(error.strerror or str(error)).lower()}", "check its permissions"
        )
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else error
        return Fault("", f"{path}{line} is no Python: {text}", "correct it first")
    bound: dict[str, set[str]] = {}
    for each, binding in _bindings(tree):
        bound.setdefault(each, set()).add(binding)
    if "*" in bound or "__getattr__" in bound:
        return None
    if name not in bound:
        alike = [each for each, kinds in bound.items() if kind in kinds]
        plural = "classes" if kind == "class" else "functions"
        known = f"its {plural}: {', '.join(alike)}" if alike else f"it has no {plural}"
        near = _nearest(name, alike) or _nearest(name, [*bound])
        return Fault("", f"module {module} ({path}) has no {kind} {name!r}", near or known)
    other = "function" if kind == "class" else "class"
    if bound[name] == {other}:
        return Fault("", f"{name!r} in module {module} ({path}) is a {other}", f"name a {kind}")
    return None


def _bindings(scope: ast.AST) -> Iterator[tuple[str, str]]:
    """Each name that `scope` binds, with the kind of binding; ``*`` for names that the source does not show."""
    for node in ast.iter_child_nodes(scope):
        match node:
            case ast.ClassDef(name=name):
                yield name, "class"
                yield from _globals_of(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, "function"
                yield from _globals_of(node)
            case ast.alias(name=name, asname=asname):
                yield asname or name.partition(".")[0], "import"
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, "name"
            case ast.Name(id=name) if name in _MAKE_NAMES:
                yield "*", "name"
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                continue
            case _:
                yield from _bindings(node)


def _globals_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    inner: Any
    for inner in ast.walk(node):
        if isinstance(inner, ast.Global):
            yield from ((name, "name") for name in inner.names)


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
    entry: Entry,
    cwd: str | None,
    python_path: Sequence[str],
    path: str | None = None,
    *,
    here: bool = True,
) -> Fault | None:
    """The reason why `entry` cannot be run in `cwd`; None when no reason is found. Programs are searched in `path`
    (None: PATH). Without `here` another interpreter runs it, which may have other modules."""
    folders = [cwd or ".", *python_path] if here else None
    match entry.kind:
        case "script":
            return _script(entry.target, Path(cwd or ".", entry.target))
        case "module":
            return _module(entry.target, folders)
        case "program":
            return _program(entry.target, Path(cwd or ".", entry.target), path)
        case kind:
            what: Kind = "function" if kind == "function" else "class"
            return missing_name(entry.target, what, folders)


def _script(name: str, path: Path) -> Fault | None:
    if name == "-":
        return Fault("", "a script is read from stdin by its name", "write unirun /dev/stdin")
    # os.path answers False where pathlib raises: a name too long, a directory that may not be entered.
    if os.path.isdir(path) and not any(os.path.isfile(path / main) for main in _MAIN):
        return Fault("", f"script {name!r} is a directory", "name the file in it")
    if not os.path.exists(path):
        return Fault("", f"script {name!r} does not exist", _near(path))
    if not os.access(path, os.R_OK):
        return Fault("", f"script {name!r} cannot be read", "check its permissions")
    if (words := _NO_SCRIPTS.get(path.suffix)) and not _is_python(path):
        problem, _, remedy = words.format(name.removeprefix("./")).partition("; ")
        return Fault("", f"{name!r} {problem}", remedy)
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


def _module(name: str, folders: Sequence[str] | None) -> Fault | None:
    """Without `folders`, only the form of the name is checked."""
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        return Fault("", f"{name!r} is a file and no module", f"write -m {dotted}, or leave out -m")
    if ":" in name:
        return Fault("", f"{name!r} is a class and no module", f"give it to a role: --roles actor=1@{name}")
    if folders is None:
        return None
    found = _find(name, folders)
    if isinstance(found, Fault):
        return found
    places = found.submodule_search_locations
    if places is not None and _ask(f"{name}.__main__", [*places]) is None:
        return Fault("", f"package {name!r} has no __main__.py", f"name a module in it: -m {name}.…")
    return None


def _program(name: str, path: Path, folders: str | None) -> Fault | None:
    if "/" not in name and shutil.which(name, path=folders) is not None:
        return None
    if not os.path.isfile(path):
        return Fault("", f"program {name!r} is not found", "give its path, or check PATH")
    if path.suffix == ".py" and not os.access(path, os.X_OK):
        return Fault("", f"{name!r} is a Python script", "leave out --no-python")
    if "/" not in name:
        return Fault("", f"program {name!r} is not on the PATH", f"write ./{name}")
    if not os.access(path, os.X_OK):
        return Fault("", f"program {name!r} may not be executed", f"chmod +x {name}")
    return None
