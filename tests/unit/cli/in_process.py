"""The command, called in the process of the test."""

from __future__ import annotations

import pytest

from unirun.cli import main


def run_cli(*argv: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as leave:
        main([*argv])
    assert isinstance(leave.value.code, int)
    return leave.value.code
