"""Modules that a spawner has imported, and that appear as not imported in its forks."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unirun.launcher.preloaded import _kept_from_collections, _Later

NAME = "imported_later"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with a module in it, which is found."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("executed = [1]\n")
    (tmp_path / NAME / "part.py").write_text("x = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in (NAME, f"{NAME}.part"):
        sys.modules.pop(name, None)


def test_a_module_that_is_imported_again_is_the_one_that_is_there_and_only_once(package: None) -> None:
    """A later import, as of a module that tests have removed, is none of it."""
    there = importlib.import_module(NAME)
    spec, told = there.__spec__, list[str]()
    there.executed.append(2)
    sys.meta_path.insert(0, _Later(sys.modules.pop(NAME), lambda: told.append(NAME)))
    assert importlib.import_module("json").dumps
    assert told == []
    assert importlib.import_module(f"{NAME}.part").x == 2
    assert importlib.import_module(NAME) is there
    assert (there.__spec__, there.executed, told) == (spec, [1, 2], [NAME])
    assert not [each for each in sys.meta_path if isinstance(each, _Later)]
    del sys.modules[NAME]
    assert importlib.import_module(NAME) is not there
    assert told == [NAME]


@pytest.mark.parametrize("enabled", [False, True])
def test_collections_are_as_before_when_an_import_has_ended_or_failed(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ImportError), _kept_from_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()
