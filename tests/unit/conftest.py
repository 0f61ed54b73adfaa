"""Tests of this floor start no process, but for those that are marked ``starts_processes``: `make quick` leaves them out."""

from __future__ import annotations

import os
import subprocess
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not marked cannot start a process."""
    if request.node.get_closest_marker("starts_processes") is not None:
        return

    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("a test that starts a process is marked starts_processes")

    starts: tuple[tuple[Any, str], ...] = ((os, "fork"), (os, "posix_spawn"), (subprocess.Popen, "__init__"))
    for place, name in starts:
        monkeypatch.setattr(place, name, refuse)
