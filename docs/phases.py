"""Writes phases.md, the tables of the phases of a job, from `unirun.failover.phases` (``make docs``)."""

from __future__ import annotations

import sys
from pathlib import Path

from unirun.failover.phases import tables

INTRODUCTION = """\
# Phases

The master's state machine: which phase of a job, of a role and of a worker may follow which, because of what, and the
function of `unirun/failover/` that carries it out. `JobDraft.put` (`failover/draft.py`) lets no other change through:
it raises `IllegalTransition`, which ends the term of the master
([architecture.md](architecture.md#an-event-that-no-master-can-handle)). This
page is made from `failover/phases.py` by `docs/phases.py`; do not edit it.
"""


def page() -> str:
    """The page."""
    return f"{INTRODUCTION}\n{tables()}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
