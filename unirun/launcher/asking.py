"""A question of a command, or of the page, to the ranks of a running job: where they are."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unirun.errors import JobError, RendezvousError, StoreError, WireError
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.masters import call_master
from unirun.wire.messages import AskStacks, Attach, StacksAsked
from unirun.wire.reports import RankStacks, Stacks

ANSWER_TIMEOUT = 8.0
"""Seconds in which agents must answer; py-spy takes some on a busy host."""


def ask_stacks(job: JobDir, question: AskStacks) -> tuple[Sequence[RankStacks], Sequence[str]]:
    """The stacks of the ranks in question, and the nodes that have not answered. Raises `JobError`."""
    found: list[RankStacks] = []
    missing: set[str] | None = None
    deadline = time.monotonic() + ANSWER_TIMEOUT
    try:
        with call_master(job) as master:
            master.send(Attach())
            master.send(question)
            while missing is None or missing:
                word = master.receive(max(deadline - time.monotonic(), 0.0))
                if isinstance(word, StacksAsked):
                    missing = set(word.nodes)
                elif isinstance(word, Stacks) and missing is not None:
                    missing.discard(word.node)
                    found += word.ranks
    except (StoreError, WireError, RendezvousError) as error:
        if missing is None:
            raise JobError(f"the master has not answered: {error}", "try again in a moment") from error
    return found, sorted(missing or ())
