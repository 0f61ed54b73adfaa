"""Looking at a graph takes no time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import WAIT_TIMEOUT


@pytest.mark.starts_processes
def test_a_graph_is_drawn_without_torch_and_without_networkx() -> None:
    code = (
        "import sys; from unirun.collocation.graph import Role, RoleGraph; from unirun.collocation.graph.svg import svg; "
        "from unirun.collocation.graph.svg import tree; graph = RoleGraph((Role('actor', 2),)); "
        "svg(graph); tree(graph); print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=True
    )
    assert (
        set(run.stdout.split()) & {"torch", "numpy", "networkx", "asyncio", "rich", "yaml", "omegaconf"}
        == set()
    )
