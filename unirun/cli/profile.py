"""``unirun profile JOB ROLE:RANK``: a flame graph and a trace of torch's profiler, without a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from unirun import atomic
from unirun.cli.inject import one_rank
from unirun.errors import JobError, RendezvousError, StoreError, UsageError, WireError
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.flame import svg
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.masters import call_master
from unirun.wire.messages import Attach, Profile
from unirun.wire.reports import Profiled, TracePart

ANSWER_TIMEOUT = 75.0
"""Seconds after the profile, and after each part of a trace, in which the agent must answer; torch takes some to write
the first."""

LONGEST_SECONDS = 600.0
"""Seconds of a profile, at most: a trace of torch has some MB for each."""

FLAME, FOLDED, TRACE = "flame.svg", "stacks.folded", "trace.json.gz"


def main(options: Any) -> int:
    """Profile a rank. Returns 0. Raises `JobError`, `UsageError`."""
    if not 0 < options.seconds <= LONGEST_SECONDS:
        raise UsageError(f"--seconds {options.seconds:g}", f"give more than 0, {LONGEST_SECONDS:g} at most")
    job, role, rank = one_rank(options, "profile")
    folder = Path(options.output or f"profile-{role}-{rank}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}", "name another directory") from error
    result, trace = ask(job, Profile(role, rank, options.seconds))
    if result.problem:
        raise JobError(f"{role}:{rank} is not profiled: {result.problem}", "see unirun status")
    counts = dict(result.stacks)
    title = f"{role}:{rank} of {job.run_id}, {options.seconds:g} s"
    files = {
        FLAME: svg(counts, title),
        FOLDED: "".join(f"{stack} {count}\n" for stack, count in counts.items()),
    }
    try:
        for name, text in files.items():
            atomic.replace(folder / name, text)
        if trace:
            atomic.replace(folder / TRACE, trace)
    except OSError as error:
        raise JobError(f"{folder} cannot be written: {error.strerror}", "name another directory") from error
    say(f"{folder / FLAME}: {sum(counts.values())} samples of its stacks; {FOLDED} has them for speedscope")
    if trace:
        say(f"{folder / TRACE}: torch's profiler, for https://ui.perfetto.dev")
    else:
        warn(f"no trace of torch's profiler: {result.without_trace}")
    return 0


def ask(job: JobDir, request: Profile) -> tuple[Profiled, bytes]:
    """The profile, and the bytes of the trace. Raises `JobError`."""
    parts: list[bytes] = []
    deadline = time.monotonic() + request.seconds + ANSWER_TIMEOUT
    try:
        with call_master(job) as master:
            master.send(Attach())
            master.send(request)
            while True:
                word = master.receive(max(deadline - time.monotonic(), 0.0))
                if isinstance(word, TracePart):
                    parts.append(word.data)
                    deadline = time.monotonic() + ANSWER_TIMEOUT
                elif isinstance(word, Profiled):
                    return word, b"".join(parts)
    except (StoreError, WireError, RendezvousError) as error:
        raise JobError(f"the master has not answered: {error}", "try again in a moment") from error
