"""Counts over the source of a package: lines, classes, names that are defined twice, and imports between modules.

A module's room is the part of its name after the package, ``launcher`` of ``unirun.launcher.core``. An import counts
wherever it stands: at the top, in a function, or for the type checker only.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

SMALL = 110
"""A module with fewer lines and a single importer could be a part of that importer."""

TIME = re.compile(r"\b(milli|micro)?(seconds?|minutes?|hours?|days?)\b", re.IGNORECASE)
"""A constant is one of time if it is a number and the first sentence of its docstring has such a word."""

PURPOSE = re.compile(r"(^|_)(TIMEOUT|INTERVAL|DELAY|TTL|SECONDS|MINUTES|HOURS|DAYS)$")
"""The suffixes of a constant of time, for its purpose or its unit."""

_NO_CODE = frozenset(
    {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        *(tokenize.ENCODING, tokenize.ENDMARKER),
    }
)


@dataclass(frozen=True)
class Module:
    """One module: its name with dots, and its text."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The module, parsed."""
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """``launcher`` for ``unirun.launcher.core``; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def lines(self) -> int:
        """The number of all lines."""
        return len(self.text.splitlines())

    @property
    def filled_lines(self) -> int:
        """The number of lines that are not blank."""
        return sum(1 for line in self.text.splitlines() if line.strip())

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes; one within a function or a class counts too."""
        return tuple(node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def modules(package: Path) -> list[Module]:
    """All modules below a folder, the package itself among them, by name."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path.read_text()))
    return found


def code_lines(module: Module) -> int:
    """The number of lines with code: without blank lines, comments and docstrings.

    Any string that is a statement of its own is a docstring.
    """
    strings = {
        line
        for node in ast.walk(module.tree)
        if _is_string(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - strings)


def defined_twice(modules: Iterable[Module], *, public: bool) -> dict[str, list[str]]:
    """The class names that more than one module defines at its top level, each with these modules."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not (public and node.name.startswith("_")):
                homes.setdefault(node.name, []).append(module.name)
    return {name: found for name, found in sorted(homes.items()) if len({*found}) > 1}


def imports(modules: Iterable[Module]) -> dict[str, set[str]]:
    """The modules of the same package that each module imports."""
    known = {module.name: module for module in modules}
    return {
        name: {target for found in _imported(module.tree) if (target := _known(found, known))} - {name}
        for name, module in known.items()
    }


def circles(modules: Iterable[Module]) -> list[list[str]]:
    """The cycles of imports among the modules of one room: strongly connected components of two or more."""
    rooms = {module.name: module.room for module in modules}
    graph = {
        name: {target for target in targets if rooms[target] == rooms[name]}
        for name, targets in imports(modules).items()
    }
    reached = {name: _reached(graph, name) for name in graph}
    found: list[list[str]] = []
    for name in graph:
        if name in reached[name] and not any(name in circle for circle in found):
            found.append(sorted(other for other in reached[name] if name in reached[other]))
    return found


def single_importers(modules: Iterable[Module]) -> dict[str, str]:
    """Each small module with a single importer, and that importer. Packages do not count."""
    known = {module.name: module for module in modules}
    importers: dict[str, list[str]] = {}
    for name, targets in imports(known.values()).items():
        for target in targets:
            importers.setdefault(target, []).append(name)
    packages = {name.rpartition(".")[0] for name in known}
    return {
        name: importers[name][0]
        for name, module in known.items()
        if len(importers.get(name, ())) == 1 and module.lines < SMALL and name not in packages
    }


def unclear_times(modules: Iterable[Module]) -> list[str]:
    """The constants of time whose names have no `PURPOSE`: ``unirun.launcher.agent.AGAIN``."""
    return [
        f"{module.name}.{name}"
        for module in modules
        for name in _times(module.tree)
        if not PURPOSE.search(name)
    ]


def _times(tree: ast.Module) -> Iterator[str]:
    """The names in capitals at the top that are numbers, and whose docstring says that they are a time."""
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target, value = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            target, value = node.target.id, node.value
        else:
            continue
        said = ast.literal_eval(after.value) if _is_string(after) else ""
        if target.isupper() and _is_number(value) and TIME.search(re.split(r"[.;:]\s", said)[0]):
            yield target


def _is_string(node: ast.AST) -> TypeGuard[ast.Expr]:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_number(node: ast.expr) -> bool:
    """Return True for a number and for a calculation with a number in it: ``3 * 60``, ``2 * BEAT``."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) or _is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Every import by its whole name; `importlib.import_module` with a literal name counts too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node).endswith("import_module"):
            yield from (str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))


def _called(node: ast.Call) -> str:
    """The last part of what is called: ``f`` for ``a.b().f()``."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _known(name: str, known: Mapping[str, object]) -> str:
    """The module that `name` is, or is in; empty if it is in none of `known`."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else ""


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """The nodes with at least one incoming edge."""
    found: set[str] = set()
    left = [start]
    while left:
        for target in graph[left.pop()] - found:
            found.add(target)
            left.append(target)
    return found
