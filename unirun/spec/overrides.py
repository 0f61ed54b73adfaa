"""``key=value`` and ``+key=value`` on a command line: single values of a job file, changed and added.

As in Hydra, a key that the file does not have needs a ``+``, so that a typing error (``config.stepz=5``) is found.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirun.errors import Fault, SpecError
from unirun.spec.parse import JOB_KEYS
from unirun.spec.read import nearest, shown
from unirun.values import Value

_KEY = re.compile(r"[^.\[\]=\s]+(?:\.[^.\[\]=\s]+|\[\d+\])*")
_TREES = ("config", "roles")
"""The mappings whose keys the user chooses, so that only the file tells which there are."""

_PART = re.compile(r"[^.\[\]]+")


Closed = Mapping[str, frozenset[str]]
"""The names that the file has in each of these trees, if any."""

ReadValue = Callable[[str, str], Any]
"""Reads a text as YAML; the first argument is its place, for errors. Raises `SpecError`."""


class Override(Value):
    """One argument: sets `path` to `value`. `adds`: the key may be new."""

    text: str
    path: tuple[str, ...]
    value: Any
    adds: bool


def is_override(word: str) -> bool:
    """Return True if an argument has the form of an override."""
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
    """`file`, a job file in its long form, changed by the overrides `texts`. A mapping is merged with the one there.

    Raises `SpecError` with all faults.
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
    """The container that `node` has at `part`, the end of `path`; a new mapping where there is none."""
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
    """Raise `SpecError` for a new key without ``+`` in a mapping whose keys the user chooses.

    All other keys are checked when the job is parsed.
    """
    tree = path[0]
    word = override.text.removeprefix("+")
    for home in _TREES:
        if tree not in JOB_KEYS and tree in closed.get(home, ()):
            remedy = f"did you mean {'+' * override.adds}{home}.{word}?"
            raise SpecError([Fault(override.text, f"a job has no {tree!r}", remedy)])
    if tree not in JOB_KEYS and not difflib.get_close_matches(tree, JOB_KEYS, n=1):
        remedy = f"+config.{word} adds it to your own configuration"
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
