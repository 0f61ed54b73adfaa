"""A builder that has said all it must, what it finds wrong, and a module of classes that it can name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unirun.errors import Fault, SpecError
from unirun.train import DLJobBuilder

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


@pytest.fixture
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


def complete_builder() -> DLJobBuilder:
    """A builder that has said all it must, with a workload of two ranks on eight devices."""
    builder = (
        DLJobBuilder()
        .dl_type("RL")
        .node_num(1)
        .device_per_node(8)
        .config({"lr": 0.1})
        .trainer("algo", "PPOTrainer")
    )
    builder.workload("actor", "algo", "Actor").total(2).per_node(2)
    return builder


def faults(builder: Any) -> list[Fault]:
    with pytest.raises(SpecError) as caught:
        builder.build()
    return [*caught.value.faults]
