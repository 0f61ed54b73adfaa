"""``key=value`` and ``+key=value`` on a command line: single values of a job file, changed and added.

As with Hydra, a key that the file does not have is added with ``+`` only, so that a slip (``config.stepz=5``) is told.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirun.errors import Fault, SpecError
from unirun.spec.parse import JOB_KEYS
from unirun.spec.read import nearest, shown
from unirun.values import Value

_KEY = re.compile(r"[^.\[\]=\s]+(?:\.[^.\[\]=\s]+|\[\d+\])*")
_TREES = ("config", "roles")
"""What has names that the user chooses: unirun does not know them, but the file does."""

_PART = re.compile(r"[^.\[\]]+")


Closed = Mapping[str, frozenset[str]]
"""The names that the file has in each of these trees, if any."""

ReadValue = Callable[[str, str], Any]
"""What a text says as YAML; the first argument names where it stands. Raises `SpecError`."""


class Override(Value):
    """What one argument says: `value` stands at `path` from now on. `adds`: the file need not have that."""

    text: str
    path: tuple[str, ...]
    value: Any
    adds: bool


def is_override(word: str) -> bool:
    """Whether an argument has the form of an override."""
    key, equals, _ = word.partition("=")
    return bool(equals) and _KEY.fullmatch(key.removeprefix("+")) is not None


def _read(text: str, read_value: ReadValue) -> Override:
    key, _, value = text.partition("=")
    if not is_override(text):
        raise SpecError([Fault(text, "is no override", "write key=value, as roles.actor.count=8")])
    if not value.strip():
        remedy = f"write {key}=VALUE; null is for none, and '\"\"' for an empty text"
        raise SpecError([Fault(text, "has no value", remedy)])
    path = tuple(_PART.findall(key.removeprefix("+")))
    return Override(text, path, read_value(text, value), key.startswith("+"))


def overridden(file: Mapping[str, Any], texts: Sequence[str], read_value: ReadValue) -> dict[str, Any]:
    """`file`, a job file in its long form, with the values that `texts` say; a mapping is merged with the one there.

    Raises `SpecError` with all faults: of keys that the file does not have and that are not to be added, too.
    """
    closed = {
        tree: frozenset(map(str, file[tree]))
        for tree in _TREES
        if isinstance(file.get(tree), Mapping) and file[tree]
    }
    data = copy.deepcopy(dict(file))
    faults: list[Fault] = []
    for text in texts:
        try:
            _apply(data, _read(text, read_value), closed)
        except SpecError as error:
            faults += error.faults
    if faults:
        raise SpecError(faults)
    return data


def _apply(data: dict[str, Any], override: Override, closed: Closed) -> None:
    path = override.path
    if path[0] == "roles" and len(path) == 2 and not isinstance(override.value, Mapping):
        path = (*path, "count")
    node: Any = data
    for number, part in enumerate(path[:-1], 1):
        node = _child(node, part, path[:number], override, closed)
    last = path[-1]
    if isinstance(node, list):
        node[_index(node, last, path, override)] = override.value
        return
    if last not in node:
        _must_be_open(node, path, override, closed)
    if isinstance(node.get(last), dict) and isinstance(override.value, Mapping):
        merge(node[last], override.value)
    else:
        node[last] = override.value


def _child(node: Any, part: str, path: tuple[str, ...], override: Override, closed: Closed) -> Any:
    """What `node` holds under `part`, the end of `path`; a mapping that is made where there is none."""
    if isinstance(node, list):
        return _container(node[_index(node, part, path, override)], path, override)
    if part not in node:
        _must_be_open(node, path, override, closed)
    if node.get(part) is None:
        node[part] = {}
    return _container(node[part], path, override)


def _container(found: Any, path: tuple[str, ...], override: Override) -> Any:
    if isinstance(found, dict | list):
        return found
    problem = f"{'.'.join(path)} is {shown(found)}, which has no keys"
    raise SpecError([Fault(override.text, problem, f"write {'.'.join(path)}=VALUE")])


def _index(node: list[Any], part: str, path: tuple[str, ...], override: Override) -> int:
    if part.isdecimal() and int(part) < len(node):
        return int(part)
    problem = f"{'.'.join(path[:-1])} is a list of {len(node)}, and has no item {part}"
    raise SpecError([Fault(override.text, problem, "items are counted from 0")])


def _must_be_open(node: Mapping[Any, Any], path: tuple[str, ...], override: Override, closed: Closed) -> None:
    """Raise `SpecError` for a new key where the file has other ones, unless it is to be added.

    In all other places the names of what a job may have are known, and checked later.
    """
    tree = path[0]
    if tree not in JOB_KEYS and tree in closed.get("config", ()):
        remedy = f"did you mean {'+' * override.adds}config.{override.text.removeprefix('+')}?"
        raise SpecError([Fault(override.text, f"a job has no {tree!r}", remedy)])
    if override.adds or tree not in closed or (tree == "roles" and len(path) != 2):
        return
    where = ".".join(path[:-1])
    remedy = f"{nearest(path[-1], [*map(str, node)])}; +{override.text} adds it"
    raise SpecError([Fault(override.text, f"the job file has no {path[-1]!r} in {where}", remedy)])


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put the values of `over` into `base`; a mapping is merged with the mapping that is there."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
