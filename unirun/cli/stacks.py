"""``unirun stacks JOB [ROLE[:RANK]]``: where the ranks of a running job are, equal stacks together."""

from __future__ import annotations

import json
from typing import Any

from msgspec import to_builtins

from unirun.cli.inject import ranks_of
from unirun.cli.stored import find_here, refuse_elsewhere
from unirun.errors import JobError
from unirun.failover.stacks import lines
from unirun.launcher.asking import ask_stacks
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.status import ENDED, read_status
from unirun.wire.messages import AskStacks


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
    found, silent = ask_stacks(job, wanted)
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
