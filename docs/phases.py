"""Writes phases.md, the tables of the phases of a job, from `unirun.failover.phases` (``make docs``)."""

from __future__ import annotations

import sys
from pathlib import Path

from unirun.failover.phases import tables

INTRODUCTION = """\
# Phases

The master's state machine: the allowed changes of the phase of a job, of a role and of a worker, each with its event
and the function of `unirun/failover/` that carries it out. `JobDraft.put` (`failover/draft.py`) refuses any other
change: it raises `IllegalTransition`, which ends the term of the master
([architecture.md](architecture.md#an-event-that-no-master-can-handle)). `docs/phases.py` makes this page from
`failover/phases.py`; do not edit it.
"""


def page() -> str:
    """The page."""
    return f"{INTRODUCTION}\n{tables()}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
