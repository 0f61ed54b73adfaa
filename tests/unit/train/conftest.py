"""A module of classes that builders can name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CODE = """
class Actor:
    __unirun_kind__ = "workload"

class Rollout(Actor): ...
class Critic(Actor): ...

class PPOTrainer:
    __unirun_kind__ = "trainer"

class Plain: ...

def make(): ...
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with ``algo.py`` and two modules that cannot be imported in it."""
    (tmp_path / "algo.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import no_such_module")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNIRUN_JOB", raising=False)
    yield tmp_path
    for name in ("algo", "broken", "leaves"):
        sys.modules.pop(name, None)
    sys.path_importer_cache.pop(str(tmp_path), None)
