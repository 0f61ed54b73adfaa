"""Which of several failures is the root cause, and the report of it for a person.

The first in time is, with one correction: a process that is killed drops its connections, and its peers
may raise an error about that before the kill itself is seen. A failure whose own words say that a peer
went away is therefore a consequence as long as there is one that does not say so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unirun.job.failures import Failure
from unirun.values import Value

_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket timeout|peer (is )?gone|"
    r"remote process has exited|NCCL communicator was aborted|ncclRemoteError|DistNetworkError|"
    r"DistStoreError|wait timeout after|timed out (waiting|after)|GroupError|WorkerLost",
    re.IGNORECASE,
)


class Diagnosis(Value):
    """The `cause`, the `reason` for taking it, and the `others` in order of time."""

    cause: Failure
    reason: str
    others: tuple[Failure, ...]


def is_consequence(failure: Failure) -> bool:
    """Whether the failure's own words say that a peer went away."""
    return bool(_PEER_GONE.search(failure.message))


def episode(failures: Sequence[Failure], gap: float = 5.0) -> tuple[Failure, ...]:
    """The failures that belong together with the last one.

    Of each role only the latest generation that failed counts, and, going back from the last failure, no
    silence longer than `gap` seconds lies between two of them.
    """
    latest = {
        f.worker.role: max(g.generation for g in failures if g.worker.role == f.worker.role) for f in failures
    }
    ordered = sorted((f for f in failures if f.generation == latest[f.worker.role]), key=lambda f: f.time)
    start = len(ordered) - 1
    while start > 0 and ordered[start].time - ordered[start - 1].time <= gap:
        start -= 1
    return tuple(ordered[max(start, 0) :])


def diagnose(failures: Sequence[Failure]) -> Diagnosis:
    """The root cause among `failures` (at least one)."""
    ordered = sorted(failures, key=lambda f: (f.time, f.worker.role, f.worker.rank, f.generation))
    firsts = [failure for failure in ordered if not is_consequence(failure)]
    cause = (firsts or ordered)[0]
    others = tuple(failure for failure in ordered if failure is not cause)
    if not others:
        reason = "the only failure"
    elif cause is ordered[0]:
        reason = f"the first of {len(ordered)} failures"
    else:
        reason = f"the first of {len(ordered)} failures that is not about a lost peer"
    return Diagnosis(cause, reason, others)


OTHERS_SHOWN = 8


def failure_report(reason: str, diagnosis: Diagnosis) -> str:
    """Several lines: the consequences first, then the cause with its traceback and its log."""
    cause = diagnosis.cause
    lines = [f"job failed: {reason}"]
    if diagnosis.others:
        lines.append(f"other failures ({len(diagnosis.others)}):")
        lines += [f"  {_short(failure, cause)}" for failure in diagnosis.others[:OTHERS_SHOWN]]
        if len(diagnosis.others) > OTHERS_SHOWN:
            lines.append(f"  … and {len(diagnosis.others) - OTHERS_SHOWN} more")
    lines.append(f"root cause: {cause.worker} on {cause.node}: {cause.exit} ({diagnosis.reason})")
    if cause.note:
        lines.append(f"  {cause.note}")
    words = cause.traceback or cause.message
    if not words and cause.tail:
        lines.append("  the end of its stderr:")
        words = cause.tail
    lines += [f"  {line}" for line in words.rstrip().splitlines()]
    lines.append(f"  log: {cause.log}/stderr.log")
    return "\n".join(lines)


def _short(failure: Failure, cause: Failure) -> str:
    later = failure.time - cause.time
    when = f"{abs(later):.3f} s {'later' if later >= 0 else 'before'}"
    words = failure.message.splitlines()[0][:160] if failure.message else failure.note
    return f"{failure.worker} on {failure.node}: {failure.exit}, {when}{': ' + words if words else ''}"
