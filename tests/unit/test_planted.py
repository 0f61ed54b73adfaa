"""The list of planted bugs fits the tree."""

from __future__ import annotations

import pytest

from tests.mutants.planted import KINDS, ROOT, bugs, stale

BUGS = bugs()


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_can_be_planted_and_is_code(name: str) -> None:
    bug = BUGS[name]
    assert stale(bug) == ""
    assert bug.kind in KINDS
    assert bug.new != bug.old
    compile((ROOT / bug.file).read_text().replace(bug.old, bug.new), bug.file, "exec")


def test_each_kind_is_planted() -> None:
    assert {bug.kind for bug in BUGS.values()} == set(KINDS)
