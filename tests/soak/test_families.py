"""Two ranks walk all families of decoders that the installed transformers has: each is equal to one rank, or refused.

The table in docs/experiments.md is what they have found. It takes half an hour; UNIRUN_SOAK_FAMILIES="llama qwen3" walks
these.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.integration.test_trials import TRIALS

ROWS: dict[tuple[str, ...], str] = {
    ("equal", "equal", "equal"): "each",
    ("refused", "equal", "equal"): "`data`, `pipe`",
    ("equal", "refused", "equal"): "`data`, `tensor`",
    ("refused", "refused", "equal"): "`data`",
}
"""The states in tensor, pipe and FSDP2, and the row of the table. Families that no row has are refused."""


def families() -> list[str]:
    """The families that the environment variable names, or all."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return os.environ.get("UNIRUN_SOAK_FAMILIES", "").split() or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def documented() -> dict[str, str]:
    """The row of each family in the document."""
    text = (ROOT / "docs" / "experiments.md").read_text()
    table = text.partition("| layouts | families |")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for row in ROWS.values():
        (names,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", table, re.MULTILINE)
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", names), row)
    return found


@pytest.mark.timeout(3 * 3600)
def test_each_family_is_equal_to_one_rank_or_refused(tmp_path: Path) -> None:
    file, kinds = tmp_path / "families.json", families()
    command = [
        sys.executable, "-m", "unirun", "--roles", "model=2",
        str(TRIALS / "families.py"), "--", str(file), *kinds,
    ]  # fmt: skip
    env = {**os.environ, "UNIRUN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, str]] = json.loads(file.read_text())
    assert [*found] == kinds
    wrong = {
        kind: states
        for kind, states in found.items()
        if any(state != "equal" and not state.startswith("refused: ") for state in states.values())
    }
    assert not wrong
    rows = {}
    for kind, states in found.items():
        row = ROWS.get(tuple(states[layout].partition(":")[0] for layout in ("tensor", "pipe", "fsdp2")))
        if row is not None:
            rows[kind] = row
    assert rows == {kind: row for kind, row in documented().items() if kind in kinds}
