"""Calls at the import of a module."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unirun.launcher.imported import when_imported


@pytest.fixture
def finders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The finders before the test, in which there is a package ``lazy`` with a module."""
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy" / "__init__.py").write_text("from .module import *\n")
    (tmp_path / "lazy" / "module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list[object](sys.meta_path)
    yield finders
    sys.meta_path[:] = finders  # type: ignore[assignment]
    for name in ("lazy", "lazy.module"):
        sys.modules.pop(name, None)


def test_each_function_is_called_once_when_the_module_has_been_executed(finders: list[object]) -> None:
    seen: list[ModuleType] = []
    for _ in range(2):
        when_imported("lazy.module", lambda module: seen.append(module) if module.value else None)
    importlib.import_module("json")
    assert (seen, "lazy" in sys.modules) == ([], False)
    module = importlib.import_module("lazy.module")
    importlib.reload(module)
    assert seen == [module, module]
    assert sys.meta_path == finders


def test_a_module_that_is_imported_already_is_passed_at_once(finders: list[object]) -> None:
    module = importlib.import_module("lazy.module")
    seen: list[ModuleType] = []
    when_imported("lazy.module", seen.append)
    assert seen == [module]
    assert sys.meta_path == finders


class Around(importlib.abc.MetaPathFinder):
    """Asks the finders that were there before, as a script's own finder may do."""

    def __init__(self, others: Sequence[Any]) -> None:
        self._others = others

    def find_spec(self, *about: Any) -> ModuleSpec | None:
        """The spec of the first of them that has one."""
        found = (each.find_spec(*about) for each in self._others)
        return next((spec for spec in found if spec is not None), None)


def test_a_finder_around_all_others_changes_nothing(
    finders: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ModuleType] = []
    when_imported("lazy.module", seen.append)
    monkeypatch.setattr(sys, "meta_path", [Around(sys.meta_path)])
    module = importlib.import_module("lazy.module")
    assert seen == [module]
