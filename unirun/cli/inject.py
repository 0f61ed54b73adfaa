"""``unirun inject JOB WHO --fault FAULT``: faults in the workers of a job, once or by a schedule.

Only the user of a job can: directories of others are refused, and a master wants the proof of the job's token.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import Any, get_args

from unirun.cli.output import duration
from unirun.cli.stored import find_here, refuse_elsewhere
from unirun.errors import JobError, RendezvousError, StoreError, UsageError, WireError
from unirun.launcher.foreground.terminal import say
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, JobStatus, read_status, read_summary
from unirun.rendezvous.masters import call_master
from unirun.wire.messages import Attach, Fault, Inject, Injected

ANSWER_TIMEOUT = 10.0
"""Seconds in which the master must answer."""

SCHEDULE_CHECK_INTERVAL = 0.5
"""Seconds between two looks whether the job has ended, while the next fault is not due."""


def main(options: Any) -> int:
    """Inject faults. Returns 0. Raises `UsageError`, `JobError`."""
    fault, amount = fault_of(options.fault)
    every = None if options.every is None else duration("--every", options.every)
    lasting = None if options.lasting is None else duration("--for", options.lasting)
    if every is None and (lasting is not None or options.seed is not None):
        raise UsageError("--for and --seed are for a schedule", "add --every 5s")
    if every == 0:
        raise UsageError("--every 0s is no schedule", "for example --every 5s")
    job = find_here(options.store, options.job, "inject")
    if read_summary(job).phase in ENDED:
        raise JobError(f"job {job.run_id} has ended", "there is nothing to inject a fault into")
    refuse_elsewhere(job, "inject")
    faults = [Inject(role, rank, fault, amount) for role, rank in ranks_of(options.who, read_status(job))]
    if every is not None:
        return _by_schedule(job, faults, every, lasting, options.seed)
    problems = _ask(job, faults)
    for each, problem in zip(faults, problems, strict=True):
        say(problem or f"{each} → {each.role}:{each.rank}")
    if all(problems):
        raise JobError("no fault was injected", "see unirun status")
    return 0


def _by_schedule(
    job: JobDir,
    faults: Sequence[Inject],
    every: float,
    lasting: float | None,
    seed: int | None,
) -> int:
    """One of `faults` each `every` seconds, until `lasting` seconds are over or the job ends."""
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 16)
        say(f"seed {seed}")
    choices, began, count = random.Random(seed), time.monotonic(), 0
    while lasting is None or (count + 1) * every <= lasting:
        count += 1
        if not _wait_until(job, began + count * every):
            say(f"job {job.run_id} has ended")
            return 0
        fault = choices.choice(faults)
        (problem,) = _ask(job, [fault])
        say(f"{count * every:8.1f} s  {problem or f'{fault} → {fault.role}:{fault.rank}'}")
    return 0


def _wait_until(job: JobDir, due: float) -> bool:
    """Wait. Returns False when the job has ended before."""
    while read_summary(job).phase not in ENDED:
        left = due - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, SCHEDULE_CHECK_INTERVAL))
    return False


def _ask(job: JobDir, faults: Sequence[Inject]) -> list[str]:
    """Have the master inject faults. Returns for each the reason why it was not, or may not have been, injected; empty
    when it was. Nothing is asked again: one fault could become two."""
    answers: dict[tuple[str, int], str] = {}
    problem, deadline = "", time.monotonic() + ANSWER_TIMEOUT
    try:
        with call_master(job) as master:
            master.send(Attach())
            for each in faults:
                master.send(each)
            while any((each.role, each.rank) not in answers for each in faults):
                word = master.receive(max(deadline - time.monotonic(), 0.0))
                if isinstance(word, Injected):
                    answers[word.role, word.rank] = word.problem
    except (StoreError, WireError, RendezvousError) as error:
        problem = f"the master has not answered: {error}"
    return [answers.get((each.role, each.rank), f"{each.role}:{each.rank}: {problem}") for each in faults]


def fault_of(text: str) -> tuple[Fault, float]:
    """The fault of this name, and its amount: ``sigkill``, ``exit=3``, ``slow=2x``. Raises `UsageError`."""
    name, equals, amount = text.partition("=")
    found: Fault | None = next((each for each in get_args(Fault) if each == name), None)
    if found is None or bool(equals) != (found in ("exit", "slow")):
        known = ", ".join(
            {"exit": "exit=CODE", "slow": "slow=FACTOR"}.get(each, each) for each in get_args(Fault)
        )
        raise UsageError(f"--fault {text!r:.80} is unknown", f"it is one of {known}")
    if found == "exit" and not (re.fullmatch(r"\d{1,3}", amount) and int(amount) < 256):
        raise UsageError(f"--fault {text!r:.80} has no exit code", "for example exit=3; 255 is the greatest")
    if found == "slow" and not (
        re.fullmatch(r"\d{1,3}(\.\d{1,3})?x?", amount) and 1 < float(amount.rstrip("x")) <= 100
    ):
        raise UsageError(f"--fault {text!r:.80} has no factor", "for example slow=2x; 100x is the greatest")
    return found, float(amount.rstrip("x") or 0)


def ranks_of(who: str, status: JobStatus) -> list[tuple[str, int]]:
    """The ranks that ``actor``, ``actor:2`` or ``actor:0-3`` names. Raises `UsageError`."""
    name, colon, ranks = who.partition(":")
    role = next((each for each in status.roles if each.name == name), None)
    if role is None:
        known = ", ".join(each.name for each in status.roles)
        raise UsageError(f"job {status.run_id} has no role {name!r:.80}", f"its roles are {known}")
    last = len(role.workers) - 1
    span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", ranks) if colon else None
    if colon and span is None:
        raise UsageError(f"{who!r:.80} names no ranks", f"write {name}, {name}:2 or {name}:0-3")
    low, high = (int(span[1]), int(span[2] or span[1])) if span is not None else (0, last)
    if not low <= high <= last:
        raise UsageError(f"{who!r:.80} names ranks that are not there", f"{name} has ranks 0 to {last}")
    return [(name, rank) for rank in range(low, high + 1)]


def one_rank(options: Any, command: str) -> tuple[JobDir, str, int]:
    """The job and the only rank that the `options` of `command` name. Raises `JobError`, `UsageError`."""
    job = find_here(options.store, options.job, command)
    status = read_status(job)
    if status.phase in ENDED:
        raise JobError(f"job {job.run_id} has ended", "it has no ranks any more")
    ranks = ranks_of(options.who, status)
    if len(ranks) != 1:
        raise UsageError(f"{options.who} names {len(ranks)} ranks", f"name one: {ranks[0][0]}:0")
    refuse_elsewhere(job, command)
    return job, *ranks[0]
