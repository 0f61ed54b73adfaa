"""``unirun stacks JOB [ROLE[:RANK]]``: where the ranks of a running job are, equal stacks together."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from unirun.cli.inject import ranks_of
from unirun.cli.stored import find_here, refuse_elsewhere
from unirun.errors import JobError, RendezvousError, StoreError, WireError
from unirun.failover.stacks import lines
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, read_status
from unirun.rendezvous.masters import call_master
from unirun.wire.messages import AskStacks, Attach, StacksAsked
from unirun.wire.reports import RankStacks, Stacks

ANSWER_TIMEOUT = 8.0
"""Seconds in which agents must answer; py-spy takes some on a busy host."""


def main(options: Any) -> int:
    """Print the stacks. Returns 0. Raises `JobError`, `UsageError`."""
    job = find_here(options.store, options.job, "stacks")
    status = read_status(job)
    if status.phase in ENDED:
        raise JobError(f"job {job.run_id} has ended", "its ranks have no stacks any more")
    refuse_elsewhere(job, "stacks")
    wanted = AskStacks()
    if options.who is not None:
        # Of several ranks, those of the role are asked, and the others left out.
        ranks = ranks_of(options.who, status)
        wanted = AskStacks(ranks[0][0], ranks[0][1] if len(ranks) == 1 else -1)
    found, silent = ask(job, wanted)
    if options.who is not None:
        found = [each for each in found if (each.progress.worker.role, each.progress.worker.rank) in ranks]
    if silent:
        warn(f"no answer from {', '.join(silent)}")
    if not found:
        raise JobError("no rank has a process now", "see unirun status")
    if options.json:
        for each in found:
            print(json.dumps({"worker": str(each.progress.worker), **to_builtins(each)}))
        return 0
    for line in lines(found, threads=options.threads):
        say(line)
    return 0


def ask(job: JobDir, question: AskStacks) -> tuple[Sequence[RankStacks], Sequence[str]]:
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
